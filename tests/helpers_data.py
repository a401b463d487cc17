"""What the tests of batches, metrics and ranks share: ranks that talk to nobody, samples, and responses."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl.data.batching import Update, plan_update
from rl.data.types import Sample, Score
from rl.ranks import Ranks


def ranks_without_group(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Ranks:
    """One of this many ranks, for functions that only ask which one they run on."""
    return Ranks(rank, size, torch.device("cpu"), dtype, rank, size, None, None)


def plan_micro_batches(
    lengths: Sequence[int], rows: Sequence[int] | None = None, *, world_size: int, **options: Any
) -> list[list[list[int]]]:
    """The micro-batches that `plan_update` gives each of this many ranks."""
    every = [ranks_without_group(rank, world_size) for rank in range(world_size)]
    return [plan_update(lengths, rows, ranks=ranks, **options).micro_batches for ranks in every]


def update(*micro_batches: Sequence[int]) -> Update:
    """An optimizer step of which this rank has these micro-batches."""
    rows = [row for micro in micro_batches for row in micro]
    return Update(range(max(rows, default=-1) + 1), list(map(list, micro_batches)), 0.0, 0.0, [])


def sample(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_mask: Sequence[int] | None = None,
    rollout_logprobs: Sequence[float] | None = None,
    row_index: int = 0,
    finish_reason: str = "stop",
) -> Sample:
    """By default the policy sampled all of the response, with log-probs -0.5, -1, -1.5, ..."""
    mask = [1] * len(response_ids) if response_mask is None else response_mask
    logprobs = [-0.5 * (i + 1) for i in range(len(response_ids))] if rollout_logprobs is None else rollout_logprobs
    return Sample(prompt_ids, response_ids, mask, logprobs, finish_reason, row_index)


def versions_of(prompt_ids: Sequence[int], *spans: tuple[int, int]) -> dict[str, np.ndarray]:
    """The columns of a sample whose response consists of tokens in a row that such a version of the weights sampled
    (version, count); those of version -1 were not sampled.
    """
    versions = [v for v, count in ((-1, len(prompt_ids)), *spans) for _ in range(count)]
    return {"versions": np.array([np.iinfo(np.int32).max if v < 0 else v for v in versions], np.int32)}


def spans_of(x: Sample) -> tuple[tuple[int, int], ...]:
    """Which weights have sampled the tokens of a response: (version, count) of sampled tokens in a row."""
    versions = x.columns["versions"]
    known = versions[versions < np.iinfo(np.int32).max].tolist()
    return tuple((version, len(list(same))) for version, same in itertools.groupby(known))


def scored(
    value: float | None, components: dict | None = None, status: str = "ok", seconds: float = 0.0, text: str = "text"
) -> Score:
    """A score of a response that says `text`."""
    return Score(text, value, components or {}, status, seconds)


def response(prompt: int = 1, length: int = 1, **changes: Any) -> Sample:
    """A response of this many tokens to a prompt of this many, on a rank that has no tokens of it."""
    facts = dict(
        prompt_ids=np.ones(prompt, np.int32),
        response_ids=None,
        response_mask=None,
        rollout_logprobs=None,
        finish_reason="stop",
        row_index=0,
        score=scored(0.0),
        num_response_tokens=length,
        num_sampled=length,
    )
    return Sample(**facts | changes)
