"""What --help shows: the flags of a script itself in a titled box, above the boxes of the flags that scripts share."""

from dataclasses import fields, is_dataclass, make_dataclass
from typing import Any

TITLE = "These flags belong to this script. The boxes below have flags that scripts share."


def boxed(cls: type) -> Any:
    """A class for tyro whose --help is that of the Args `cls`, with its own flags in a box "script options".

    Without this they would stand beside -h, in a box without a description. A flag that may be None shows its other
    values alone. Nothing is parsed with this class.
    """
    from tyro import conf

    groups = [(x.name, type(x.default), x.default) for x in fields(cls) if is_dataclass(x.default)]
    # tyro has a box for each dataclass inside the outer one, so the flags of `cls` itself need one without its groups.
    hidden: list[Any] = [(name, conf.Suppress[conf.Fixed[kind]], default) for name, kind, default in groups]
    # tyro looks for the source of this class, with the comments of its flags, under its name in its module.
    place = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": TITLE}
    script = make_dataclass(cls.__name__, hidden, bases=(cls,), frozen=True, namespace=place)
    return conf.DisallowNone[make_dataclass("Boxes", [("script", script, script()), *groups])]
