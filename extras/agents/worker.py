"""The processes in which environments live: one for each conversation, forked from one that knows the user's file.

They import the standard library and the user's file only. What the trainer sends are pickles. What goes back is JSON, a
line each, so that nothing an environment returns can do more than be data. An environment that hangs or dies costs its
own conversation. See environments.py for the contract.
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from extras.agents.plain import plain
from extras.agents.tools import load, schemas_of
from extras.systems import adopt_orphans, die_with_parent
from rl.scoring import guard
from rl.scoring.worker import as_number, awaited, traceback_text

MAX_ANSWER = 64 << 20  # bytes of one answer
MAX_REPORT = 1 << 20  # characters of a report, and of what messages have besides their content. All of it is kept.
RESERVED = ("error_frac", "observation_tokens", "seconds", "turn_rewards")  # metrics that the run itself computes
CLOSE_SECONDS = 10  # that an environment's `close` may take


def converse(connection: socket.socket, make: Callable[[], Any]) -> None:
    """Let one environment answer, until the trainer closes the connection. This does not return."""
    requests, answers = connection.makefile("rb"), connection.makefile("w", encoding="utf-8", errors="replace")
    runner, environment = asyncio.Runner(), None
    with contextlib.suppress(EOFError, OSError):  # the trainer has closed the connection
        while True:
            method, arguments = pickle.load(requests)
            try:
                environment = environment or make()
                line = _answer(environment, method, arguments, runner.run)
            except BaseException:  # an environment may raise anything, SystemExit included. The conversation ends.
                line = json.dumps({"problem": traceback_text()})
            print(line, file=answers, flush=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CLOSE_SECONDS)  # which ends this process
    with contextlib.suppress(BaseException):
        awaited(environment.close(), runner.run)
    os._exit(0)


def _answer(environment: Any, method: str, arguments: tuple, run: Callable[[Any], Any]) -> str:
    """What an environment answers, with its report, as a line of JSON. Raises ValueError if it cannot be told, and
    whatever the environment raises.
    """
    said = awaited(getattr(environment, method)(*arguments), run) if hasattr(environment, method) else ()
    reward = None
    if method == "step" and isinstance(said, tuple) and len(said) == 2 and not isinstance(said[1], Mapping):
        said, reward = said[0], as_number(said[1])
    # None ends the conversation, but a `reset` that returns nothing adds nothing.
    messages = None if said is None and method == "step" else [dict(x) for x in said or ()]
    texts = [x.get(name) for x in messages or () for name in ("role", "content")]
    if not all(isinstance(x, str) for x in texts):
        raise ValueError(f"{method} returned {said!r:.300}: a message has a role and a content, texts")
    report = environment.report() if hasattr(environment, "report") else {}
    messages, report = plain(messages), plain(dict(awaited(report, run)))
    if reserved := [name for name in RESERVED if name in report]:
        raise ValueError(f"the report has {reserved[0]!r}, a name that the run uses itself; rename it")
    fields = [{name: x for name, x in message.items() if name != "content"} for message in messages or ()]
    if (size := len(json.dumps([report, fields]))) > MAX_REPORT:
        raise ValueError(f"the report, or messages without their content, has {size} characters of JSON")
    # A lone surrogate becomes a "?".
    line = json.dumps({"messages": messages, "reward": reward, "report": report}, ensure_ascii=False)
    if len(line) > MAX_ANSWER:
        raise ValueError(f"{method} answered {len(line)} characters, over the limit of {MAX_ANSWER}")
    return line


def main() -> None:
    """The first message names the user's files. The others start or end processes."""
    control = guard.begin_worker()
    make = _load(control)
    by_user, processes = guard.children_of_this(), {}  # started by the user's file; of conversations, by their number
    adopt_orphans()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(processes, by_user))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 10, 1)
        if not message:
            break
        command, number = json.loads(message)
        if command == "end":
            _kill(processes.get(number))
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with contextlib.suppress(OSError):  # raised where no process can be started. This conversation ends.
            if (pid := os.fork()) == 0:
                die_with_parent()
                adopt_orphans()  # what it starts becomes ours when it has ended, not before
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                os.setsid()
                control.close()
                converse(socket.socket(fileno=descriptors[0]), make)
            processes[number] = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(descriptors[0])
    deadline = time.monotonic() + CLOSE_SECONDS
    while processes and time.monotonic() < deadline:
        time.sleep(0.01)
    os._exit(0)  # the guard kills the rest


def _load(control: socket.socket) -> Callable[[], Any]:
    """Load the user's files, and say hello to the trainer. Returns what makes an environment. Ends this process if
    something is wrong, which the trainer is told.
    """
    try:
        make, tools, has_reset = load(*pickle.loads(control.recv(1 << 20)))
    except BaseException:
        _send(control, {"problem": traceback_text()})
        os._exit(1)
    if (child := os.fork()) == 0:  # where schemas are made: transformers takes memory that no conversation needs
        try:
            hello = {"tools": schemas_of(tools), "has_reset": has_reset}
        except BaseException:
            hello = {"problem": traceback_text()}
        _send(control, hello)
        os._exit("problem" in hello)
    if os.waitpid(child, 0)[1] != 0:
        os._exit(1)
    return make


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    line = json.dumps(message).encode() + b"\n"
    for start in range(0, len(line), 1 << 16):  # the socket takes no long messages
        control.send(line[start : start + (1 << 16)])


def _reap(processes: dict[int, int], by_user: set[int]) -> None:
    """Forget processes that have ended, and kill what they have left behind. It is a child of this one then."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            for number, pid in list(processes.items()):  # another signal may come meanwhile
                if pid == ended:
                    processes.pop(number, None)
    for pid in guard.children_of_this() - by_user - set(processes.values()):
        _kill(pid)


def _kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
