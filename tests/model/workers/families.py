"""Run by torchrun: gradients of models of several families.

torchrun --nproc_per_node N tests/model/workers/families.py BATCH OUT NAME=MODEL ...      writes OUT/rank{rank}.pt
"""

import sys
from pathlib import Path

import torch
from helpers_families import gradients, load
from objectives import packed_backward

from rl.ranks import init_ranks, shutdown_ranks


def main(batch_file: str, out: str, *named: str) -> None:
    ranks, results = init_ranks(), {}
    batch = torch.load(batch_file, weights_only=False)
    work = dict(rank=ranks.rank, world_size=ranks.size)
    for name, path in (x.split("=") for x in named):
        model = load(path, ranks)
        packed_backward(model, batch, range(8), ("ppo_clip", "token-mean"), max_tokens=60, **work)
        results[name] = model.packed.layout is not None, gradients(model)
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
