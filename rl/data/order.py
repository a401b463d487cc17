"""The rows of a step, and its seeds. They depend only on (seed, step), so no loader's state must be saved."""

from collections.abc import Sequence

import numpy as np

from rl.data.types import Row


def prompts_for_step(rows: Sequence[Row], step: int, n: int, seed: int) -> list[Row]:
    """The `n` rows that training step `step` (from 0) uses. They depend only on the seed and the step.

    An epoch is len(rows) // n steps. It shuffles the rows anew and leaves the last len(rows) % n of them out, as verl's
    drop_last. With 10 rows and n = 4, steps 0 and 1 are epoch 0, and steps 2 and 3 are epoch 1. `Files.count_steps`
    refuses an n that is more than there are rows.
    """
    epoch, batch = divmod(step, len(rows) // n)
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(rows)).tolist()
    return [rows[i] for i in order[batch * n : (batch + 1) * n]]


def derive_seed(*numbers: int) -> int:
    """A 31-bit seed that depends on every number and on their order, such as the seed of (run, step, rank, ...).

    The numbers are mixed by constants of splitmix64, so that the seeds of neighboring steps look unrelated.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) * 0xBF58476D1CE4E5B9 % 2**64
        state ^= state >> 29
    return state % 2**31
