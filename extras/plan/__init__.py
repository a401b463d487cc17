"""What a run will take, by arithmetic from a model's config and the flags, without a GPU and without loading weights.

--plan prints it, and memory flags that are `auto` are settled by it. sizes.py measures a model, memory.py adds up bytes
and ways.py chooses memory flags, which rehearsal.py tries. compiling.py says whether to compile. cards.py knows kinds
of GPUs, work.py says what a step of a script computes, seconds.py and simulation.py how long that takes, step.py adds
it up, and report.py prints it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from rl.flags import Free, Positive, settled

T = TypeVar("T")
USUAL_TOKENS = 16384  # of a micro-batch


@dataclass(frozen=True)
class PlanFlags:
    """These flags print what a run will take. That needs no GPU."""

    # Print what the run takes on these GPUs, such as h100x8, and exit. Without a value, --plan takes those of this
    # machine.
    plan: Free[tuple[str, ...] | None] = None
    # The plan assumes that a response has this many tokens on average. By default it assumes the longest allowed.
    plan_response_length: Free[Positive | None] = None
    # The plan assumes that a machine has this many GiB of host memory. The default is that of this machine, or what is
    # usual for GPUs that are named.
    plan_host_memory: Free[Positive | None] = None


@dataclass(frozen=True)
class Planned:
    """The base of Args that can be planned."""

    planning: PlanFlags = PlanFlags()


def exit_if_planning(args: T) -> T:
    """Args as they are, unless --plan asks for a plan. In that case one rank prints it, and the process ends.

    The exit code is 0 if the run fits. Otherwise one sentence says why it does not, and the exit code is 1.
    """
    flags = getattr(args, "planning", PlanFlags())
    if flags.plan is not None:
        from extras.plan import report

        report.print_and_exit(args, flags)
    return args


class Hardware(NamedTuple):
    """What a run runs on."""

    gpu: int  # bytes of a GPU, whether they are in use or not
    host: int  # bytes of host memory of a machine
    ranks: int  # that train
    local: int  # of them on one machine


class Settled(NamedTuple):
    """What was chosen where memory flags were `auto`."""

    memory: Any  # the group of flags, without `auto`
    rest: list[Any]  # groups with more expensive ways, the cheapest first
    record: dict[str, Any]  # for a run that is resumed
    text: str  # says what was chosen


def budget_of(memory: Any) -> tuple[str, Any]:
    """The name and the value of the flag that limits the tokens of a micro-batch. The value may be "auto"."""
    return next((name, value) for name, value in vars(memory).items() if name.endswith("max_token_len_per_gpu"))


def with_values(memory: Any, values: dict[str, Any]) -> Any:
    """Memory flags with `values` in the place of `auto`. --param-offload moves the moments too, so --optimizer-offload
    says nothing beside it and is off then.
    """
    memory = settled(memory, **values)
    return replace(memory, optimizer_offload=memory.optimizer_offload and not memory.param_offload)


def hardware() -> Hardware | None:
    """What this rank sees, or None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    from extras.plan import host

    return host.hardware()


def settle(args: Any, of_ranks: Sequence[Any], then: dict[str, Any] | None = None) -> Settled:
    """Args' memory flags with the cheapest way that fits in the place of `auto`: a pure function. Without a GPU these
    are what is usual.

    Args: of_ranks, the `hardware` of each, of which the smallest counts; then, the record of a run that is resumed.
    Raises ValueError with a sentence if nothing fits.
    """
    if None in of_ranks:
        from extras.offload import NO_OFFLOAD
        from rl.model.sharding import UNPLANNED

        usual = UNPLANNED | NO_OFFLOAD | {budget_of(args.memory)[0]: max(USUAL_TOKENS, *args.units.values())}
        return Settled(with_values(args.memory, usual), [], {}, "")
    from extras.plan import ways

    gpu, memory = min(x.gpu for x in of_ranks), min(x.host for x in of_ranks)
    return ways.settle(args, of_ranks[0]._replace(gpu=gpu, host=memory), then)


def compiling_pays(args: Any, steps: int, ranks: int) -> bool:
    """Whether a run of this many steps on this many GPUs is likely to take less time with `--compile`."""
    from extras.plan import compiling

    return compiling.compiling_pays(args, steps, ranks)


def rehearse(trained: dict[str, Any], ways: list[Any], **beside: Any) -> tuple[Any, str]:
    """Which of `ways` a run takes, after the first of them was used to load what is trained, and a line about that. See
    `rehearsal.rehearse`.
    """
    from extras.plan import rehearsal

    return rehearsal.rehearse(trained, ways, **beside)
