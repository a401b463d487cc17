"""Another forward for single modules of a model that somebody else has written."""

import functools
from collections.abc import Callable

from torch import nn


def replace_forward(module: nn.Module, forward: Callable) -> None:
    """From now on the module runs forward(module, own_forward, ...).

    It becomes an object of a class of its own kind. An attribute would do the same, but torch.compile would take each
    module for code of its own. It would compile every layer of a model again, and give up after some.
    """
    module.__class__ = _replacing(type(module), forward)


@functools.cache
def _replacing(kind: type[nn.Module], forward: Callable) -> type[nn.Module]:
    class Replacing(kind):
        def forward(self, *args, **kwargs):
            return forward(self, super().forward, *args, **kwargs)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Replacing, name, getattr(kind, name))
    return Replacing
