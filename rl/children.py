"""Processes that this one starts, such as workers that call reward functions or environments."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def start(function: str, *arguments: str, env: Mapping[str, str], fds: Sequence[int] = ()) -> subprocess.Popen:
    """Start a process that calls a function, named with its module, with these command-line arguments.

    It leads a session of its own, may use the open files whose descriptors are `fds`, and prints to stderr.
    """
    module, _, name = function.rpartition(".")
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from {module} import {name}; {name}()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=2, pass_fds=fds, start_new_session=True)


def start_worker(function: str, theirs: socket.socket) -> subprocess.Popen:
    """Start a process whose argument is the descriptor of its socket, `theirs`, which is closed here. The worker
    ends with the thread that has started it.
    """
    with theirs:
        return start(function, str(theirs.fileno()), env=os.environ | {"OMP_NUM_THREADS": "1"}, fds=[theirs.fileno()])


def end_worker(process: subprocess.Popen) -> None:
    """End a worker and all that it has started. Its guard kills these, see `scoring.guard.begin_worker`."""
    process.terminate()
    process.send_signal(signal.SIGCONT)  # a user's function may have stopped the guard
    process.wait()
