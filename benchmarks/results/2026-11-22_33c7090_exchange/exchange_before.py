"""The exchange of benchmarks/exchange.py with the code of 399c1ea: run with PYTHONPATH at a checkout of that."""

import json
import time
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
import tyro

from rl import fsdp
from rl.batching import collate, plan_updates, shared_prefix
from rl.scoring import Score
from rl.types import Sample

GROUP = 8


@dataclass(frozen=True)
class Args:
    responses: int = 512
    tokens: int = 8192
    prompt_tokens: int = 128
    mini_batches: int = 1
    max_tokens: int = 16384
    rounds: int = 3


def main(args):
    d = fsdp.init_distributed()
    rows = [
        {"row_index": i, "prompt_ids": np.random.default_rng(i).integers(0, 150_000, args.prompt_tokens).tolist()}
        for i in range(args.responses // GROUP)
    ]
    rng, samples = np.random.default_rng(1000 + d.rank), []
    for row in fsdp.own_slice(rows, d):
        for n in rng.integers(args.tokens // 2, args.tokens + 1, GROUP):
            ids, logprobs = rng.integers(0, 150_000, n), -rng.random(n)
            samples.append(Sample(row["prompt_ids"], ids, np.ones(n), logprobs, "stop", row["row_index"]))
    scores = [
        Score("x" * int(3.5 * args.tokens) + str(i), float(i % 2), {"acc": float(i % 2)}, "ok", 0.1)
        for i in range(len(samples))
    ]

    def timed(work):
        dist.barrier()
        start = time.perf_counter()
        result = work()
        return max(fsdp.all_gather([time.perf_counter() - start], d)), result

    def batching(all_samples):
        batch = collate(all_samples, pad_id=0)
        return batch, plan_updates(
            batch.lengths.tolist(),
            shared=shared_prefix(batch).tolist(),
            mini_batch_size=args.responses // args.mini_batches,
            max_tokens=args.max_tokens,
            rank=d.rank,
            world_size=d.world_size,
        )

    best = {}
    for _ in range(args.rounds):
        sharing, scored = timed(lambda: fsdp.all_gather(zip(samples, scores, strict=True), d))
        every, _ = zip(*scored, strict=True)
        b, (batch, _) = timed(lambda every=every: batching(every))
        found = {"share_s": sharing, "make_batch_s": b, "total_s": sharing + b}
        best = min(best or found, found, key=lambda x: x["total_s"])
        size = sum(x.nbytes for x in vars(batch).values() if x is not None) / 1e6
        received = (
            sum(9 * len(s.response_ids) + 4 * len(s.prompt_ids) + int(3.5 * args.tokens) for s in every)
            * (1 - 1 / d.world_size)
            / 1e6
        )
        del scored, every, batch
    if d.is_main:
        print(
            json.dumps(
                {
                    "before": True,
                    "ranks": d.world_size,
                    "responses": args.responses,
                    "tokens": args.tokens,
                    **best,
                    "received_mb": received,
                    "batch_mb": size,
                }
            )
        )
    fsdp.shutdown_distributed()


main(tyro.cli(Args))
