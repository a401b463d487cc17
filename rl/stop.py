"""Leave a run in good order when it is asked to: by SIGTERM, by SIGINT (Ctrl-C), or because --max-hours are over.

    stop.start(max_hours)
    for step in ...:
        stop.arm(save_and_close)             # what leaving takes, as of the last completed step
        ...  stop.exit_if_asked(group)  ...  # wherever all ranks pass: leave, if any of them was asked to
        stop.hold()                          # weights change: not before the next `arm`

A first signal only sets a flag. Long waits look at it (`requested`) and cut themselves short; what they return then is
worth nothing, and an `exit_if_asked` must follow. A second signal ends the process at once, whatever it is doing. So
does one before the first `arm`: a start-up loads and compiles for minutes, and has nothing to save.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_S = 1.0  # launchers and schedulers may both pass on one request: signals this close together are one
LOOK_EVERY_S = 0.5  # seconds between two looks at whether another rank was asked
KEY = "asked to stop"  # in the store of the process group, set by the first rank that was

_asked_at: float | None = None  # when the first signal came
_deadline = float("inf")  # on the monotonic clock
_known = False  # that some rank was asked: once true, it stays so
_looked_at = float("-inf")  # when this rank last looked into the store
_leave: tuple[Callable[[], object], ...] = ()
_held = False  # whether leaving has to wait for the next `arm`
_old_handlers: dict[int, object] = {}
_forgets = False  # whether children of this process are told to forget all this
_pipe: int | None = None  # the interpreter writes the numbers of signals there


def start(max_hours: float | None = None) -> None:
    """Take requests from now on. Call it in the main thread.

    Python runs signal handlers between two steps of the main thread only, never while that waits in a collective. So a
    thread listens: to a pipe, into which the interpreter writes the number of every signal that has a handler.
    """
    global _deadline, _forgets, _pipe
    end()
    _deadline = time.monotonic() + 3600 * (float("inf") if max_hours is None else max_hours)
    reading, _pipe = os.pipe()
    os.set_blocking(_pipe, False)
    signal.set_wakeup_fd(_pipe)
    for number in SIGNALS:
        _old_handlers[number] = signal.signal(number, _only_wake_up)
    threading.Thread(target=_listen, args=(reading,), daemon=True).start()
    if not _forgets:
        os.register_at_fork(after_in_child=end)  # a signal to a child is no request to this run
        _forgets = True


def end() -> None:
    """Take no more requests: signals do again what they did before `start`."""
    global _asked_at, _deadline, _known, _looked_at, _leave, _held, _pipe
    while _old_handlers:
        signal.signal(*_old_handlers.popitem())
    if _pipe is not None:
        signal.set_wakeup_fd(-1)
        os.close(_pipe)  # the thread ends
    _asked_at, _deadline, _known, _looked_at, _pipe = None, float("inf"), False, float("-inf"), None
    _leave, _held = (), False


def _only_wake_up(number: int, frame: FrameType | None) -> None:
    pass


def _listen(reading: int) -> None:
    global _asked_at
    with open(reading, "rb", buffering=0) as pipe:
        while number := pipe.read(1):
            if number[0] not in SIGNALS:
                continue
            if not _leave:
                _write(b"asked to stop before the first step: there is nothing to save\n")
                os._exit(128 + number[0])  # what a shell calls death by this signal
            if _asked_at is None:
                _asked_at = time.monotonic()
                _write(b"asked to stop: saving, then leaving; a second signal ends the process at once\n")
            elif time.monotonic() - _asked_at > SAME_REQUEST_S:
                os._exit(128 + number[0])


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # Ctrl-C ends `tee` too, and then nobody reads stderr
        os.write(2, text)


def requested(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this process was asked to stop, or knows of a rank that was; with a group (on the CPU), whether one of
    its ranks says so, and all its ranks must enter. What the group says this rank then knows. False after `hold`: no
    `exit_if_asked` would follow, and what is waited for is needed.
    """
    global _known
    if _held:
        return False
    if group is None:
        return _asked()
    _known = _any_rank(_asked(), group)
    return _known


def _asked() -> bool:
    """Whether some rank was asked, as far as this one knows; the first to be asked tells the others."""
    global _known, _looked_at
    now = time.monotonic()
    if not _known:
        _known = _asked_at is not None or now > _deadline
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        if store is not None and _known:
            store.set(KEY, "")
        elif store is not None and now - _looked_at > LOOK_EVERY_S:
            _known, _looked_at = store.check([KEY]), now
    return _known


def arm(*leave: Callable[[], object]) -> None:
    """What `exit_if_asked` calls, in this order, before it ends the process. All ranks will call it together."""
    global _leave, _held
    _leave, _held = leave, False


def hold() -> None:
    """Let no `exit_if_asked` end the process until the next `arm`: what that would save is about to change."""
    global _held
    _held = True


def exit_if_asked(group: dist.ProcessGroup) -> None:
    """End this process, with exit code 0, if any rank of the group was asked to stop; all must enter. See `hold`."""
    if _held or not _any_rank(_asked(), group):
        return
    for call in _leave:
        call()
    dist.barrier(group=group)
    os._exit(0)  # workers and engines end with it; taking them down one by one could hang


def _any_rank(flag: bool, group: dist.ProcessGroup) -> bool:
    votes = torch.tensor(int(flag))
    dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
    return bool(votes)
