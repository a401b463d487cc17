"""The flags of the processes that score responses, and what --custom-reward-function may be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl import children
from rl.flags import Count, Free, Processes, Seconds

BY_DATA_SOURCE = "rewards/by_data_source.py"  # the default reward


@dataclass(frozen=True)
class Scoring:
    """These flags are about the processes that score."""

    # Each rank has this many processes that score. The default is the cores of the machine divided by its ranks, and at
    # most 16.
    reward_workers: Free[Processes | None] = None
    # Scoring a response may take this many seconds of CPU time, and four times as many by the clock. Then the response
    # has no score.
    reward_timeout: Free[Seconds] = 10.0
    # A process that scores may have this many MiB of private memory. 0 means no limit. Only Linux
    # sets this limit.
    reward_memory_mb: Free[Count] = 4096
    allow_unsafe_code_execution: Free[bool] = False  # Let code rewards run model-written code without a full sandbox.


def parse_functions(specs: Sequence[str]) -> list[tuple[str, float, str, str]]:
    """`path/to/file.py[:function[:weight]]` -> (label, weight, file, function). The label is the file's stem, and the
    function's name where two share a stem. Raises ValueError naming the spec.
    """
    parsed = []
    for spec in specs:
        path, name, weight = (spec.split(":", 2) + ["", ""])[:3]
        file = Path(path) if Path(path).is_file() else children.REPOSITORY / path  # wherever the script was started
        if not file.is_file():
            raise ValueError(f"--custom-reward-function {spec!r}: no file {path!r}; give path/to/file.py:function")
        try:
            number = float(weight or 1)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"--custom-reward-function {spec!r}: the weight {weight!r} is not a number, such as 0.5")
        parsed.append((number, str(file.resolve()), name or "compute_score"))
    stems = [Path(file).stem for _, file, _ in parsed]
    labels = [s if stems.count(s) == 1 else f"{s}.{name}" for s, (_, _, name) in zip(stems, parsed, strict=True)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"--custom-reward-function {' '.join(specs)}: a function is named twice; add up its weights")
    return [(label, *rest) for label, rest in zip(labels, parsed, strict=True)]
