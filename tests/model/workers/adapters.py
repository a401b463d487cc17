"""Run by torchrun: gradients of adapters, and what an engine and a reference would get, on any number of ranks.

torchrun --nproc_per_node N tests/model/workers/adapters.py MODEL BATCH OUT      writes OUT/rank{rank}.pt
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from helpers_families import gradients, load_with_adapters, make_them_count
from objectives import TEMPERATURE, packed_backward

from extras.lora import adapters as lora
from rl.data.batching import plan_update
from rl.data.types import Sampling
from rl.model import load as models
from rl.model.logprobs import fixed_logprobs
from rl.ranks import init_ranks, shutdown_ranks

CASE = ("ppo_clip", "token-mean")


def main(path: str, batch_file: str, out: str) -> None:
    ranks = init_ranks()
    batch = torch.load(batch_file, weights_only=False)
    results = {}
    for dtype, fsdp_size in ((torch.float32, None), (torch.float32, 1), (torch.bfloat16, None)):
        own = replace(ranks, dtype=dtype)
        model = make_them_count(load_with_adapters(path, own, fsdp_size=fsdp_size))
        found = {"dtypes": {name: x.dtype for name, x in model.named_parameters()}}
        for rows in (8, 1):  # one leaves a rank of two without work
            model.zero_grad()
            work = dict(max_tokens=60, rank=ranks.rank, world_size=ranks.size)
            packed_backward(model, batch, range(rows), CASE, **work)
            found[rows] = gradients(model)
        found["merged"] = {name: x.clone() for name, x in models.weights_for_engine(model, own)}
        plan = [plan_update(batch.lengths.tolist(), range(8), ranks=ranks, max_tokens=60)]
        for name, which in (("policy", model), ("base", lora.Base(model))):
            found[name] = ranks.all_reduce_sum(
                fixed_logprobs(which, batch, plan, sampling=Sampling(temperature=TEMPERATURE))
            )
        results[dtype, fsdp_size] = found
    torch.save(results, Path(out) / f"rank{ranks.rank}.pt")
    shutdown_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
