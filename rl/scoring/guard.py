"""How a worker begins and ends, be it one that calls reward functions or one in which environments live.

A worker may be killed at any moment. It is two processes, a guard, which outlives the other one and kills whatever that
has left behind. No library does this. multiprocessing and concurrent.futures neither end a task that hangs nor find a
daemon that it has started, and their processes outlive a trainer that is killed.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from extras import systems
from extras.systems import adopt_orphans, die_with_parent


def begin_worker() -> socket.socket:
    """Begin a worker that `rl.children.start_worker` has started. Returns the socket to the process that started it.

    This function forks, and returns only in the child, which is the worker. The process itself stays as the guard. It
    ends when the child ends, and in the same way, or on SIGTERM, which it also gets when the trainer's thread that
    started it ends. Before that, the guard kills every process below it, daemons included, whatever they do.
    """
    descriptor, signals = int(sys.argv[1]), {signal.SIGCHLD, signal.SIGTERM}
    if systems.SYSTEM != "Linux":
        return systems.begin_worker(descriptor)
    adopt_orphans()  # a daemon that a user's function starts becomes a child of the guard
    die_with_parent(signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    if (worker := os.fork()) == 0:
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        sys.stdout.reconfigure(line_buffering=True)  # pyrefly: ignore[missing-attribute]  # the process may be killed at any moment
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    os.close(descriptor)  # the worker holds the only end of the socket
    pid = code = 0
    with contextlib.suppress(ChildProcessError):  # raised when nobody is left
        while pid != worker and signal.sigwait(signals) == signal.SIGCHLD:
            while pid != worker and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended
        while True:
            for child in children_of_this():
                os.kill(child, signal.SIGKILL)  # its own children then become ours, and are next
            os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(code)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def children_of_this() -> set[int]:
    """Ids of the processes that this thread has started or adopted, and that were not waited for."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
