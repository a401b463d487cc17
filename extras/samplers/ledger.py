"""Which prompt is where while samplers of their own work on it: plain bookkeeping, without processes or clocks.

Prompts are numbered 0, 1, 2, ... in the order in which a run trains on them. Each number is in exactly one place:

    not drawn -> waiting -> leased to a sampler -> ready -> trained
                    ^               |
                    +-- it is lost -+-> dropped: its sampler was lost while it had nothing else

- A step trains on the P lowest numbers that are not trained or dropped, whoever is done first. So short responses are
  not favored, and the order of prompts depends on nothing but the run's seed.
- Numbers are drawn while (drawn - dropped) < P * (version + 1 + S). Version v is the weights that v steps have made,
  S is --max-staleness. So no token is older than S versions when it is trained on, and nothing is thrown away for age.
- A number that its sampler has lost is handed out again, before all others. Only its holder's result counts.
- A sampler confirms a number before it begins it, so a sampler may have been lost because of any number that it had
  confirmed, and because of no other. A number that was lost twice in this way is a suspect. It is leased alone, to a
  sampler that has nothing else and gets nothing else, and it is dropped if that sampler is lost too.
"""

import bisect
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

G = TypeVar("G")
SUSPECT_AFTER = 2  # losses


class Leases(Generic[G]):
    """Numbers that samplers work on: waiting, in the order in which they are handed out; leased, to whom; ready."""

    def __init__(self, numbers: Iterable[int] = ()):
        self.waiting: list[int] = sorted(numbers)
        self.leased: dict[int, str] = {}
        self.confirmed: set[int] = set()  # leased numbers that their sampler has begun, or is about to
        self.ready: dict[int, G] = {}
        self.losses: dict[int, list[str]] = {}  # samplers that were lost with a number

    def is_suspect(self, number: int) -> bool:
        """Whether a number has to be leased alone."""
        return len(self.losses.get(number, ())) >= SUSPECT_AFTER

    def lease(self, number: int, sampler: str) -> None:
        """Hand a waiting number to a sampler."""
        self.waiting.remove(number)
        self.leased[number] = sampler

    def held_by(self, sampler: str) -> list[int]:
        """The numbers that a sampler has, ascending."""
        return sorted(number for number, holder in self.leased.items() if holder == sampler)

    def confirm(self, sampler: str, numbers: Iterable[int]) -> None:
        """A sampler has begun these numbers, or is about to. It is to begin no others that it holds."""
        held = {*self.held_by(sampler)}
        self.confirmed = self.confirmed - held | held.intersection(numbers)

    def finish(self, number: int, sampler: str, group: G) -> bool:
        """Take the group of a number from its holder. False, and nothing happens, if it comes from anybody else."""
        if self.leased.get(number) != sampler:
            return False
        del self.leased[number]
        self.confirmed.discard(number)
        self.ready[number] = group
        return True

    def give_back(self, sampler: str, *, blame: bool = True) -> list[int]:
        """A sampler is lost: its numbers wait again. Returns those that do not, since they were lost alone.

        Args: blame, whether one of them may be the reason. None is if the sampler was asked to end.
        """
        dropped = []
        for number in self.held_by(sampler):
            del self.leased[number]
            was_alone, is_lost = self.is_suspect(number), blame and number in self.confirmed
            self.confirmed.discard(number)
            if is_lost:
                self.losses.setdefault(number, []).append(sampler)
            if is_lost and was_alone:
                dropped.append(number)
                del self.losses[number]
            else:
                bisect.insort(self.waiting, number)
        return dropped

    def forgive(self, sampler: str) -> None:
        """A sampler that was silent, and so taken for lost, is back: no number has ended it."""
        self.losses = {n: rest for n, lost in self.losses.items() if (rest := [x for x in lost if x != sampler])}


def assign(
    pools: Sequence[tuple[Leases, int]], rooms: Mapping[str, int], idle: Container[str]
) -> list[tuple[str, int]]:
    """Lease what waits to those who have the most room left. Returns (sampler, number) of each lease.

    A suspect goes to the sampler with the fewest leases, once that has none. Until then the sampler gets nothing else.

    Args: pools, of which the first goes first, each with how many responses one of its numbers takes; rooms, how many
    responses each sampler samples at a time; idle, samplers that have said that they have nothing to do.
    """
    load = Counter(holder for leases, _ in pools for holder in leases.leased.values())
    alone = {x for leases, _ in pools for n, x in leases.leased.items() if leases.losses and leases.is_suspect(n)}
    samplers, new = [sampler for sampler in rooms if sampler not in alone], []

    def lease(leases: Leases, number: int, sampler: str) -> None:
        leases.lease(number, sampler)
        load[sampler] += 1
        new.append((sampler, number))

    for leases, _ in pools:
        for number in sorted(n for n in leases.losses if leases.is_suspect(n) and n in leases.waiting)[: len(samplers)]:
            sampler = min(samplers, key=lambda x: (load[x], x not in idle))
            samplers.remove(sampler)
            if not load[sampler] and sampler in idle:
                lease(leases, number, sampler)
    for leases, responses in pools:
        for number in [n for n in leases.waiting if not leases.is_suspect(n)]:
            full = {x: load[x] / max(rooms[x] // responses, 1) for x in samplers}
            sampler = min(full, key=full.get, default=None)
            if sampler is None or full[sampler] >= 1:
                break
            lease(leases, number, sampler)
    return new


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

    def give_back(self, sampler: str, *, blame: bool = True) -> list[int]:
        """As `Leases.give_back`. The numbers that it returns are dropped, and others are drawn for them."""
        if dropped := super().give_back(sampler, blame=blame):
            self.num_dropped += len(dropped)
            self.draw(self.version)
        return dropped

    @property
    def batch(self) -> list[int]:
        """The numbers that the next step trains on, wherever they are, or fewer than P if more are to be drawn."""
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

    def oldest(self, number: int) -> int:
        """The oldest weights that may have sampled a number: those in whose time it was drawn."""
        return (number - self.num_dropped) // self.batch_size - self.max_staleness

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is not trained yet. Groups in `ready` are the caller's to save."""
        unfinished = sorted([*self.waiting, *self.leased])
        numbers = dict(batch_size=self.batch_size, next=self.next, num_dropped=self.num_dropped)
        return numbers | {"unfinished": unfinished, "ready": [*self.ready], "losses": [*self.losses.items()]}

    def load(self, state: dict[str, Any], ready: dict[int, G]) -> None:
        """Go on from `state`, with the groups that were saved. Numbers whose group is missing wait again."""
        self.next, self.num_dropped = state["next"], state["num_dropped"]
        self.losses = {number: [*samplers] for number, samplers in state.get("losses", ())}  # older ones have none
        self.ready = {number: ready[number] for number in sorted(state["ready"]) if number in ready}
        self.waiting = sorted({*state["unfinished"], *state["ready"]} - self.ready.keys())
