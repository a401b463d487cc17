"""Seconds of generation by three ways to read vLLM, in turn, in one engine: ways.py FIXED RAGGED TOKENS.

FIXED and RAGGED are models of benchmarks/step_time.py. Run it in the root of the repository.
"""

import json
import sys
import time
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from rl.data.types import Sampling
from rl.ranks import init_ranks
from rl.sampling.engines import vllm
from rl.sampling.engines.vllm_requests import Requests, Shortcuts
from rl.sampling.rollout import sample_groups


class Numbers(NamedTuple):
    """In place of vLLM's LogprobsLists, which makes three arrays for every token."""

    of_sampled: list[float]

    def slice_request(self, sequence: int, num_tokens: int) -> float:
        return self.of_sampled[sequence]


class RequestsWithNumbers(Requests):
    """Log-probs as plain numbers, all tokens through vLLM's scheduler."""

    def __init__(self, llm: Any):
        super().__init__(llm)
        update = self.scheduler.update_from_output

        def update_with_numbers(scheduled: Any, output: Any) -> Any:
            if output.logprobs is not None:
                output.logprobs = Numbers(output.logprobs.logprobs[:, 0].tolist())
            return update(scheduled, output)

        self.scheduler.update_from_output = update_with_numbers

    def _logprob(self, found: float) -> float:
        return found


WAYS = {"shortcuts": Shortcuts, "core": Requests, "core_numbers": RequestsWithNumbers}
fixed, ragged, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
ranks = init_ranks()
limits = dict(max_model_len=128 + tokens, max_num_seqs=1024)
engine = vllm.Engine(fixed, ranks, ranks.dtype, load_weights=True, free_cache_engine=False, **limits)
rows = [{"prompt_ids": [15 + (i * 7 + j) % 10 for j in range(128)], "row_index": i} for i in range(64)]


def run(way: str, stops: tuple[int, ...], seed: int, max_tokens: int = tokens) -> tuple[float, int]:
    for name in ("schedule", "update_from_output"):  # vLLM's own again
        vars(engine.core.scheduler).pop(name, None)
    engine.core = WAYS[way](engine.llm)
    engine.llm.reset_prefix_cache()
    torch.cuda.synchronize()
    start = time.perf_counter()
    sampling = Sampling(8, 1.0, max_tokens=max_tokens, stop_token_ids=stops)
    samples, _ = sample_groups(engine, rows, sampling, seed=seed)
    torch.cuda.synchronize()
    return time.perf_counter() - start, sum(len(s.response_ids) for s in samples)


for way in WAYS:
    run(way, (), 9, 64)
ends = tuple(GenerationConfig.from_pretrained(ragged).eos_token_id)
for lengths, stops in (("fixed", ()), ("ragged", ends)):
    for seed in (1, 2):
        for way in WAYS:
            seconds, count = run(way, stops, seed)
            found = dict(way=way, lengths=lengths, seed=seed, seconds=round(seconds, 3), tokens=count)
            print(json.dumps(found), flush=True)
engine.close()
