"""Engines that sample in the place of vLLM, and which engine a run has that names none.

hf.py is the plain one. It needs nothing but transformers.
"""

import os
from importlib.util import find_spec
from typing import Any, Literal

HAS_VLLM = getattr(find_spec("vllm"), "origin", None) is not None  # any folder that is called vllm has a spec as well
DEFAULT: Literal["vllm", "hf"] = "vllm" if HAS_VLLM else "hf"  # of --engine


def check_installed(engine: str) -> None:
    """Raise ValueError if this engine is vllm and vLLM is not installed. If another engine is used since vLLM is not
    installed, say so on rank 0.
    """
    if engine == "vllm" and not HAS_VLLM:
        raise ValueError(
            "--engine vllm: vLLM is not installed; install it, as `make install` does on Linux, or leave the flag out"
        )
    if not HAS_VLLM and os.environ.get("RANK", "0") == "0":
        from rl.console import say

        say("engine | vLLM is not installed, so the run samples with --engine hf, which is slow with large models")


def make_hf(*args: Any, **kwargs: Any) -> Any:
    """The plain engine, see `hf.Engine`."""
    from extras.engines.hf import Engine

    return Engine(*args, **kwargs)
