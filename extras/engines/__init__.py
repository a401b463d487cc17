"""Engines that sample in the place of vLLM, what they cannot do, and the engine of a run that names none.

hf.py is the plain one. It needs nothing but transformers. sglang/ has SGLang in a process of its own.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

HAS_VLLM = getattr(find_spec("vllm"), "origin", None) is not None  # any folder that is called vllm has a spec as well
DEFAULT: Literal["vllm", "hf"] = "vllm" if HAS_VLLM else "hf"  # of --engine


def python_of_sglang() -> str | None:
    """The Python that has SGLang: $SGLANG_PYTHON, that of `make sglang`, or this one. None if there is none."""
    made = Path(__file__).resolve().parents[2] / ".venv-sglang" / "bin" / "python"
    here = sys.executable if find_spec("sglang") is not None else None
    return os.environ.get("SGLANG_PYTHON") or (str(made) if made.exists() else here)


def check_choice(flags: Any) -> None:
    """Raise ValueError if the engine that `EngineSizes` or `EngineFlags` name is not installed, or cannot do what they
    ask for. If another engine is used since vLLM is not installed, say so on rank 0.
    """
    engine, name = flags.engine, f"--engine {flags.engine}"
    if engine == "vllm" and not HAS_VLLM:
        raise ValueError(
            f"{name}: vLLM is not installed; install it, as `make install` does on Linux, or leave the flag out"
        )
    if engine == "sglang" and python_of_sglang() is None:
        raise ValueError(
            f"{name}: SGLang is not installed; run `make sglang`, which gives it an environment of its own, or name a "
            "Python that has it in $SGLANG_PYTHON"
        )
    for flag in ("router_replay", "log_stats") if engine == "sglang" else ():
        if getattr(flags, flag, False):
            raise ValueError(f"--{flag.replace('_', '-')} needs --engine vllm; {name} cannot do that")
    if engine == "hf" and (size := flags.tensor_model_parallel_size) != 1:
        raise ValueError(f"--tensor-model-parallel-size {size} needs --engine vllm or sglang; {name} has one device")
    if not HAS_VLLM and engine == "hf" and os.environ.get("RANK", "0") == "0":
        from rl.console import say

        say("engine | vLLM is not installed, so the run samples with --engine hf, which is slow with large models")


def reads_text_only(engine: str) -> str | None:
    """The flag that names this engine, if it samples from nothing but text."""
    return "--engine sglang" if engine == "sglang" else None


def check_together(rollout: Any, decoding: Any) -> None:
    """Raise ValueError if the engine that `EngineFlags` name cannot sample what a script that trains asks for."""
    name = f"--engine {rollout.engine}"
    if rollout.is_quantized and rollout.engine != "vllm":
        flag = f"--rollout-quantization {rollout.rollout_quantization}"
        raise ValueError(f"{flag} needs --engine vllm; {name} has no quantization")
    for flag, off in {"top_p": 1.0, "top_k": -1, "min_p": 0.0}.items() if rollout.engine == "sglang" else ():
        if (value := getattr(decoding, flag)) != off:
            raise ValueError(
                f"--{flag.replace('_', '-')} {value} needs --engine vllm or hf; SGLang returns log-probs of the full "
                "distribution, before tokens are left out"
            )


def make_other(model: str, ranks: Any, flags: Any, **how: Any) -> Any:
    """The engine that `flags` name, which is not vLLM. See `rl.sampling.engines.make_engine`."""
    if flags.engine == "sglang":
        from extras.engines.sglang.engine import Engine as SGLang

        return SGLang(model, ranks, flags, **how)
    from extras.engines.hf import Engine

    return Engine(model, ranks, flags, longest=how["longest"])
