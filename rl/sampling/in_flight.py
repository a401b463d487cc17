"""Partial rollouts: a step does not wait for its longest responses; they go on in the next one.

    in_flight = InFlight(args.decoding, rows, batch_size, ranks, run.states, seed)
    for step in run.steps(in_flight.state):
        rows = prompts_for_step(..., ahead=in_flight.ahead)                     # new prompts
        rows, own_samples, tickets = in_flight.sample(engine, rows, ...)        # the P prompts that are complete

With a share F, F * P more groups are sampled than a step trains on. When P are complete, the engine stops. The others
wait for the next step with the tokens that they have, and go on with its weights: so a response may have tokens of
several versions. Every group is trained on, once, however long it takes: long responses come later, not less often.
With F = 0 nothing is carried over.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from rl import stop
from rl.console import progress
from rl.data.order import ByIndex, derive_seed
from rl.data.rows import Row
from rl.data.types import Sample, Sampling
from rl.ranks import Ranks
from rl.sampling.engines import Engine
from rl.sampling.flags import Decoding
from rl.sampling.groups import sample_groups, seeded
from rl.sampling.rollouts import Partner, Rollouts, saved_group


class InFlight:
    """See above. Each rank has groups of its own, and as many of them in every step.

    Args:
        rows: the training data, in which a checkpoint's groups are found again by `row_index`.
        batch_size: groups that a step gets (P), of all ranks.
        states: what `state` gave on each rank of the run that is resumed; [] in a new one.
        seed: of the run.
    """

    def __init__(
        self,
        decoding: Decoding,
        rows: Sequence[Row],
        batch_size: int,
        ranks: Ranks,
        states: Sequence[dict[str, Any]],
        seed: int,
    ):
        self.ahead = math.ceil(decoding.partial_rollouts * batch_size)  # prompts that are begun before their step
        self.seed = seed
        self.rows, self.batch_size, self.ranks = ByIndex(rows if self.ahead else ()), batch_size, ranks
        self.rollouts: Rollouts | None = None
        self.count = 0  # the name of the next group that this rank begins
        self.ready: dict[int, tuple[Row, list[Sample], Any]] = {}  # complete, by name, with what `on_group` returned
        own = [state.get("in_flight", []) for state in states]
        self.saved = own[ranks.rank] if len(own) == ranks.size else ranks.own_slice(list(itertools.chain(*own)))

    def sample(
        self,
        engine: Engine,
        rows: list[Row],
        sampling: Sampling,
        on_group: Callable[[Row, list[Sample]], Any],
        partner: Partner | None = None,
        *,
        step: int,
    ) -> tuple[list[Row], list[Sample], list[Any]]:
        """Begin `sampling.n` responses to each of the new rows, and sample until P groups are complete.

        Args: as for `sample_groups`, but rows of all ranks; step, on which the engine's seed depends. Returns: the rows
        of the P groups, of all ranks; this rank's samples, groups side by side in their order; and what `on_group` has
        returned for these. All are incomplete if the run was asked to stop: call `run.may_stop_after` then. All data
        ranks must enter.
        """
        seed, own_slice = derive_seed(self.seed, step, engine.first_rank), self.ranks.own_slice
        if not self.ahead:
            return rows, *sample_groups(engine, own_slice(rows), sampling, on_group, partner, seed=seed)
        # Two shares: a share of both together may be less than a rank's share of P.
        own_rows = own_slice(rows[: self.batch_size]) + own_slice(rows[self.batch_size :])
        if self.rollouts is None:
            self.rollouts = Rollouts(engine, partner, seed=seed)
            self._restore(sampling, on_group)
        wanted = len(self.ranks.slice_of(self.batch_size, self.ranks.data_rank))
        with seeded(seed, engine.device), progress("generate", [], total=wanted) as bar:
            self.rollouts.resume()
            for i, row in enumerate(own_rows):  # at the end of an epoch a prompt may be there twice
                own_seed = derive_seed(seed, row["row_index"], i) if partner else None
                self.rollouts.start(self.count, row, sampling, own_seed)
                self.count += 1
            complete = self.rollouts.run(enough=lambda: len(self.ready) >= wanted)
            for name, samples in itertools.chain(complete, self.rollouts.pause()):
                row = self.rows[samples[0].row_index]
                self.ready[name] = row, samples, on_group(row, samples)
                bar.update()
        taken = sorted(self.ready)[:wanted]
        asked = stop.requested(engine.group)  # all ranks of an engine must enter
        if len(taken) < wanted and not asked:
            raise RuntimeError(f"{len(taken)} of {wanted} groups are complete, and nothing is left to sample")
        groups = [self.ready.pop(name) for name in taken]
        indices = self.ranks.all_gather([row["row_index"] for row, _, _ in groups])
        samples = [sample for _, group, _ in groups for sample in group]
        return [self.rows[i] for i in indices], samples, [ticket for _, _, ticket in groups]

    def state(self) -> dict[str, Any]:
        """For `Run.steps`: this rank's groups, with the tokens that they have. {} without --partial-rollouts.

        Groups in flight that have a partner are not kept: a resumed run begins them again.
        """
        if not self.ahead:
            return {}
        if self.rollouts is None:
            return {"in_flight": self.saved}
        complete = {name: saved_group(row, dict(enumerate(x))) for name, (row, x, _) in self.ready.items()}
        found = self.rollouts.state() | complete
        return {"in_flight": [found[name] for name in sorted(found)]}

    def _restore(self, sampling: Sampling, on_group: Callable) -> None:
        """Go on with a checkpoint's groups. Those that no longer fit, as after --force-resume, begin again."""
        for group in self.saved:
            row = self.rows.get(group["row_index"], self.rows[min(self.rows)])
            samples = self.rollouts.restore(self.count, row, sampling, group)
            if samples:
                self.ready[self.count] = row, samples, on_group(row, samples)
            self.count += 1
        self.saved = []
