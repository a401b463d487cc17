"""Leave a run in good order when it is asked to: by SIGTERM, by SIGINT (Ctrl-C), or because --max-hours are over.

    stop.start(args.max_hours)
    for step in ...:
        stop.arm(save_and_close)     # what leaving takes, as of the last completed step
        ...  stop.check(d)  ...      # wherever all ranks pass: leave, if any of them was asked to

A signal only sets a flag. Long waits look at it (`requested`) and cut themselves short; what they return then is worth
nothing, and a `check` must follow. A second signal ends the process at once.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

from rl.fsdp import Dist

SAME_REQUEST_S = 1.0  # launchers and schedulers may both pass on one request: signals this close together are one

_asked_at: float | None = None  # when the first signal came
_deadline = float("inf")  # on the monotonic clock
_leave: tuple[Callable[[], object], ...] = ()
_old_handlers: dict[int, object] = {}


def start(max_hours: float | None = None) -> None:
    """Take requests from now on. Call it in the main thread."""
    global _asked_at, _deadline, _leave
    _asked_at, _leave = None, ()
    _deadline = time.monotonic() + 3600 * (float("inf") if max_hours is None else max_hours)
    for number in (signal.SIGTERM, signal.SIGINT):
        _old_handlers[number] = signal.signal(number, _handle)


def end() -> None:
    """Take no more requests: signals do again what they did before `start`."""
    global _asked_at, _deadline
    _asked_at, _deadline = None, float("inf")
    while _old_handlers:
        signal.signal(*_old_handlers.popitem())


def _handle(number: int, frame: FrameType | None) -> None:
    global _asked_at
    if _asked_at is None:
        _asked_at = time.monotonic()
        os.write(2, b"asked to stop: saving, then leaving; a second signal ends the process at once\n")
    elif time.monotonic() - _asked_at > SAME_REQUEST_S:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def requested(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this process was asked to stop; with a group (on the CPU), whether one of its ranks was, and all its
    ranks must enter.
    """
    asked = _asked_at is not None or time.monotonic() > _deadline
    return _any_rank(asked, group) if group is not None else asked


def arm(*leave: Callable[[], object]) -> None:
    """What a `check` calls, in this order, before it ends the process. All ranks will call it together."""
    global _leave
    _leave = leave


def check(d: Dist) -> None:
    """End this process, with exit code 0, if any rank was asked to stop. All ranks must enter."""
    if not _any_rank(requested(), None):
        return
    for call in _leave:
        call()
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # workers and engines end with it; taking them down one by one could hang


def _any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    votes = torch.tensor(int(flag))
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    return bool(votes)
