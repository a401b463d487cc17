"""Run by torchrun: log-probs and gradients of models that run on slices, beside those of one process.

torchrun --nproc_per_node N tests/sequence_parallel/sliced_ranks.py CASES      CASES: {name: changes of `Case`} as JSON

Prints a line of JSON for each case, with its name and how far the ranks are from one process.
"""

import copy
import json
import sys
from dataclasses import dataclass
from typing import Any

import helpers_families as families
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters

from extras.families.ways import family, use_way
from extras.lora import LoRA
from extras.sequence_parallel import groups, slice_tokens
from rl.data.batching import plan_update, shared_prefix
from rl.data.types import Batch, Sampling, take_rows
from rl.flags import build
from rl.model.attention import choose_attention, use_attention
from rl.model.logprobs import add_packed_forward, token_logprobs
from rl.model.sharding import backward, clip_grad_norm, shard
from rl.ranks import Ranks, init_ranks, shutdown_ranks
from rl.run.supervised import MemorySupervised

SIZES = families.SIZES | dict(num_attention_heads=8, head_dim=8)
KINDS = {  # a config, and what it has besides SIZES
    "dense": ("Qwen3Config", {}),
    "window": ("Gemma3TextConfig", dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "experts": ("Qwen3MoeConfig", families.EXPERTS),
    "eight experts": ("Qwen3MoeConfig", families.EXPERTS | dict(num_experts=8, num_local_experts=8)),
    "latent attention": (
        "DeepseekV3Config",
        families.EXPERTS
        | dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=8)
        | dict(num_key_value_heads=8, n_routed_experts=6, n_shared_experts=1, n_group=1, topk_group=1)
        | dict(first_k_dense_replace=1),
    ),
    "scaled logits": ("GraniteConfig", dict(logits_scaling=8.0)),
}
SAMPLING = Sampling(temperature=0.7, top_p=0.95)
LENGTHS = (41, 30, 25, 37, 9, 22, 40, 13)


@dataclass(frozen=True)
class Case:
    """A model, its memory flags, and rows."""

    degree: int
    kind: str = "dense"
    key_heads: int = 2
    rows: int = 8
    tokens: int = 100  # of a micro-batch, on all ranks that share it
    lora: bool = False
    replays: bool = False  # experts that are named
    expert_parallel_size: int = 1
    wrong: bool = False  # a loss that is too large by the degrees
    dtype: str = "float32"
    activation_checkpointing: str = "none"
    compile: bool = False
    fsdp_size: int | None = None
    param_offload: bool = False

    @property
    def memory(self) -> MemorySupervised:
        """The memory flags."""
        names = ("activation_checkpointing", "compile", "fsdp_size", "param_offload", "expert_parallel_size")
        return build(MemorySupervised, **{name: getattr(self, name) for name in names})


def make_model(case: Case) -> nn.Module:
    """A model on the host that can run packed, with adapters that count if there are any."""
    kind, options = KINDS[case.kind]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**SIZES | dict(num_key_value_heads=case.key_heads) | options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype)).eval()
    use_attention(model, choose_attention(torch.device("cpu"), torch.float32))
    add_packed_forward(model)
    if case.lora:
        build(LoRA, lora_rank=4).apply(model, path="", seed=0, ranks=init_ranks())
        families.make_them_count(model)
    if case.kind == "scaled logits":
        use_way(model, families.OWN_HEAD)
    return set_replay(model, case)


def set_replay(model: nn.Module, case: Case) -> nn.Module:
    """Let the routers of a model use the experts that a batch names, if the case says so."""
    if case.replays:
        family(model, "experts").replays = True
    return model


def make_batch(case: Case) -> Batch:
    """Rows of 9 to 41 tokens, some of which begin alike, with prompts of 3 to 10 tokens and gaps in the responses."""
    random = torch.Generator().manual_seed(1)
    dtype, T = getattr(torch, case.dtype), max(LENGTHS)
    ids = torch.randint(3, 80, (len(LENGTHS), T), generator=random)
    ids[1:4, :10], ids[6:8, :7] = ids[0, :10], ids[5, :7]
    lengths, position = torch.tensor(LENGTHS), torch.arange(T)
    mask = ((position >= 10) & (position < lengths[:, None])).to(dtype)
    mask[4] = (position >= 3) & (position < 9)
    mask[:, 15:18] = 0
    advantages = torch.randn(mask.shape, generator=random, dtype=dtype)
    columns = {}
    if case.replays:
        routed = torch.randint(0, 6, (*ids.shape, 2, 2), generator=random)
        routed[..., 1] = (routed[..., 0] + 1 + routed[..., 1] % 5) % 6  # two different ones
        routed[2, 20:] = 255  # not known
        routed[1:4, :10], routed[6:8, :7] = routed[0, :10], routed[5, :7]
        columns["routed_experts"] = routed.to(torch.uint8)
    whole = Batch(ids, lengths, mask, torch.zeros_like(mask), advantages=advantages, columns=columns)
    return take_rows(whole, range(case.rows))


def loss_of(logp: Tensor, entropy: Tensor, batch: Batch, count: float) -> Tensor:
    """A policy gradient with an entropy bonus, divided by the tokens of all rows."""
    return (-(logp * batch.advantages + 0.01 * entropy) * batch.response_mask).sum() / count


def alone(case: Case, model: nn.Module, batch: Batch) -> dict[str, Any]:
    """What one process computes, in one micro-batch and without sharding."""
    model = set_replay(add_packed_forward(copy.deepcopy(model)), case)
    if case.kind == "scaled logits":
        use_way(model, families.OWN_HEAD)
    logp, entropy = token_logprobs(model, batch, sampling=SAMPLING, entropy_grad=True)
    loss = loss_of(logp, entropy, batch, batch.response_mask.sum().item())
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    norm = torch.stack([x.norm() for x in gradients.values()]).norm().item()
    facts = {"logp": logp.detach(), "entropy": entropy.detach(), "loss": loss.item(), "norm": norm}
    return facts | {"gradients": gradients}


def measure(case: Case, ranks: Ranks) -> dict[str, Any]:
    """How far ranks with slices are from one process."""
    model, batch = make_model(case), make_batch(case)
    expected = [alone(case, model, batch) if ranks.is_main else None]
    dist.broadcast_object_list(expected)
    [expected] = expected
    ranks = groups.with_groups(ranks, case.degree)
    model = shard(model, ranks, case.memory)
    slice_tokens(model, ranks)
    use_attention(model, model.packed.attention)
    update = plan_update(
        batch.lengths.tolist(), max_tokens=case.tokens // case.degree, ranks=ranks, shared=shared_prefix(batch).tolist()
    )
    count, loss, graphs = batch.response_mask.sum().item(), torch.zeros((), dtype=torch.float64), []
    counters.clear()
    differences = {"logp": 0.0, "entropy": 0.0}
    for rows in update.micro_batches:
        micro = take_rows(batch, rows)
        logp, entropy = token_logprobs(model, micro, sampling=SAMPLING, entropy_grad=True)
        share = loss_of(logp, entropy, micro, count) * (case.degree * case.expert_parallel_size if case.wrong else 1)
        backward(model, share, is_last=rows is update.micro_batches[-1])
        loss += share.detach()
        graphs.append(counters["stats"]["unique_graphs"])
        for name, x in {"logp": logp, "entropy": entropy}.items() if rows else ():
            error = (x - expected[name][rows, : x.shape[1]]).abs().max().item()
            differences[name] = max(differences[name], error)
    gradients = families.gradients(model)
    assert gradients.keys() == expected["gradients"].keys()
    errors = torch.stack([(x - expected["gradients"][name]).double().norm() for name, x in gradients.items()])
    found = {name: max(ranks.all_gather([x])) for name, x in differences.items()}
    found["gradients"] = errors.norm().item() / expected["norm"]
    found["loss"] = ranks.all_reduce_sum(loss).item() - expected["loss"]
    found["norm"] = clip_grad_norm(model, 1e-3) / expected["norm"]
    found |= {"graphs_of_first": graphs[0], "graphs": graphs[-1], "graph_breaks": sum(counters["graph_break"].values())}
    # Rows of each micro-batch, by data rank.
    found["rows"] = ranks.all_gather([[len(rows) for rows in update.micro_batches]])[:: case.degree]
    return found


def main(cases: str) -> None:
    torch_compile = torch.compile
    torch.compile = lambda function, options=None, **rest: torch_compile(function, backend="aot_eager", **rest)
    ranks = init_ranks()
    for name, changes in json.loads(cases).items():
        found = measure(Case(**changes), ranks)
        if ranks.is_main:
            sys.stdout.write(json.dumps({"case": name} | found) + "\n")
            sys.stdout.flush()
    shutdown_ranks()


if __name__ == "__main__":
    main(sys.argv[1])
