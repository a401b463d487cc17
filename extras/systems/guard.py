"""How a worker begins and ends on a system other than Linux. rl/scoring/guard.py describes workers and guards.

Without the calls of Linux a guard asks again and again whether the worker and the trainer still live. It kills the
worker's process group, which has every process that the worker has started, except for those that have left the group,
such as daemons.
"""

import contextlib
import os
import resource
import signal
import socket
import sys
import time

LOOK_EVERY_S = 0.05  # seconds between two looks at the worker and the trainer


def begin_worker(descriptor: int) -> socket.socket:
    """Begin a worker, and return the socket with this descriptor in it. The process itself stays as the guard.

    The guard ends when the worker ends, and in the same way, or on SIGTERM, or when the trainer has ended.
    """
    trainer = os.getppid()
    asked: list[int] = []  # SIGTERM, once it has come
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (worker := os.fork()) == 0:
        os.setpgid(0, 0)  # a group of its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.stdout.reconfigure(line_buffering=True)  # the process may be killed at any moment
        os.set_inheritable(descriptor, False)
        return socket.socket(fileno=descriptor)
    with contextlib.suppress(OSError):  # it has already ended
        os.setpgid(worker, worker)  # both do this, since either may be the first to need it
    os.close(descriptor)  # the worker holds the only end of the socket
    pid = code = 0
    while not (pid or asked) and os.getppid() == trainer:
        pid, code = os.waitpid(worker, os.WNOHANG)
        time.sleep(0 if pid else LOOK_EVERY_S)
    with contextlib.suppress(OSError):  # nobody of the group is left
        os.killpg(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(code if pid else os.waitpid(worker, 0)[1])
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))
