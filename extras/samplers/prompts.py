"""The prompts that samplers answer, by number: those of training from 0 on, in the order of the run. Held-out ones are
below 0.
"""

import functools
from collections.abc import Sequence

from extras.samplers import Work
from extras.samplers.ledger import Leases, Ledger
from rl.data.order import prompts_for_step
from rl.data.rows import Row
from rl.data.types import Sample, Sampling

Group = tuple[Row, list[Sample]]  # a prompt and the responses to it


class Prompts:
    """Which row a number stands for, how it is answered, and where it is.

    Args: work, what samplers are to do; max_staleness, S; vocabulary, how many tokens the model knows.
    """

    def __init__(self, work: Work, max_staleness: int, vocabulary: int):
        self.work, self.vocabulary = work, vocabulary
        self.rows_of_step = functools.lru_cache(max_staleness + 2)(
            lambda step: prompts_for_step(work.rows, step, work.batch_size, work.seed)
        )
        self.ledger: Ledger[Group] = Ledger(work.batch_size, max_staleness, work.total_steps)
        self.evaluation: Leases[Group] = Leases()
        self.held_out: Sequence[Row] = ()
        self.held_out_sampling = work.sampling
        self.dropped: set[int] = set()  # places of held-out rows that lost their sampler while it had nothing else

    @property
    def both(self) -> tuple[Leases[Group], Leases[Group]]:
        """The leases of held-out prompts, which go first, and those of training."""
        return self.evaluation, self.ledger

    def row(self, number: int) -> Row:
        """The row of a number."""
        if number < 0:
            return self.held_out[number % len(self.held_out)]
        step, place = divmod(number, self.work.batch_size)
        return self.rows_of_step(step)[place]

    def sampling(self, number: int) -> Sampling:
        """How a number is answered."""
        return self.work.sampling if number >= 0 else self.held_out_sampling

    def leases(self, number: int) -> Leases[Group]:
        """Where a number belongs."""
        return self.ledger if number >= 0 else self.evaluation

    def describe(self, number: int) -> str:
        """A number and its row, for a line of the log."""
        row = self.row(number)["row_index"]
        return f"prompt {number}, row {row} of --train-files," if number >= 0 else f"row {row} of --val-files"

    def evaluate(self, rows: Sequence[Row], sampling: Sampling) -> None:
        """Hand held-out rows out, before others. Their numbers are new for each version of the weights, so that no
        answer of an earlier one is taken for theirs.
        """
        self.held_out, self.held_out_sampling = rows, sampling
        first = -len(rows) * (self.ledger.version + 1)
        self.evaluation = Leases(first + i for i in range(len(rows)) if i not in self.dropped)

    def held_by(self, sampler: str) -> list[int]:
        """The numbers that a sampler has."""
        return [number for leases in self.both for number in leases.held_by(sampler)]

    def give_back(self, sampler: str, *, blame: bool) -> list[int]:
        """A sampler is lost: its numbers wait again. Returns those that are dropped. See `Leases.give_back`."""
        dropped = [number for leases in self.both for number in leases.give_back(sampler, blame=blame)]
        self.dropped |= {number % len(self.held_out) for number in dropped if number < 0}
        return dropped

    @property
    def num_dropped(self) -> int:
        """Prompts that were dropped, of training and held out."""
        return self.ledger.num_dropped + len(self.dropped)
