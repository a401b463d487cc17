"""Rows of prompts that are begun before their step, and that are found again after it."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rl.data.order import prompts_for_step
from rl.data.rows import Row


def begun_in_step(rows: Sequence[Row], step: int, n: int, seed: int, ahead: int) -> list[Row]:
    """The rows that are begun in a step if each is begun `ahead` places before its turn in `prompts_for_step`.

    All steps together begin the same rows in the same order: step 0 begins n + ahead of them, and a later one the n
    that come `ahead` places after its own.
    """
    first, last = step * n + (ahead if step else 0), (step + 1) * n + ahead
    steps = {s: prompts_for_step(rows, s, n, seed) for s in range(first // n, (last - 1) // n + 1)}
    return [steps[i // n][i % n] for i in range(first, last)]


class ByIndex(Mapping[int, Row]):
    """Rows by their `row_index`, which ascends."""

    def __init__(self, rows: Sequence[Row]):
        self.rows, self.indices = rows, np.array([row["row_index"] for row in rows], np.int64)

    def __getitem__(self, row_index: int) -> Row:
        place = int(np.searchsorted(self.indices, row_index))
        if place == len(self.indices) or self.indices[place] != row_index:
            raise KeyError(row_index)
        return self.rows[place]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices.tolist())
