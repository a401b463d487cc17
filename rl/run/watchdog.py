"""Notice a run that has stopped moving: a hung collective, a dead engine, a lock. Say where, and end it.

The time in which a job is suspended does not count.
"""

import contextlib
import faulthandler
import os
import pathlib
import subprocess
import sys
import threading

from rl.console import say
from rl.run import last_words
from rl.scoring.awake import Awake

GUARD = pathlib.Path(__file__).with_name("watchdog_guard.py")

_phase = ""  # the last one that has ended
_beats = 0  # signs of life so far
_stopped: threading.Event | None = None  # tells the thread that watches; None: nobody watches


def start(limit_s: float, rank: int) -> None:
    """End this process, with the stacks of all its threads on stderr, if `limit_s` seconds pass without a `beat`.

    Ending one rank is enough: torchrun then ends the others. A Python thread keeps watch. Should a hanging C function
    hold the interpreter, the thread cannot run either: another process, rl/run/watchdog_guard.py, watches the thread.
    """
    global _stopped
    stop()
    _stopped = threading.Event()
    beat("start")
    faulthandler.enable(sys.__stderr__, all_threads=True)  # prints the stacks when the guard ends this process
    guard = subprocess.Popen(
        [sys.executable, "-S", str(GUARD), str(os.getpid()), str(limit_s), str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is for the run
    )
    os.set_blocking(guard.stdin.fileno(), False)
    threading.Thread(target=_watch, args=(limit_s, rank, _stopped, guard), daemon=True).start()


def beat(phase: str | None = None) -> None:
    """A sign of life: `phase` has ended, or work beside the phases goes on. Does nothing unless `start` was called."""
    global _phase, _beats
    if _stopped is not None:
        _phase, _beats = phase or _phase, _beats + 1
        if phase is not None:
            last_words.note(phase)


def stop() -> None:
    """Stop watching."""
    global _stopped
    if _stopped is not None:
        _stopped.set()
        _stopped = None


def _watch(limit_s: float, rank: int, stopped: threading.Event, guard: subprocess.Popen) -> None:
    tick = min(limit_s / 10, 1)
    quiet, seen = Awake(tick), _beats
    while not stopped.wait(tick):
        with contextlib.suppress(OSError):  # it was stopped for long, or killed
            guard.stdin.write(b"\0")
        if seen != _beats:
            quiet, seen = Awake(tick), _beats
        elif quiet.look() > limit_s:
            say(
                f"rank {rank}: no phase has ended for {quiet.seconds:.0f} s (--stall-timeout {limit_s:g}); the last "
                f"one was {_phase!r}. The stacks of all threads follow, and the process ends.",
                sys.__stderr__,
            )
            faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            last_words.say_who_ended()
            os._exit(1)
    guard.kill()
    guard.wait()
