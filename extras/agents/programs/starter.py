"""The process from which agents are started. It outlives none of them, and nothing that an agent has started outlives
the agent, see rl/scoring/guard.py.

The trainer sends a message for each agent, with two open files: what the agent reads as its input, and what it writes
its report to, as descriptor 3. It gets a message back when the agent has ended.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
from typing import NoReturn

from extras.systems import adopt_orphans, die_with_parent, without_ranks
from rl.scoring import guard

MAX_MESSAGE = 1 << 16
REPORT = 3  # the descriptor of an agent's report
ENVIRONMENT = without_ranks(os.environ)  # of agents, which must not take part in the group of the ranks


def main() -> None:
    """Start and end agents, as the messages say, until the trainer closes the connection."""
    control = guard.begin_worker()
    agents: dict[int, int] = {}  # numbers of agents by the ids of their processes
    adopt_orphans()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(agents, control))
    while True:
        message, files, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2)
        if not message:
            break
        command, number, *rest = json.loads(message)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if command == "start":
            try:
                if (pid := os.fork()) == 0:
                    _become(files, *rest)
                agents[pid] = number
            except OSError:  # no process can be started
                control.send(json.dumps([number, None]).encode())
            for file in files:
                os.close(file)
        else:
            for pid in [pid for pid, other in agents.items() if other == number]:
                _kill(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os._exit(0)  # the guard kills the rest


def _become(files: list[int], command: str, more: dict[str, str]) -> NoReturn:
    """Become an agent, in a process that was forked for it."""
    try:
        die_with_parent()
        adopt_orphans()  # what it starts becomes ours when it has ended, not before
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for file, place in zip([fcntl.fcntl(file, fcntl.F_DUPFD, 16) for file in files], (0, REPORT), strict=True):
            os.dup2(file, place)
        os.dup2(2, 1)  # what it prints is shown beside what the run says
        os.closerange(REPORT + 1, 1 << 10)
        os.execve("/bin/sh", ["sh", "-c", command], ENVIRONMENT | more)
    finally:
        os._exit(127)


def _reap(agents: dict[int, int], control: socket.socket) -> None:
    """Tell the trainer of agents that have ended, and kill what they have left behind. It is a child of this process
    by then.
    """
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if (number := agents.pop(found[0], None)) is not None:
                ended.append([number, os.waitstatus_to_exitcode(found[1])])
    for pid in guard.children_of_this() - set(agents):
        _kill(pid)
    for message in ended:
        with contextlib.suppress(OSError):  # the trainer is about to end
            control.send(json.dumps(message).encode())


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
