"""Engines that sample in the place of vLLM. hf.py is the plain one: it needs nothing but transformers."""

from typing import Any


def make_hf(*args: Any, **kwargs: Any) -> Any:
    """The plain engine: see `hf.Engine`."""
    from extras.engines.hf import Engine

    return Engine(*args, **kwargs)
