"""Operating systems other than Linux, such as macOS: what only Linux can do, and what stands in for it elsewhere.

guard.py begins and ends the processes that call reward functions where the calls of Linux for that are missing.
ranks.py has what torchrun tells ranks, on any system.
"""

import ctypes
import platform
import signal
from typing import Any

SYSTEM = platform.system()  # Linux, or Darwin for macOS
LOOPBACK = "lo" if SYSTEM == "Linux" else "lo0"  # the network of this machine alone


def need_linux(what: str, fix: str) -> None:
    """Raise ValueError unless this is Linux. Args: what, which needs it; fix, what to do instead."""
    if SYSTEM != "Linux":
        raise ValueError(f"{what} needs Linux, and this machine runs {SYSTEM}; {fix}")


def die_with_parent(by: int = signal.SIGKILL) -> None:
    """Let this process get the signal `by` when the thread that has started it ends. Other systems than Linux have no
    such call, and there it does nothing.
    """
    if SYSTEM == "Linux":
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Let every process below this one become its child when its own parent ends. Only Linux has such a call."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def without_ranks(environment: Any) -> dict[str, str]:
    """The variables of an environment for a process that is no rank of the run, see ranks.py."""
    from extras.systems import ranks

    return ranks.without_ranks(environment)


def begin_worker(descriptor: int) -> Any:
    """Begin a worker on a system other than Linux, see `guard.begin_worker`."""
    from extras.systems import guard

    return guard.begin_worker(descriptor)
