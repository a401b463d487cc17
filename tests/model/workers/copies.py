"""Run by torchrun: gradients of two updates with any number of copies of the model, and how often copies add them up.

torchrun --nproc_per_node N tests/model/workers/copies.py MODEL BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from gradients import ALL, CASE, load, take_gradients
from helpers_data import plan_micro_batches
from objectives import packed_backward
from torch.distributed.fsdp import FSDPModule

from rl.ranks import init_ranks, shutdown_ranks


def main(path: str, batch_file: str, out: str) -> None:
    ranks = init_ranks()
    batch = torch.load(batch_file, weights_only=False)
    work = dict(max_tokens=16, world_size=ranks.size)
    results = {"micro_batches": len(plan_micro_batches(batch.lengths.tolist(), ALL, **work)[ranks.rank])}
    for size in (size for size in (1, 2, 4) if ranks.size % size == 0):
        model = load(path, ranks, torch.float64, fsdp_size=size)
        updates = []
        for _ in range(2):
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as call:
                packed_backward(model, batch, ALL, CASE, rank=ranks.rank, **work)
            updates.append((take_gradients(model), call.call_count))
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        results[size] = {"updates": updates, "units": units}
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
