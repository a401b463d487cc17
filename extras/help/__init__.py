"""What --help shows: the flags of a script itself in a titled box, above the boxes of the flags that scripts share.

A flag that is None or empty by default has no "(default: None)" there. The comment beside the flag, which --help shows
too, says what happens without it.
"""

from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

TITLE = "These flags belong to this script. The boxes below have flags that scripts share."


def boxed(cls: type) -> Any:
    """A class for tyro whose --help is that of the Args `cls`, with its own flags in a box "script options".

    Without this they would stand beside -h, in a box without a description. A flag that may be None shows its other
    values alone. Nothing is parsed with this class.
    """
    from tyro import conf

    groups = [(x.name, _shown(x.default)) for x in fields(cls) if is_dataclass(x.default)]
    # tyro has a box for each dataclass inside the outer one, so the flags of `cls` itself need one without its groups.
    hidden: list[Any] = [(name, conf.Suppress[conf.Fixed[type(group)]], group) for name, group in groups]
    script = _shown(_subclass(cls, hidden, TITLE)())
    boxes = [("script", type(script), script), *((name, type(group), group) for name, group in groups)]
    return conf.DisallowNone[make_dataclass("Boxes", boxes)]


def _shown(flags: Any) -> Any:
    """A group of flags without "(default: None)" behind those that are None or empty by default."""
    from tyro import conf

    kinds = get_type_hints(type(flags), include_extras=True)
    unset: list[Any] = [
        (x.name, Annotated[kinds[x.name], conf.arg(help_behavior_hint="")], field(default=getattr(flags, x.name)))
        for x in fields(flags)
        if getattr(flags, x.name) in (None, ())
    ]
    return _subclass(type(flags), unset, type(flags).__doc__)(**vars(flags))


def _subclass(cls: type, changed: list[Any], title: str | None) -> Any:
    """`cls` with other types or defaults of some fields, and with `title` above its box."""
    # tyro looks for the source of this class, with the comments of its flags, under its name in its module.
    place = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": title}
    return make_dataclass(cls.__name__, changed, bases=(cls,), frozen=True, namespace=place)
