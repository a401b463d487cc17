"""Notice a run that has stopped moving: a hung collective, a dead engine, a lock. Say where, and end it."""

import faulthandler
import os
import sys
import threading
import time

_last: tuple[float, str] | None = None  # when the last sign of life came, and which; None: nobody watches
_backstop_s = 0.0


def start(limit_s: float, rank: int) -> None:
    """End this process, with the stacks of all its threads on stderr, if `limit_s` seconds pass without a `beat`.

    Ending one rank is enough: torchrun then ends the others. A Python thread keeps watch; should a hanging C function
    hold the interpreter, faulthandler, which needs none, prints the stacks somewhat later.
    """
    global _last, _backstop_s
    _last, _backstop_s = (time.monotonic(), "start"), 1.1 * limit_s + 5
    beat("start")
    threading.Thread(target=_watch, args=(limit_s, rank), daemon=True).start()


def beat(phase: str) -> None:
    """A sign of life: `phase` has ended. Does nothing unless `start` was called."""
    global _last
    if _last is not None:
        _last = time.monotonic(), phase
        faulthandler.dump_traceback_later(_backstop_s, exit=True, file=sys.__stderr__)


def stop() -> None:
    """Stop watching."""
    global _last
    _last = None
    faulthandler.cancel_dump_traceback_later()


def _watch(limit_s: float, rank: int) -> None:
    time.sleep(min(limit_s / 10, 1))
    while (last := _last) is not None:
        quiet = time.monotonic() - last[0]
        if quiet > limit_s:
            print(
                f"rank {rank}: no phase has ended for {quiet:.0f} s (--stall-timeout {limit_s:g}); the last one was "
                f"{last[1]!r}. The stacks of all threads follow, and the process ends.",
                file=sys.__stderr__,
                flush=True,
            )
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            os._exit(1)
        time.sleep(min(limit_s / 10, 1))
