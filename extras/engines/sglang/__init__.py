"""SGLang as the engine, for --engine sglang. docs/engines.md says what it cannot do."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def python_of_sglang() -> str | None:
    """The Python that has SGLang: $SGLANG_PYTHON, that of `make sglang`, or this one. None if there is none."""
    made = ROOT / ".venv-sglang" / "bin" / "python"
    here = sys.executable if find_spec("sglang") is not None else None
    return os.environ.get("SGLANG_PYTHON") or (str(made) if made.exists() else here)


def check_sglang(flags: Any) -> None:
    """Raise ValueError if SGLang is not installed, or cannot do what `EngineSizes` or `EngineFlags` ask for."""
    if python_of_sglang() is None:
        raise ValueError(
            "--engine sglang: SGLang is not installed; run `make sglang`, which gives it an environment of its own, or "
            "name a Python that has it in $SGLANG_PYTHON"
        )
    for flag in ("router_replay", "log_stats"):
        if getattr(flags, flag, False):
            raise ValueError(f"--{flag.replace('_', '-')} needs --engine vllm; --engine sglang cannot do that")


def check_decoding(decoding: Any) -> None:
    """Raise ValueError if training would learn from log-probs that SGLang gives for another distribution."""
    for flag, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
        if (value := getattr(decoding, flag)) != off:
            raise ValueError(
                f"--{flag.replace('_', '-')} {value} needs --engine vllm or hf; SGLang gives the log-probs that tokens "
                "have before others are left out"
            )
