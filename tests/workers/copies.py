"""Run by torchrun: gradients of two updates with any number of copies of the model, and how often copies add them up.

torchrun --nproc_per_node N tests/workers/copies.py MODEL BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from objectives import packed_backward
from torch.distributed.fsdp import FSDPModule

from rl import fsdp
from rl.batching import plan_micro_batches

CASE = ("ppo_clip", "token-mean")


def main(path: str, batch_file: str, out: str) -> None:
    d = fsdp.init_distributed()
    batch = torch.load(batch_file, weights_only=False)
    micros = plan_micro_batches(batch.lengths.tolist(), range(8), world_size=d.world_size, max_tokens=16)[d.rank]
    results = {"micro_batches": len(micros)}
    for size in (size for size in (1, 2, 4) if d.world_size % size == 0):
        model = fsdp.shard(fsdp.load_policy(path, d, dtype=torch.float64), d, fsdp_size=size)
        updates = []
        for _ in range(2):
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as call:
                share = packed_backward(
                    model, batch, range(8), CASE, max_tokens=16, rank=d.rank, world_size=d.world_size
                )
            gradients = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
            model.zero_grad(set_to_none=True)
            updates.append((share, gradients, call.call_count))
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        results[size] = {"updates": updates, "units": units}
    torch.save(results, Path(out) / f"rank{d.rank}.pt")
    fsdp.shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
