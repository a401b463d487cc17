"""Groups of responses that wait for a later step of train_dapo.py, as a checkpoint has them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from extras.partial.saved import sample_of, saved_sample
from rl.data.rows import Row
from rl.data.types import Sample
from rl.ranks import Ranks

Saved = list[list[dict[str, Any]]]  # for each group its responses, and the tokens of those that the rank has


def to_state(groups: Sequence[Sequence[Sample]]) -> Saved:
    """The groups as `Run.steps` takes them. A rank saves all responses, but only the tokens that it has."""
    return [[saved_sample(s) for s in group] for group in groups]


def from_states(states: Sequence[Saved], rows: Mapping[int, Row], n: int, ranks: Ranks) -> list[list[Sample]]:
    """The groups as they were when a checkpoint was saved, divided anew among the ranks of this run.

    Groups that no longer fit are left out: those that do not have n responses, and those whose prompt has changed in
    the data. --force-resume allows both changes.

    Args: states, what `to_state` gave on each rank of the run that saved; rows, of the training data, by `row_index`.
    """
    groups = []
    for copies in zip(*states, strict=True):  # one group, as each rank has saved it
        samples = [[sample_of(x) for x in same] for same in zip(*copies, strict=True)]
        whole = [next(s for s in same if s.response_ids is not None) for same in samples]
        row = rows.get(whole[0].row_index)
        if len(whole) == n and row is not None and np.array_equal(row["prompt_ids"], whole[0].prompt_ids):
            groups.append(whole)
    owners = [i * ranks.size // len(groups) for i in range(len(groups))]  # the rank that gets each group's tokens
    numbers = itertools.count()

    def moved(sample: Sample, owner: int) -> Sample:
        """The sample, or its rows, with numbers that follow each other."""
        rows = tuple(moved(row, owner) for row in sample.rows)
        number = rows[0].number if rows else next(numbers)
        return replace(sample if owner == ranks.rank else sample.without_tokens(), rank=owner, number=number, rows=rows)

    return [[moved(s, owner) for s in group] for group, owner in zip(groups, owners, strict=True)]
