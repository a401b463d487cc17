"""Partial rollouts: a step does not wait for its longest responses. They go on in the next one.

With a share F, F * P more groups are sampled than a step trains on. When P are complete, the engine stops. The others
wait for the next step with the tokens that they have, and go on with its weights. So a response may have tokens of
several versions. Every group is trained on, once, however long it takes: long responses come later, not less often.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from extras.partial.rows import ByIndex, begun_in_step
from extras.partial.saved import check_groups, groups_in_flight, restore, saved_group
from rl import stop
from rl.console import progress
from rl.data.order import derive_seed
from rl.data.rows import Row
from rl.data.types import Sample, Sampling
from rl.ranks import Ranks
from rl.sampling.engines import Engine
from rl.sampling.groups import seeded
from rl.sampling.loop import Loop, Partner
from rl.sampling.sampler import Sampler


class PartialSampler(Sampler):
    """A sampler with --partial-rollouts `share`."""

    def __init__(self, *arguments: Any, share: float, **room: Any):
        super().__init__(*arguments, **room)
        task = self.task
        self.in_flight = InFlight(share, task.train_rows, task.batch_size, self.ranks, self.states, task.seed)

    def state(self) -> dict[str, Any]:
        """The groups in flight."""
        return self.in_flight.state()

    def complete_groups(self, step: int) -> tuple[list[Row], list[Sample]]:
        """The P groups that are complete first, of those that are in flight and of new ones."""
        task, ahead = self.task, self.in_flight.ahead
        rows = begun_in_step(task.train_rows, step, task.batch_size, task.seed, ahead)
        return self.in_flight.sample(self.engine, rows, task.sampling, task.scorer.submit, task.partner, step=step)


def pause(loop: Loop) -> Iterator[tuple[Hashable, list[Sample]]]:
    """Interrupt the loop, then wait for the partner where it was asked. It answers before others use it, unless it sets
    aside what it has begun. Gives the groups that become complete by that. Ranks of an engine wait together, and not if
    the run is asked to stop.
    """
    loop.interrupt()
    engine = loop.engine
    if loop.partner is not None and loop.partner.set_aside():
        return
    while engine.has_requests(waiting=bool(loop.waiting)) and not stop.requested(engine.group):
        yield from loop.step()


class InFlight:
    """Groups of responses that outlive a step. Each rank has groups of its own, and as many of them in every step.

    Args:
        share: how many groups are begun before their step, as a share of `batch_size`.
        rows: the training data, in which a checkpoint's groups are found again by `row_index`.
        batch_size: groups that a step gets (P), of all ranks.
        states: what `state` gave on each rank of the run that is resumed; [] in a new one.
        seed: of the run.

    Raises ValueError if an older version has saved a group of any rank.
    """

    def __init__(
        self,
        share: float,
        rows: Sequence[Row],
        batch_size: int,
        ranks: Ranks,
        states: Sequence[dict[str, Any]],
        seed: int,
    ):
        self.ahead = math.ceil(share * batch_size)  # groups
        self.seed = seed
        self.rows, self.batch_size, self.ranks = ByIndex(rows), batch_size, ranks
        self.loop: Loop | None = None
        self.count = 0  # the name of the next group that this rank begins
        self.ready: dict[Hashable, list[Sample]] = {}  # groups that are complete, by name
        of_ranks = [state.get("in_flight", []) for state in states]
        check_groups(list(itertools.chain(*of_ranks)))  # those of all ranks, so that all ranks raise or none
        is_same_size = len(of_ranks) == ranks.size
        self.saved = of_ranks[ranks.rank] if is_same_size else ranks.own_slice(list(itertools.chain(*of_ranks)))

    def sample(
        self,
        engine: Engine,
        rows: list[Row],
        sampling: Sampling,
        on_group: Callable[[Row, list[Sample]], object],
        partner: Partner | None = None,
        *,
        step: int,
    ) -> tuple[list[Row], list[Sample]]:
        """Begin `sampling.n` responses to each of the new rows, and sample until P groups are complete.

        Args: as for `sample_groups`, but rows of all ranks; step, on which the engine's seed depends. Returns: the rows
        of the P groups, of all ranks, and this rank's samples, groups side by side in their order. Both are incomplete
        if the run was asked to stop: end the phase then. All ranks must enter.
        """
        seed, own_slice = derive_seed(self.seed, step, engine.first_rank), self.ranks.own_slice
        # Two shares: a share of both together may be less than a rank's share of P.
        own_rows = own_slice(rows[: self.batch_size]) + own_slice(rows[self.batch_size :])
        if self.loop is None:
            self.loop = Loop(engine, partner, seed=seed)
            self._restore(sampling, on_group)
        num_groups = len(self.ranks.slice_of(self.batch_size, self.ranks.rank))
        with seeded(seed, engine.device), progress("generate", [], total=num_groups) as bar:
            if partner is not None:
                partner.take_up()
            self.loop.resume()
            for i, row in enumerate(own_rows):  # at the end of an epoch a prompt may be there twice
                own_seed = derive_seed(seed, row["row_index"], i) if partner else None
                self.loop.start(self.count, row, sampling, own_seed)
                self.count += 1
            complete = self.loop.run(enough=lambda: len(self.ready) >= num_groups)
            for name, samples in itertools.chain(complete, pause(self.loop)):
                self.ready[name] = samples
                on_group(self.rows[samples[0].row_index], samples)
                bar.update()
        groups = [self.ready.pop(name) for name in sorted(self.ready)[:num_groups]]
        indices = self.ranks.all_gather([group[0].row_index for group in groups])
        return [self.rows[i] for i in indices], [sample for group in groups for sample in group]

    def state(self) -> dict[str, Any]:
        """For a checkpoint: this rank's groups, with the tokens that they have.

        Groups in flight that have a partner are not kept: a resumed run begins them again.
        """
        if self.loop is None:
            return {"in_flight": self.saved}
        complete = {
            name: saved_group(self.rows[samples[0].row_index], dict(enumerate(samples)))
            for name, samples in self.ready.items()
        }
        groups = groups_in_flight(self.loop) | complete
        return {"in_flight": [groups[name] for name in sorted(groups)]}

    def _restore(self, sampling: Sampling, on_group: Callable) -> None:
        """Go on with a checkpoint's groups. Those that no longer fit, as after --force-resume, begin again."""
        for group in self.saved:
            row = self.rows.get(group["row_index"], self.rows[min(self.rows)])
            samples = restore(self.loop, self.count, row, sampling, group)
            if samples:
                self.ready[self.count] = samples
                on_group(row, samples)
            self.count += 1
        self.saved = []
