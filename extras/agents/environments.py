"""Environments: what answers the policy, turn by turn, such as tools, a game or a program.

    torchrun train_grpo.py --tools calculator.py                  functions that the policy may call
    torchrun train_grpo.py --environment game.py:Game --max-turns 8

A user's class. Every method but `step` may be missing, and each may be `async`:

    class Environment:                            made anew for each response, in a process of its own
        tools = (calculate,)                      functions with types and docstring, or JSON schemas
        def reset(self, row, seed):               messages after row["prompt"]; () by default. Equal within a group
        def step(self, reply):                    messages that answer reply.text, or reply.calls; None ends it.
                                                  With a reward for the turn: (messages, reward)
        def report(self):                         {"calls": 2}: for the reward and the log
        def close(self):                          called when the conversation has ended

Without `step` the calls of `tools` are made, until a turn has none. Tokens and limits are not its business: what the
policy sampled stays as it is, and messages are appended by the chat template (chat.py). An exception, a hang or
the death of its process ends a conversation, which then has no score, is counted, and is not learned from.
"""

import atexit
import contextlib
import json
import pickle
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from extras.agents import EnvironmentFlags
from extras.agents.calls import Calls
from extras.agents.tools import Call, Reply
from extras.agents.worker import MAX_ANSWER
from rl import children
from rl.console import say
from rl.data.rows import Row
from rl.scoring.worker import as_number

START_SECONDS = 120  # to import the user's file, and to reach a tool server
END_SECONDS = 15  # for the `close` of environments, when all end


class Answer(NamedTuple):
    """What an environment says to a turn."""

    key: Hashable
    messages: list[dict] | None  # None: the conversation has ended
    has_failed: bool = False
    reward: float | None = None  # for the turn, if the environment gives any


class _Environment:
    """One environment, as the trainer sees it."""

    def __init__(self, number: int, row: Row):
        self.number, self.row = number, row
        self.socket: socket.socket | None = None  # to its process
        self.received, self.asked_at, self.waited_s = bytearray(), 0.0, 0.0
        self.report: dict[str, Any] = {}


class Environments:
    """The environments of the responses that a rank has in flight, each in a process of its own.

    Raises ValueError if the user's file cannot be loaded, or a tool server cannot be reached.
    """

    def __init__(self, flags: EnvironmentFlags):
        self.flags = flags
        self.open: dict[Hashable, _Environment] = {}
        self.at_once: list[Answer] = []  # answers that need no process
        self.selector = selectors.DefaultSelector()
        self.count, self.problems = 0, 0
        self.starter = ThreadPoolExecutor(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a socket for each conversation
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
        hello = self._launch()
        atexit.register(self.close)
        if "problem" in hello:
            self._stop()
            flag = f"--environment {flags.environment}" if flags.environment else f"--tools {' '.join(flags.tools)}"
            raise ValueError(f"{flag} cannot be loaded: {hello['problem']}")
        self.has_reset, self.tools = hello["has_reset"], hello["tools"]  # tools: JSON schemas

    def _launch(self) -> dict[str, Any]:
        """Start the process from which those of the conversations are forked. Returns its first message."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = children.start_worker("extras.agents.worker.main", theirs)
        flags = self.flags
        self.control.send(pickle.dumps((flags.environment, flags.tools, flags.max_tool_response_length)))
        self.control.settimeout(START_SECONDS)
        try:
            received = b""
            while not received.endswith(b"\n"):  # the schemas of tools may be longer than one message of a socket
                received += self.control.recv(1 << 16) or b'{"problem": "its process ended"}\n'
            return json.loads(received)
        except (OSError, ValueError) as error:
            return {"problem": f"its process gave no answer: {error!r}"}

    def _stop(self) -> None:
        """End the process that `_launch` has started, and all below it."""
        self.control.close()
        children.end_worker(self.process)

    def start(self, key: Hashable, row: Row, seed: int) -> None:
        """Begin a conversation. Its first answer is what `reset` says. Its process starts while the engine samples."""
        self.count += 1
        columns = {name: x for name, x in row.items() if name not in ("prompt_ids", "given")}
        x = self.open[key] = _Environment(self.count, columns)
        try:
            x.socket, theirs = socket.socketpair()
        except OSError as error:  # too many files are open
            self.at_once.append(self.fail(key, repr(error)))
            return
        self._later("start", x.number, theirs)
        if self.has_reset:
            self._send(key, "reset", columns, seed)
        else:
            self.at_once.append(Answer(key, []))

    def ask(self, key: Hashable, text: str, calls: Calls, turn: int) -> None:
        """Hand a turn of the policy to its environment."""
        numbered = tuple(Call(f"call{i:05d}", name, arguments) for i, (name, arguments) in enumerate(calls))
        self._send(key, "step", Reply(text, numbered, turn))

    def answers(self, wait_s: float) -> list[Answer]:
        """The answers that have come. Waits for the first one for this many seconds at most."""
        answers, self.at_once = self.at_once, []
        for ready, _ in self.selector.select(0.0 if answers else wait_s):
            answers += self._receive(ready.data)
        now = time.monotonic()
        for key, x in self.open.items():
            if x.asked_at and now - x.asked_at > self.flags.environment_timeout:
                answers.append(self.fail(key, f"no answer within {self.flags.environment_timeout:g} s"))
        return answers

    def end(self, key: Hashable) -> dict[str, Any]:
        """Forget a conversation. Returns its report, with the seconds it has waited for answers."""
        x = self.open.pop(key)
        self._close(x, kill=bool(x.asked_at))
        return x.report | {"seconds": round(x.waited_s, 6)}

    def close(self) -> None:
        """End all processes."""
        for key in list(self.open):
            self.end(key)
        self.starter.shutdown()
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # processes that were forked meanwhile hold this side open too
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self._stop()
        atexit.unregister(self.close)

    def _send(self, key: Hashable, method: str, *arguments: Any) -> None:
        x = self.open[key]
        try:
            x.socket.settimeout(self.flags.environment_timeout)
            x.socket.sendall(pickle.dumps((method, arguments)))
            x.asked_at = time.monotonic()
            self.selector.register(x.socket, selectors.EVENT_READ, key)  # what it says unasked can wait
        except (OSError, RecursionError) as error:  # RecursionError: the arguments of a call, from pickle
            self.at_once.append(self.fail(key, repr(error)))

    def _later(self, *command: Any) -> None:
        """`_command` in a thread: a fork takes a millisecond, and decoding goes on meanwhile."""
        try:
            self.starter.submit(self._command, *command)
        except RuntimeError:  # this process is about to end
            self._command(*command)

    def _command(self, name: str, number: int, theirs: socket.socket | None = None) -> None:
        """Tell the first process to start or end that of a conversation. If it was killed, another one takes over.
        Without one, `theirs` is closed: the conversation takes that for the death of its process.
        """
        message, descriptors = json.dumps([name, number]).encode(), [theirs.fileno()] if theirs else []
        try:
            socket.send_fds(self.control, [message], descriptors)
        except OSError:
            self._stop()
            if theirs is not None and "problem" not in self._launch():
                socket.send_fds(self.control, [message], descriptors)
        finally:
            if theirs is not None:
                theirs.close()

    def _receive(self, key: Hashable) -> list[Answer]:
        """What a conversation's process has sent: an answer if it is complete."""
        x = self.open[key]
        try:
            data = x.socket.recv(1 << 16)  # more would be slow, since a buffer of that size is made first
        except OSError:
            data = b""
        x.received += data
        if not data or len(x.received) > MAX_ANSWER:
            return [self.fail(key, "its process ended" if not data else f"it answered {len(x.received)} bytes")]
        if not x.received.endswith(b"\n"):
            return []
        try:
            answer = json.loads(x.received)
            if "problem" in answer:
                return [self.fail(key, answer["problem"])]
            x.report, messages, reward = dict(answer["report"]), answer["messages"], answer["reward"]
            reward = None if reward is None else as_number(reward)
            if messages is not None:
                messages = [x | {"role": str(x["role"]), "content": str(x["content"])} for x in messages]
            self.selector.unregister(x.socket)
            x.waited_s, x.asked_at = x.waited_s + time.monotonic() - x.asked_at, 0.0
            x.received.clear()
            return [Answer(key, messages, reward=reward)]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            return [self.fail(key, f"it sent something else: {error!r}")]

    def fail(self, key: Hashable, problem: str) -> Answer:
        """End the process of a conversation that cannot go on, and say why if it is the first one."""
        x = self.open[key]
        if self.problems == 0:
            say(f"environment: the conversation of {x.row.get('row_place', 'a row')} ended: {problem}", sys.stderr)
        self.problems += 1
        self._close(x, kill=True)
        return Answer(key, None, has_failed=True)

    def _close(self, x: _Environment, *, kill: bool) -> None:
        if x.socket is not None:
            if x.asked_at:
                self.selector.unregister(x.socket)
            x.socket.close()  # its process ends with it, if it listens
            x.socket, x.asked_at = None, 0.0
            if kill:
                self._later("end", x.number)
