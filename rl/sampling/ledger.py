"""Which prompt is where while samplers of their own work on it: plain bookkeeping, without processes or clocks.

Prompts are numbered 0, 1, 2, ... in the order in which a run trains on them. Each number is in exactly one place:

    not drawn -> waiting -> leased to a sampler -> ready -> trained
                    ^               |
                    +-- it is lost -+-> dropped: lost MAX_LOSSES times

- A step trains on the P lowest numbers that are not trained or dropped, whoever is done first. So short responses are
  not favoured, and the order of prompts depends on nothing but the run's seed.
- Numbers are drawn while (drawn - dropped) < P * (version + 1 + S). Version v is the weights that v steps have made,
  S is --max-staleness. So no token is older than S versions when it is trained on, and nothing is thrown away for age.
- A number that its sampler has lost is handed out again, before all others. Only its holder's result counts.
"""

import bisect
from collections import Counter
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

G = TypeVar("G")
MAX_LOSSES = 3  # then the prompt itself is to blame, not three samplers


class Leases(Generic[G]):
    """Numbers that samplers work on: waiting, in the order in which they are handed out; leased, to whom; ready."""

    def __init__(self, numbers: Iterable[int] = ()):
        self.waiting: list[int] = sorted(numbers)
        self.leased: dict[int, str] = {}
        self.ready: dict[int, G] = {}
        self.losses: Counter[int] = Counter()  # of numbers that are not trained yet

    def lease(self, sampler: str) -> int:
        """Hand the lowest waiting number to a sampler."""
        number = self.waiting.pop(0)
        self.leased[number] = sampler
        return number

    def held_by(self, sampler: str) -> list[int]:
        """The numbers that a sampler has, ascending."""
        return sorted(number for number, holder in self.leased.items() if holder == sampler)

    def finish(self, number: int, sampler: str, group: G) -> bool:
        """Take the group of a number from its holder. False, and nothing happens, if it comes from anybody else."""
        if self.leased.get(number) != sampler:
            return False
        del self.leased[number]
        self.ready[number] = group
        return True

    def give_back(self, sampler: str) -> list[int]:
        """A sampler is lost: its numbers wait again. Returns those that were lost MAX_LOSSES times, which do not."""
        hopeless = []
        for number in self.held_by(sampler):
            del self.leased[number]
            self.losses[number] += 1
            if self.losses[number] == MAX_LOSSES:
                hopeless.append(number)
            else:
                bisect.insort(self.waiting, number)
        return hopeless


class Ledger(Leases[G]):
    """The prompts of a run. Args: batch_size, P, numbers that a step trains on; max_staleness, S; total_steps."""

    def __init__(self, batch_size: int, max_staleness: int, total_steps: int):
        super().__init__()
        self.batch_size, self.max_staleness, self.total_steps = batch_size, max_staleness, total_steps
        self.version = 0  # of the newest weights
        self.next = 0  # the first number that is not drawn
        self.num_dropped = 0

    def draw(self, version: int) -> None:
        """Draw the numbers that weights of this version, the newest, may sample."""
        self.version, self.next = version, self.next or self.batch_size * version  # resumed from another script's steps
        steps = min(version + 1 + self.max_staleness, self.total_steps)
        more = self.batch_size * steps - (self.next - self.num_dropped)
        self.waiting += range(self.next, self.next + more)  # above all others
        self.next += max(more, 0)

    def give_back(self, sampler: str) -> list[int]:
        """As `Leases.give_back`; numbers that were lost too often are dropped, and others drawn for them."""
        dropped = super().give_back(sampler)
        self.num_dropped += len(dropped)
        self.draw(self.version)
        return dropped

    @property
    def batch(self) -> list[int]:
        """The numbers that the next step trains on, wherever they are; fewer than P if more are still to be drawn."""
        return sorted([*self.waiting, *self.leased, *self.ready])[: self.batch_size]

    @property
    def has_batch(self) -> bool:
        """Whether the groups of the next step are ready."""
        return len(self.ready) >= self.batch_size and all(number in self.ready for number in self.batch)

    def take(self) -> dict[int, G]:
        """The groups of the next step by number, ascending: from here on they are trained."""
        assert self.has_batch
        for number in (batch := self.batch):
            self.losses.pop(number, None)
        return {number: self.ready.pop(number) for number in batch}

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is not trained yet. Groups in `ready` are the caller's to save."""
        unfinished = sorted([*self.waiting, *self.leased])
        numbers = dict(batch_size=self.batch_size, next=self.next, num_dropped=self.num_dropped)
        return numbers | {"unfinished": unfinished, "ready": [*self.ready]}

    def load(self, state: dict[str, Any], ready: dict[int, G]) -> None:
        """Go on from `state`, with the groups that were saved. Numbers whose group is missing wait again."""
        self.next, self.num_dropped = state["next"], state["num_dropped"]
        self.ready = {number: ready[number] for number in sorted(state["ready"]) if number in ready}
        self.waiting = sorted({*state["unfinished"], *state["ready"]} - self.ready.keys())
