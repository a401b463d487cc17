"""Commands of the pages, and their flags without tyro: to make its parser takes half a second for each command."""

import contextlib
import itertools
import re
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rl.flags import Switch, _each, build


def commands(text: str) -> list[str]:
    """Commands that call a script of the repository; those of benchmarks/ hand flags on to others. A backslash at the
    end of a line joins it with the next one.
    """
    lines = [line.strip() for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    return [line for line in lines if re.match(r"(torchrun|python) (?!.*\bbenchmarks/).*?\w\.py\b", line)]


def parsed(cls: type, words: list[str]) -> Any:
    """What tyro makes of a script's flags, in a hundredth of its time; words that it would refuse are errors."""
    kinds, values, words = {name: _bare(kind) for name, _, kind in _each(cls())}, {}, list(words)
    while words:
        flag = words.pop(0)
        assert flag.startswith("--"), f"{flag} belongs to no flag"
        name = flag.removeprefix("--").replace("-", "_")
        own = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
        del words[: len(own)]
        if kinds.get(name.removeprefix("no_")) in (bool, _bare(Switch)) and not own:
            values[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            values[name] = _converted(kinds[name], own)
    return build(cls, **values)


def _bare(kind: Any) -> Any:
    """A type without what Annotated says of it."""
    return _bare(get_args(kind)[0]) if get_origin(kind) is Annotated else kind


def _converted(kind: Any, words: list[str]) -> Any:
    """The words after a flag as its type."""
    kind = _bare(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(_converted(inner[0], [word]) for word in words)
    if origin in (Union, UnionType):
        for one in inner:
            with contextlib.suppress(ValueError):
                return _converted(one, words)
        raise ValueError(f"{words} are none of {inner}")
    [word] = words
    if origin is Literal or kind is type(None):
        if word not in (inner or ("None",)):
            raise ValueError(f"{word} is not among {inner}")
        return word if inner else None
    return kind(word)
