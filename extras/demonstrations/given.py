"""Responses that come with the rows of a step, as if they had been sampled."""

from collections.abc import Sequence

import numpy as np

from rl.data.types import Sample, Score
from rl.ranks import Ranks

NO_NUMBER = -2  # of a response that its rank has not sampled, so that it is the neighbor of no other


def given_responses(rows: Sequence[dict], ranks: Ranks) -> list[Sample]:
    """The responses that come with rows, see `encode.add_given`, as if they had been sampled: the first of a row has
    the score 1, the others 0, and the engine's log-probs are 0.

    Every rank has all rows, so nothing is sent. As after `gather_responses`, a rank has the tokens of its slice only.
    """
    n, responses = len(rows), []
    ranks_of_rows = [r for r in range(ranks.size) for _ in ranks.slice_of(n, r)]
    for row, rank in zip(rows, ranks_of_rows, strict=True):
        for i, ids in enumerate(row["given"]):
            zeros = np.zeros(len(ids))
            sample = Sample(
                row["prompt_ids"],
                ids,
                zeros + 1,
                zeros,
                "stop",
                row["row_index"],
                score=Score("", float(i == 0), {}, "ok", 0.0),
                rank=rank,
                number=NO_NUMBER,
            )
            responses.append(sample if rank == ranks.rank else sample.without_tokens())
    return responses


def side_by_side(given: Sequence[Sample], sampled: Sequence[Sample], rows: Sequence[dict]) -> list[Sample]:
    """Responses in the order of their rows, for each row first what it has given, then what was sampled."""
    responses, k, n = [], len(given) // len(rows), len(sampled) // len(rows)  # responses to each row
    for i in range(len(rows)):  # by place: with --partial-rollouts a step may have a row of two epochs twice
        responses += [*given[k * i : k * (i + 1)], *sampled[n * i : n * (i + 1)]]
    return responses
