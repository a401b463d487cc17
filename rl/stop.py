"""Leave a run in good order when it is asked to: by SIGTERM, by SIGINT (Ctrl-C), or because --max-hours are over.

    stop.start(max_hours)                    # until the first `arm`, a signal ends the process at once
    for step in ...:
        stop.arm(save_and_close)             # what leaving takes, as of the last completed step
        ...  stop.exit_if_asked(group)  ...  # wherever all ranks pass: leave, if any of them was asked to
        stop.hold()                          # weights change: not before the next `arm`

The first signal only sets a flag. Long waits look at it by `requested` and end early. What they return then is worth
nothing, and `exit_if_asked` must follow. A second signal ends the process at once, whatever it is doing.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_S = 1.0  # launchers and schedulers may both pass on one request, so signals this close together are one
LOOK_EVERY_S = 0.5  # seconds between two looks at whether another rank was asked
KEY = "asked to stop"  # in the store of the process group, set by the first rank that was


@dataclass
class _State:
    """What this process knows of requests to stop."""

    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # restores what was before `start`
    asked_at: float = math.inf  # when the first signal came, or when --max-hours end, on the monotonic clock
    known: bool = False  # that some rank was asked. Once true, it stays so.
    looked_at: float = -math.inf  # when this rank last looked into the store
    leave: tuple[Callable[[], object], ...] = ()  # what `exit_if_asked` calls before it ends the process
    held: bool = False  # whether leaving has to wait for the next `arm`
    exit_code: int = 0


_state = _State()


def start(max_hours: float | None = None) -> None:
    """Take requests from now on. Call it in the main thread. Until the first `arm` a signal ends the process."""
    end()
    _state.asked_at = time.monotonic() + 3600 * (max_hours or math.inf)
    for number in SIGNALS:
        _state.undo.callback(signal.signal, number, signal.signal(number, signal.SIG_DFL))
    os.register_at_fork(after_in_child=end)  # a signal to a child is not a request to this run


def end() -> None:
    """Take no more requests. Signals do again what they did before `start`."""
    global _state
    old, _state = _state, _State()
    old.undo.close()


def arm(*leave: Callable[[], object]) -> None:
    """What `exit_if_asked` calls, in this order, before it ends the process. All ranks will call it together.

    Python runs signal handlers in the main thread only, and not while that waits in a collective. So a thread listens
    to a pipe, into which the interpreter writes the number of every signal that has a handler.
    """
    if not is_armed():
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        _state.undo.callback(os.close, writing)  # the thread ends
        _state.undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writing))
        threading.Thread(target=_listen, args=(reading, _state), daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
    _state.leave, _state.held = leave, False


def _listen(reading: int, state: _State) -> None:
    first_at = math.inf
    with open(reading, "rb", buffering=0) as pipe:
        while number := pipe.read(1):
            if number[0] in SIGNALS and first_at == math.inf:
                first_at = state.asked_at = time.monotonic()
                with contextlib.suppress(OSError):  # Ctrl-C ends `tee` too, and then nobody reads stderr
                    os.write(2, b"asked to stop: saving, then leaving; a second signal ends the process at once\n")
            elif number[0] in SIGNALS and time.monotonic() - first_at > SAME_REQUEST_S:
                os._exit(128 + number[0])  # what a shell calls death by this signal


def is_armed() -> bool:
    """Whether the first step has begun."""
    return bool(_state.leave)


def ask(exit_code: int) -> None:
    """Ask this process, and so all ranks, to stop, as a signal does. This is for a run that cannot go on, but can be
    saved.
    """
    _state.asked_at, _state.exit_code = min(_state.asked_at, time.monotonic()), exit_code


def requested(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this process was asked to stop, or knows of a rank that was. With a group (on the CPU) its ranks agree,
    and all must enter. After `hold` it is False, because what is waited for is needed then.
    """
    if _state.held:
        return False
    if not _state.known:
        now = time.monotonic()
        _state.known = now >= _state.asked_at
        # The first rank that was asked tells the others, through the store of their group.
        store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        if store is not None and _state.known:
            store.set(KEY, "")
        elif store is not None and now - _state.looked_at > LOOK_EVERY_S:
            _state.known, _state.looked_at = store.check([KEY]), now
    if group is not None:
        votes = torch.tensor(int(_state.known))
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
        _state.known = bool(votes)
    return _state.known


def hold() -> None:
    """Let no `exit_if_asked` end the process until the next `arm`, since what that would save is about to change."""
    _state.held = True


def exit_if_asked(group: dist.ProcessGroup) -> None:
    """End this process, with exit code 0 or that of `ask`, if any rank of the group was asked to stop. All must enter.
    See `hold`.
    """
    if requested(group):
        for call in _state.leave:
            call()
        dist.barrier(group=group)
        os._exit(_state.exit_code)  # workers and engines end with it. Taking them down one by one could hang.
