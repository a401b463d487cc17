"""Run by torchrun: values and gradients of sharded critics, which must come out the same on any number of ranks.

torchrun --nproc_per_node N tests/models/workers/values.py MODEL CRITIC BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl import critic, fsdp
from rl.batching import plan_micro_batches
from rl.fsdp import Dist
from rl.types import Batch, select

TEMPERATURE = 0.7
ALL, ONE = range(8), range(1)  # rows: one leaves a rank of two without work


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


def backward(model: nn.Module, batch: Batch, rows: Iterable[int], *, max_tokens: int, d: Dist) -> float:
    """This rank's micro-batches of one step; returns its share of the objective."""
    total = 0.0
    plans = plan_micro_batches(batch.lengths.tolist(), list(rows), world_size=d.world_size, max_tokens=max_tokens)
    for micro_rows in plans[d.rank]:
        micro = select(batch, micro_rows, d.device)
        if hasattr(model, "value_head"):
            logp, entropy, values = critic.token_logprobs_and_values(
                model, micro, temperature=TEMPERATURE, entropy_grad=True
            )
            loss = objective(micro, values, logp, entropy)
        else:
            loss = objective(micro, critic.token_values(model, micro))
        if isinstance(model, FSDPModule):
            fsdp.last_micro_batch(model, micro_rows is plans[d.rank][-1])
        loss.backward()
        total += loss.item()
    return total


def load_shared(path: str, d: Dist, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The policy with a value head of zeros on rank 0, of nonsense elsewhere: sharding must spread rank 0's."""
    policy = fsdp.load_policy(path, d, dtype=dtype)
    critic.add_value_head(policy)
    if not d.is_main:
        nn.init.ones_(policy.value_head.weight)
    return policy


def load(kind: str, path: str, d: Dist) -> nn.Module:
    """A sharded model in float64 as a script loads it; only rank 0 may read the folder's weights."""
    function = {
        "critic": lambda: critic.load_critic(path, d, dtype=torch.float64),
        "shared": lambda: load_shared(path, d),
    }
    if d.is_main:
        return fsdp.shard(function[kind](), d)
    refusal = AssertionError("only rank 0 reads the weights")
    with (
        mock.patch.object(AutoModelForSequenceClassification, "from_pretrained", side_effect=refusal),
        mock.patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=refusal),
    ):
        return fsdp.shard(function[kind](), d)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, which are then cleared."""
    whole = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return whole


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in fsdp.full_tensors(model, value_head=True)}


def train(model: nn.Module, batch: Batch, d: Dist, *, offloaded: bool) -> tuple[dict, list]:
    """Weights after three steps, and where model and optimizer were between them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    places = []
    for _ in range(3):
        if offloaded:
            fsdp.offload(model, optimizer)
            places.append({x.device.type for x in model.parameters()})
            places.append({x.device.type for s in optimizer.state.values() for n, x in s.items() if n != "step"})
            fsdp.onload(model, d.device, optimizer)
        backward(model, batch, ALL, max_tokens=40, d=d)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return parameters(model), places


def measure(model_path: str, critic_path: str, batch: Batch, d: Dist) -> dict:
    """Everything this rank sees."""
    results = {}
    for kind, path in (("critic", critic_path), ("shared", model_path)):
        model = load(kind, path, d)
        found = {"loaded": parameters(model), "names": [name for name, _ in fsdp.full_tensors(model)]}
        found["units"] = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        if kind == "shared":  # zeros would hide a lost gradient of the backbone
            with torch.no_grad():
                weight = model.value_head.weight
                first = weight.to_local()  # one row, so rank 0 holds all of it
                first.copy_(head_weight(weight.shape[1])[: len(first)])
        for name, rows in (("all", ALL), ("one", ONE)):
            loss = torch.tensor(backward(model, batch, rows, max_tokens=40, d=d), dtype=torch.float64)
            found[name] = fsdp.all_reduce_sum(loss).item(), gradients(model)
        plan = plan_micro_batches(batch.lengths.tolist(), ONE, world_size=d.world_size, max_tokens=40)[d.rank]
        found["values"] = fsdp.all_reduce_sum(
            critic.fixed_values(model, batch, plan, device=d.device).to(d.device)
        ).cpu()
        found["trained"] = [train(load(kind, path, d), batch, d, offloaded=offloaded) for offloaded in (False, True)]
        results[kind] = found
    return results


if __name__ == "__main__":
    here = fsdp.init_distributed()
    found = measure(*sys.argv[1:3], torch.load(sys.argv[3], weights_only=False), here)
    torch.save(found, Path(sys.argv[4]) / f"rank{here.rank}.pt")
    fsdp.shutdown_distributed()
