"""Responses that outlive the step in which they were begun.

With --partial-rollouts a step does not wait for its longest responses: in_flight.py has them, and they go on in the
next step. train_dapo.py samples more groups than a step learns from: waiting_groups.py keeps the others for the next
step, also in checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rl.flags import Limit


@dataclass(frozen=True)
class PartialRollouts:
    """These flags decide how responses are sampled while training."""

    # Sample more groups than a step needs, by this share, and do not wait for the longest responses. They go on in the
    # next step, with its weights. With 0 the step waits for all.
    partial_rollouts: Annotated[float, Limit("at least 0 and at most 100", lambda x: 0 <= x <= 100)] = 0.0

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if --partial-rollouts stands beside a flag that it cannot go with."""
        others = {
            "--offline": flags.get("offline"),
            "--adv-estimator remax": flags.get("adv_estimator") == "remax",
        }
        if self.partial_rollouts and (other := next((name for name, is_set in others.items() if is_set), None)):
            flag = f"--partial-rollouts {self.partial_rollouts:g}"
            raise ValueError(f"{flag} and {other} exclude each other; leave one of them out")

    def sampler(self) -> Callable[..., Any] | None:
        """What makes the sampler that the flag asks for, as `rl.sampling.sampler.Sampler`, or None without the flag."""
        if not self.partial_rollouts:
            return None
        from functools import partial

        from extras.partial.in_flight import PartialSampler

        return partial(PartialSampler, share=self.partial_rollouts)


def saved_groups(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """Groups of responses as a checkpoint holds them, see `waiting_groups.to_state`."""
    from extras.partial.waiting_groups import to_state

    return to_state(groups)


def loaded_groups(states: Sequence[Any], rows: Sequence[Any], n: int, ranks: Any) -> list[Any]:
    """The groups of n responses that all ranks of the run that is resumed have saved, see `waiting_groups`."""
    from extras.partial.rows import ByIndex
    from extras.partial.waiting_groups import from_states

    return from_states(states, ByIndex(rows), n, ranks)


def saved_sample(sample: Any) -> dict[str, Any]:
    """A sample as a checkpoint holds it, see `saved.saved_sample`."""
    from extras.partial.saved import saved_sample

    return saved_sample(sample)


def sample_of(saved: dict[str, Any]) -> Any:
    """The sample that a checkpoint has held, see `saved.sample_of`."""
    from extras.partial.saved import sample_of

    return sample_of(saved)
