"""Run by torchrun: a model whose experts ranks divide in several ways makes a step, is saved, and is loaded.

torchrun --nproc_per_node N tests/expert_parallel/divided_ranks.py MODEL FOLDER

Prints a line of JSON with how far it is from a model whose experts nobody divides, and what it is after it was loaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import helpers_families as families
import torch
import torch.distributed as dist
from torch import Tensor, nn

from extras.offload import offload, onload
from rl.data.types import Batch, take_rows
from rl.model.load import weights_for_engine
from rl.model.logprobs import token_logprobs
from rl.model.sharding import backward, clip_grad_norm
from rl.ranks import Ranks, init_ranks, shutdown_ranks
from rl.run import checkpoint_tensors as tensors


def step(model: nn.Module, ranks: Ranks) -> tuple[torch.optim.Optimizer, float]:
    """One step of AdamW, and the norm before the gradients were clipped. Ranks have rows of their own."""
    random = torch.Generator().manual_seed(ranks.rank)
    ids, mask = torch.randint(3, 80, (3, 20), generator=random), torch.ones(3, 20)
    mask[:, :2] = 0
    advantages = torch.randn(mask.shape, generator=random)
    batch = Batch(ids, torch.full((3,), 20), mask, torch.zeros_like(mask), advantages=advantages)
    logp, _ = token_logprobs(model, take_rows(batch, range(3)))
    backward(model, -(logp * advantages * mask).sum() / 100, is_last=True)
    norm = clip_grad_norm(model, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
    optimizer.step()
    return optimizer, norm


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Tensor]:
    """What an engine gets, and the moments."""
    moments = {
        f"{name} {kind}": optimizer.state[x][kind].full_tensor().clone()
        for name, x in model.named_parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return {name: x.clone() for name, x in weights_for_engine(model, ranks)} | moments


def distance(xs: dict[str, Tensor], ys: dict[str, Tensor]) -> float:
    """The largest difference of two entries, in units of the largest entry of their tensor."""
    assert xs.keys() == ys.keys()
    return max(((x - ys[name]).abs().max() / ys[name].abs().max()).item() for name, x in xs.items())


def main(path: str, folder: Path) -> None:
    ranks = init_ranks()
    degrees = [n for n in (1, 2, 4) if n <= ranks.size]
    models = {E: families.load(path, ranks, expert_parallel_size=E) for E in degrees}
    local = [{x.num_experts for x in model.modules() if hasattr(x, "_apply_gate")} for model in models.values()]
    before = {name: x.clone() for name, x in weights_for_engine(models[1], ranks)}
    facts: dict[str, Any] = {"norms": [], "experts": [x.pop() for x in local], "weights": [], "steps": [], "loaded": []}
    after = {}
    for E, model in models.items():
        facts["weights"].append(distance(dict(weights_for_engine(model, ranks)), before))
        offload(model)
        onload(model, ranks.device)
        optimizer, norm = step(model, ranks)
        after[E] = whole(model, optimizer, ranks)
        facts["norms"].append(norm)
        facts["steps"].append(distance(after[E], after[1]))
        if E == 2:
            to_save = tensors.tensors_to_save({"actor": (model, optimizer)})
            tensors.write(folder, ranks.rank, {k: x.clone() for k, x in to_save.tensors.items()}, to_save.places)
    facts["moved"] = distance({name: after[1][name] for name in before}, before)
    dist.barrier()
    for E in degrees:
        model = families.load(path, ranks, expert_parallel_size=E)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
        tensors.load(tensors.read(folder, ranks.size), {"actor": (model, optimizer)})
        facts["loaded"].append(distance(whole(model, optimizer, ranks), after[2]))
    if ranks.is_main:
        print(json.dumps(facts), flush=True)
    shutdown_ranks()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
