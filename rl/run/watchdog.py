"""End a run that has stopped moving, such as in a hung collective or a dead engine, and show where it stood.

Python's faulthandler does it, which is a thread of its own, in C, which needs no lock of the interpreter. The time in
which a job is suspended counts.
"""

import faulthandler

_limit_s: float | None = None  # None if nobody watches


def start(limit_s: float) -> None:
    """End this process, with the stacks of all its threads on stderr, if `limit_s` seconds pass without a `beat`.

    Ending one rank is enough, since torchrun then ends the others.
    """
    global _limit_s
    _limit_s = limit_s
    beat()


def beat() -> None:
    """A sign of life, since a phase has ended, or a checkpoint was written. Does nothing unless `start` was called."""
    if _limit_s is not None:
        faulthandler.dump_traceback_later(_limit_s, exit=True, file=2)  # stderr


def stop() -> None:
    """Stop watching."""
    global _limit_s
    _limit_s = None
    faulthandler.cancel_dump_traceback_later()
