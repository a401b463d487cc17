"""Command-line flags: what values a flag may have, groups of flags, and reading them.

A group is a small frozen dataclass. It stands in a file of flags, such as rl/data/flags.py, in the door of an extra, or
beside the code that reads it. A script's Args nests groups. On the command line they are flat, and --help shows a box
for each:

    @dataclass(frozen=True)
    class Args:
        lr: NotNegative = 1e-6               # its limit stands in its type
        my_bound: Free[AtLeast1] = 10        # Free: a resumed run may change it; other flags must stay as they were
        memory: Memory = Memory()            # a group; Memory(compile=False) gives a flag of it another default

A group may have two things that rl/run/ asks for. A method `check(flags)` gets the values of all flags by name, and
raises ValueError if one of them contradicts the group's own. `text_only` names what reads nothing but text. Args itself
may have `text_only` too.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

T = TypeVar("T")


class Limit(NamedTuple):
    """What a value given to a flag must be."""

    text: str
    holds: Callable[[Any], Any]
    of: type = float  # the type of the values that it limits. Float stands for int too.


class Needs:
    """The flags `names`. Unless one of them is set, this flag has no effect."""

    def __init__(self, *names: str):
        self.names = names


# The limit of every number. NaN is beyond this limit, as it is beyond all others, since no comparison with NaN holds.
SIZE = Limit("0, or between 1e-12 and 1e12 in size", lambda x: x == 0 or 1e-12 <= abs(x) <= 1e12)
TEXT = Limit(  # of every text, and so of every path
    "a text without control characters and without names of over 255 bytes",
    lambda x: x.strip() and x.isprintable() and max(len(name.encode()) for name in x.split("/")) <= 255,
    str,
)
FREE = "a resumed run may change it"
Free = Annotated[T, FREE]
Auto = Literal["auto"] | T  # the program chooses unless the user does
SWITCH = "--x is --x True, and --no-x is --x False"
Switch = Annotated[Literal["auto"] | bool, SWITCH]  # as Auto[bool]
AtLeast1 = Annotated[int, Limit("at least 1", lambda x: x >= 1)]
Positive = Annotated[float, Limit("positive", lambda x: x > 0)]
Seconds = Annotated[float, Limit("positive and at most 1e9", lambda x: 0 < x <= 1e9)]
NotNegative = Annotated[float, Limit("at least 0 and at most 1e6", lambda x: 0 <= x <= 1e6)]
Count = Annotated[int, Limit("at least 0", lambda x: x >= 0)]
Few = Annotated[int, Limit("at least 1 and at most 65536", lambda x: 1 <= x <= 65536)]  # of what takes memory or time
FewOr0 = Annotated[int, Limit("at least 0 and at most 65536", lambda x: 0 <= x <= 65536)]
Processes = Annotated[int, Limit("at least 1 and at most 1024", lambda x: 1 <= x <= 1024)]  # of one machine
Every = Annotated[int, Limit("at least -1", lambda x: x >= -1)]  # a number of steps. Flags differ in what 0 and -1 mean
Share = Annotated[float, Limit("within 0 and 1", lambda x: 0 <= x <= 1)]
PositiveShare = Annotated[float, Limit("positive and at most 1", lambda x: 0 < x <= 1)]
Temperature = Annotated[float, Limit("within 0.01 and 100", lambda x: 0.01 <= x <= 100)]  # vLLM has no lower one
TemperatureOr0 = Annotated[float, Limit("0, or within 0.01 and 100", lambda x: x == 0 or 0.01 <= x <= 100)]
TopK = Annotated[int, Limit("at least 1, or -1 for all tokens", lambda x: x >= 1 or x == -1)]
Above1 = Annotated[float, Limit("above 1", lambda x: x > 1)]
Port = Annotated[int, Limit("within 1 and 65535", lambda x: 1 <= x <= 65535)]


def build(cls: type[T], **values: Any) -> T:
    """Args from flags by name, wherever they stand: `build(Args, lr=1e-5, lora_rank=8)`. Others have their defaults.

    Raises TypeError for a flag that does not exist.
    """
    return change(cls(), **values)


def change(args: T, **values: Any) -> T:
    """A copy of Args with other values of some flags, wherever they stand. Raises TypeError as `build`."""
    if unknown := values.keys() - flat(args).keys():
        raise TypeError(f"{type(args).__name__} has no flags {sorted(unknown)}")
    return _changed(args, values)


def _changed(group: Any, values: dict[str, Any]) -> Any:
    flags = {name: values[name] for name in vars(group).keys() & values.keys()}
    groups = {name: _changed(x, values) for name, x in vars(group).items() if dataclasses.is_dataclass(x)}
    return dataclasses.replace(group, **flags, **groups)


def settled(group: T, **values: Any) -> T:
    """A group of flags with `values` in the place of those that are "auto". What is not in `values` stays "auto"."""
    return _changed(group, {name: x for name, x in values.items() if vars(group)[name] == "auto"})


def flat(args: Any) -> dict[str, Any]:
    """{flag: value} of Args and all groups in it, which is what the command line can set."""
    return {name: value for name, value, _ in _each(args)}


def marked(args: Any, note: str) -> set[str]:
    """Names of the flags whose type has a note, FREE or SWITCH."""
    return {name for name, _, hint in _each(args) if note in _notes(hint)}


def check_limits(args: Any) -> None:
    """Raise ValueError, naming the flag and its value, if a number is NaN, infinite, of an absurd size or beyond the
    limit of its type. Raise it also if a text breaks the limit TEXT, or if the lower end of a range is above its upper
    end. And raise it if a flag is set, and every flag that it `Needs` is off.
    """
    values, defaults = flat(args), flat(type(args)())
    for name, setting, hint in _each(args):
        limits = [TEXT, *(note for note in _notes(hint) if isinstance(note, Limit)), SIZE]
        for value in setting if isinstance(setting, tuple) else (setting,):
            kind = float if type(value) is int else type(value)
            for limit in limits:
                if kind is limit.of and not limit.holds(value):
                    raise ValueError(f"{spelled(name)} {value!r} must be {limit.text}")
        for needs in (note.names for note in _notes(hint) if isinstance(note, Needs) and setting != defaults[name]):
            if all(values[other] in (None, False, 0, (), "none") for other in needs):
                others = " or ".join(map(spelled, needs))
                raise ValueError(f"{spelled(name)} {setting} has no effect without {others}; add that, or leave it out")
    # The two ends of a range are named alike: x_lower_bound and x_upper_bound, x_lb and x_ub, or x_lower and x.
    for low in values:
        high = low.replace("_lower_bound", "_upper_bound").replace("_lb", "_ub").removesuffix("_lower")
        if low != high and high in values and values[low] > values[high]:
            raise ValueError(f"{spelled(low)} {values[low]} is above {spelled(high)} {values[high]}; lower it")


def spelled(name: str) -> str:
    """A flag as the command line has it."""
    return f"--{name.replace('_', '-')}"


def _each(args: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, type) of every flag of Args and its groups."""
    hints = get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if dataclasses.is_dataclass(value):
            yield from _each(value)
        else:
            yield field.name, value, hints[field.name]


def _notes(hint: Any) -> Iterator[Any]:
    """What Annotated says about a type, at any depth, be it of the type itself or of the members of a union."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint):
        yield from _notes(inner)
