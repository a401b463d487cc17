"""Run by torchrun: values and gradients of sharded critics, which must come out the same on any number of ranks.

torchrun --nproc_per_node N tests/judges/workers/values.py CRITIC BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import helpers_scripts as h
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from extras import judges
from extras.judges import critic
from extras.lora import LoRA
from extras.offload import host
from rl.data.batching import plan_update
from rl.data.types import Batch, take_rows
from rl.model import load as models
from rl.model import sharding
from rl.model.sharding import Memory
from rl.ranks import Ranks, init_ranks, shutdown_ranks

LONGEST = 512  # tokens of a sequence
ALL, ONE = range(8), range(1)  # rows: one leaves a rank of two without work


def head_weight(size: int) -> torch.Tensor:
    """(1, size) weights of a value head that is not zero, in the precision of files."""
    return 0.3 * torch.randn(1, size, generator=torch.Generator().manual_seed(7))


def load_critic(path: str, ranks: Ranks) -> nn.Module:
    """A sharded critic as train_ppo.py loads it."""
    memory = Memory(activation_checkpointing="none", compile=False)
    return judges.load_critic(path, ranks, LoRA(), memory, longest=LONGEST, seed=0)


def objective(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """A number that every value moves. values (b, T)."""
    return ((values - batch.advantages) ** 2 * batch.response_mask).sum()


def backward(model: nn.Module, batch: Batch, rows: Iterable[int], *, max_tokens: int, ranks: Ranks) -> float:
    """This rank's micro-batches of one step; returns its share of the objective."""
    total = 0.0
    micro_batches = plan_update(batch.lengths.tolist(), list(rows), ranks=ranks, max_tokens=max_tokens).micro_batches
    for micro_rows in micro_batches:
        micro = take_rows(batch, micro_rows, ranks.device)
        loss = objective(micro, critic.token_values(model, micro))
        if isinstance(model, FSDPModule):
            sharding.backward(model, loss, is_last=micro_rows is micro_batches[-1])
        else:
            loss.backward()
        total += loss.item()
    return total


def load_in_double(path: str, ranks: Ranks) -> nn.Module:
    """`load_critic` in float64."""
    with mock.patch.object(models, "load_pretrained", h.load_in_double()):
        return load_critic(path, ranks)


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
            host.offload(model, optimizer)
            places.append({x.device.type for x in model.parameters()})
            places.append({x.device.type for s in optimizer.state.values() for n, x in s.items() if n != "step"})
            host.onload(model, ranks.device, optimizer)
        backward(model, batch, ALL, max_tokens=40, ranks=ranks)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return parameters(model), places


def measure(path: str, batch: Batch, ranks: Ranks) -> dict:
    """Everything this rank sees."""
    model = load_in_double(path, ranks)
    found = {"loaded": parameters(model), "exported": {name for name, _ in models.weights_for_engine(model, ranks)}}
    found["units"] = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for name, rows in (("all", ALL), ("one", ONE)):
        loss = torch.tensor(backward(model, batch, rows, max_tokens=40, ranks=ranks), dtype=torch.float64)
        found[name] = ranks.all_reduce_sum(loss).item(), gradients(model)
    update = plan_update(batch.lengths.tolist(), ONE, ranks=ranks, max_tokens=40)
    values = critic.fixed_values(model, batch, [update])
    found["values"] = ranks.all_reduce_sum(values.to(ranks.device)).cpu()
    found["trained"] = [
        train(load_in_double(path, ranks), batch, ranks, offloaded=offloaded) for offloaded in (False, True)
    ]
    return found


if __name__ == "__main__":
    here = init_ranks()
    found = measure(sys.argv[1], torch.load(sys.argv[2], weights_only=False), here)
    torch.save(found, Path(sys.argv[3]) / f"rank{here.rank}.pt")
    shutdown_ranks()
