"""The process that watches a watchdog: `watchdog_guard.py PID SECONDS RANK`, started by rl/run/watchdog.py.

A thread of its parent PID writes to stdin all the time. If nothing has come for so many seconds, something holds the
parent's interpreter, and the parent gets SIGABRT. Seconds in which it is stopped, such as a suspended job, do not
count. It imports little: every rank has one.
"""

import os
import select
import signal
import sys


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main(parent: int, limit_s: float, rank: str) -> None:
    """Return when the parent has ended, or closes its end of the pipe."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # they are for the run
    tick, quiet = min(limit_s / 10, 1), 0.0  # this process counts ticks, so its own stops do not count either
    while os.getppid() == parent and quiet <= limit_s:
        if select.select([0], [], [], tick)[0]:
            if not os.read(0, 1 << 16):
                return
            quiet = 0.0
        elif not is_stopped(parent):
            quiet += tick
    if os.getppid() == parent:
        text = f"rank {rank}: something holds its interpreter for {quiet:.0f} s (--stall-timeout {limit_s:g})"
        os.write(2, f"{text}. The stacks of all threads follow, and the process ends.\n".encode())
        os.kill(parent, signal.SIGABRT)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
