"""What ranks send each other between sampling and training: seconds and bytes of a step's exchange, without any model.

    torchrun --nproc_per_node 4 benchmarks/exchange.py --responses 16384 --tokens 8192
    CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node 4 benchmarks/exchange.py     # on the CPU of a machine with GPUs

Every rank makes up its share of the responses, of random lengths up to --tokens, 8 to a prompt. Timed, in seconds of
the slowest rank: `share`, which tells all ranks the scores and lengths, and `make_batch`, which plans the updates and
sends each rank the tokens that it trains on. Bytes are what rank 0 receives from others. Prints one line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rl.data.batching import make_batch
from rl.data.types import Sample, Score
from rl.ranks import Ranks, init_ranks, shutdown_ranks
from rl.sampling.responses import gather_responses, scores_of

GROUP = 8  # responses to a prompt
BYTES_PER_TOKEN = 4 + 1 + 4  # of a response on its way to another rank: id, mask, log-prob


@dataclass(frozen=True)
class Args:
    responses: int = 512  # The step has this many responses, over all ranks.
    tokens: int = 8192  # A response has at most this many tokens.
    prompt_tokens: int = 128  # Every prompt has this many tokens.
    mini_batches: int = 1  # The step has this many optimizer steps.
    max_tokens: int = 16384  # A micro-batch has at most this many tokens.
    rounds: int = 3  # There are this many rounds, of which the fastest counts.


def make_own(args: Args, ranks: Ranks) -> tuple[list[dict], list[Sample]]:
    """All rows, and this rank's samples with scores."""
    rows = [
        {"row_index": i, "prompt_ids": np.random.default_rng(i).integers(0, 150_000, args.prompt_tokens).tolist()}
        for i in range(args.responses // GROUP)
    ]
    rng, samples, text = np.random.default_rng(1000 + ranks.rank), [], "x" * int(3.5 * args.tokens)
    for row in ranks.own_slice(rows):
        for n in rng.integers(args.tokens // 2, args.tokens + 1, GROUP):
            ids, logprobs = rng.integers(0, 150_000, n), -rng.random(n)
            right = float(len(samples) % 2)
            score = Score(text, right, {"acc": right}, "ok", 0.1)
            index = row["row_index"]
            samples.append(Sample(row["prompt_ids"], ids, np.ones(n), logprobs, "stop", index, score=score))
    return rows, samples


def timed(ranks: Ranks, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, and what the work returns."""
    dist.barrier(group=ranks.group)
    start = time.perf_counter()
    result = work()
    return max(ranks.all_gather([time.perf_counter() - start])), result


def main(args: Args) -> dict[str, float]:
    """Measure, print, and return the figures."""
    ranks = init_ranks()
    rows, samples = make_own(args, ranks)
    limits = dict(mini_batch_size=args.responses // args.mini_batches, max_tokens=args.max_tokens)
    best: dict[str, float] = {}
    for _ in range(args.rounds):
        sharing, responses = timed(ranks, lambda: gather_responses(samples, rows, ranks))
        learn = scores_of(responses).isfinite()
        plan = partial(make_batch, responses, learn, ranks=ranks, **limits)
        batching, (batch, _) = timed(ranks, plan)
        found = {"share_s": sharing, "make_batch_s": batching, "total_s": sharing + batching}
        best = min(best or found, found, key=lambda x: x["total_s"])
    moved = [responses[i] for i in batch.rows.tolist() if responses[i].rank != ranks.rank]
    best["tokens_received_mb"] = sum(BYTES_PER_TOKEN * r.num_response_tokens for r in moved) / 1e6
    best["batch_mb"] = sum(x.nbytes for x in batch.tensors().values()) / 1e6
    if ranks.is_main:
        print(json.dumps({"ranks": ranks.size, "responses": args.responses, "tokens": args.tokens, **best}))
    shutdown_ranks()
    return best


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
