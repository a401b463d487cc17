"""Notice a run that has stopped moving: a hung collective, a dead engine, a lock. Say where, and end it."""

import faulthandler
import os
import sys
import threading
import time

from rl.console import say

_last = 0.0, ""  # when the last sign of life came, and which
_backstop_s = 0.0
_stopped: threading.Event | None = None  # tells the thread that watches; None: nobody watches


def start(limit_s: float, rank: int) -> None:
    """End this process, with the stacks of all its threads on stderr, if `limit_s` seconds pass without a `beat`.

    Ending one rank is enough: torchrun then ends the others. A Python thread keeps watch; should a hanging C function
    hold the interpreter, faulthandler, which needs none, prints the stacks somewhat later.
    """
    global _backstop_s, _stopped
    stop()
    _backstop_s, _stopped = 1.1 * limit_s + 5, threading.Event()
    beat("start")
    threading.Thread(target=_watch, args=(limit_s, rank, _stopped), daemon=True).start()


def beat(phase: str | None = None) -> None:
    """A sign of life: `phase` has ended, or work beside the phases goes on. Does nothing unless `start` was called."""
    global _last
    if _stopped is not None:
        _last = time.monotonic(), phase or _last[1]
        faulthandler.dump_traceback_later(_backstop_s, exit=True, file=sys.__stderr__)


def stop() -> None:
    """Stop watching."""
    global _stopped
    if _stopped is not None:
        _stopped.set()
        _stopped = None
    faulthandler.cancel_dump_traceback_later()


def _watch(limit_s: float, rank: int, stopped: threading.Event) -> None:
    while not stopped.wait(min(limit_s / 10, 1)):
        last, phase = _last
        quiet = time.monotonic() - last
        if quiet > limit_s:
            say(
                f"rank {rank}: no phase has ended for {quiet:.0f} s (--stall-timeout {limit_s:g}); the last one was "
                f"{phase!r}. The stacks of all threads follow, and the process ends.",
                sys.__stderr__,
            )
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            os._exit(1)
