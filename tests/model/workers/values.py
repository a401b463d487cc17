"""Run by torchrun: values and gradients of sharded critics, which must come out the same on any number of ranks.

torchrun --nproc_per_node N tests/models/workers/values.py MODEL CRITIC BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import helpers_data
import helpers_scripts as h
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl.data.batching import plan_micro_batches
from rl.data.types import Batch, Sampling, take_rows
from rl.model import critic, reward_model, sharding
from rl.model import load as models
from rl.ranks import Ranks, init_ranks, shutdown_ranks

TEMPERATURE = 0.7
ALL, ONE = range(8), range(1)  # rows: one leaves a rank of two without work


def arguments(**changes: object) -> SimpleNamespace:
    """What `load_critic`, `check_critic` and `load_policy` want to know of a script's Args."""
    paths = dict(model=None, critic_model=None, max_prompt_length=12, max_response_length=500)
    memory = dict(activation_checkpointing="none", compile=False, fsdp_size=None, param_offload=False)
    return SimpleNamespace(**paths | memory | changes)


def head_weight(size: int) -> torch.Tensor:
    """(1, size) weights of a value head that is not zero, in the precision of files."""
    return 0.3 * torch.randn(1, size, generator=torch.Generator().manual_seed(7))


def objective(
    batch: Batch, values: torch.Tensor, logp: torch.Tensor | None = None, entropy: torch.Tensor | None = None
) -> torch.Tensor:
    """A number that every value, and every log-prob and entropy if given, moves. All (b, T)."""
    loss = (values - batch.advantages) ** 2
    if logp is not None:
        loss = loss - batch.advantages * logp - 0.1 * entropy
    return (loss * batch.response_mask).sum()


def backward(model: nn.Module, batch: Batch, rows: Iterable[int], *, max_tokens: int, ranks: Ranks) -> float:
    """This rank's micro-batches of one step; returns its share of the objective."""
    total = 0.0
    plans = plan_micro_batches(batch.lengths.tolist(), list(rows), world_size=ranks.data_size, max_tokens=max_tokens)
    for micro_rows in plans[ranks.data_rank]:
        micro = take_rows(batch, micro_rows, ranks.device)
        if hasattr(model, "value_head"):
            logp, entropy, values = critic.token_logprobs_and_values(
                model, micro, sampling=Sampling(temperature=TEMPERATURE), entropy_grad=True
            )
            loss = objective(micro, values, logp, entropy)
        else:
            loss = objective(micro, critic.token_values(model, micro))
        if isinstance(model, FSDPModule):
            sharding.last_micro_batch(model, micro_rows is plans[ranks.data_rank][-1])
        loss.backward()
        total += loss.item()
    return total


def add_ones(policy: nn.Module, add: object = models.add_value_head) -> None:
    """A value head of nonsense, where rank 0 has zeros: sharding must spread rank 0's."""
    add(policy)
    nn.init.ones_(policy.value_head.weight)


def load(kind: str, path: str, ranks: Ranks) -> nn.Module:
    """A sharded model as a script loads it, but in float64; only rank 0 may read the folder's weights."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(models, "load_causal_lm", h.load_in_double()))
        patches.enter_context(mock.patch.object(reward_model, "load_pretrained", h.load_critic_in_double()))
        if not ranks.is_main:
            refusal = AssertionError("only rank 0 reads the weights")
            for kind_of_model in (AutoModelForSequenceClassification, AutoModelForCausalLM):
                patches.enter_context(mock.patch.object(kind_of_model, "from_pretrained", side_effect=refusal))
            patches.enter_context(mock.patch.object(models, "add_value_head", add_ones))
        if kind == "critic":
            return critic.load_critic(arguments(critic_model=path), ranks)
        return models.load_policy(arguments(model=path), ranks, value_head=True)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, which are then cleared."""
    whole = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return whole


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in sharding.full_tensors(model)}


def train(model: nn.Module, batch: Batch, ranks: Ranks, *, offloaded: bool) -> tuple[dict, list]:
    """Weights after three steps, and where model and optimizer were between them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    places = []
    for _ in range(3):
        if offloaded:
            sharding.offload(model, optimizer)
            places.append({x.device.type for x in model.parameters()})
            places.append({x.device.type for s in optimizer.state.values() for n, x in s.items() if n != "step"})
            sharding.onload(model, ranks.device, optimizer)
        backward(model, batch, ALL, max_tokens=40, ranks=ranks)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return parameters(model), places


def measure(model_path: str, critic_path: str, batch: Batch, ranks: Ranks) -> dict:
    """Everything this rank sees."""
    results = {}
    for kind, path in (("critic", critic_path), ("shared", model_path)):
        model = load(kind, path, ranks)
        pushed = {name: tensor.dtype for name, tensor in models.weights_for_engine(model, ranks)}
        found = {"loaded": parameters(model), "for the engine": pushed}
        found["units"] = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        if kind == "shared":  # zeros would hide a lost gradient of the backbone
            with torch.no_grad():
                weight = model.value_head.weight
                first = weight.to_local()  # one row, so rank 0 holds all of it
                first.copy_(head_weight(weight.shape[1])[: len(first)])
        for name, rows in (("all", ALL), ("one", ONE)):
            loss = torch.tensor(backward(model, batch, rows, max_tokens=40, ranks=ranks), dtype=torch.float64)
            found[name] = ranks.all_reduce_sum(loss).item(), gradients(model)
        plans = plan_micro_batches(batch.lengths.tolist(), ONE, world_size=ranks.data_size, max_tokens=40)
        updates = [helpers_data.update(*plans[ranks.data_rank])]
        values = critic.fixed_values(model, batch, updates)
        found["values"] = ranks.all_reduce_sum(values.to(ranks.device)).cpu()
        found["trained"] = [
            train(load(kind, path, ranks), batch, ranks, offloaded=offloaded) for offloaded in (False, True)
        ]
        results[kind] = found
    return results


if __name__ == "__main__":
    here = init_ranks()
    found = measure(*sys.argv[1:3], torch.load(sys.argv[3], weights_only=False), here)
    torch.save(found, Path(sys.argv[4]) / f"rank{here.rank}.pt")
    shutdown_ranks()
