"""Conversations in a process of their own: for a turn the trainer's thread only passes ids on.

Turns are read, environments are asked, and their answers are written and tokenized there, while the engine samples. The
process is forked from the trainer before the engine is made. Both sides send lists of messages:

    ("begin", number, row, sampling, seed)          the trainer: a response begins; numbers count them
    ("after", number, ids, finish reason)           the policy has sampled these ids
    ("end", number)                                 the response is given up
    None                                            nothing more will come

    (number, ids, finish reason, None)              the other side: the response goes on after these ids
    (number, None, finish reason, outcome)          it has ended

An answer that ends a response holds its outcome, so that `end` need not ask for it.
"""

import atexit
import contextlib
import functools
import os
import pickle
import select
import selectors
import signal
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from extras.agents import EnvironmentFlags
from extras.agents.conversations import Conversations
from extras.systems import die_with_parent, need_linux
from rl.data.types import Outcome
from rl.sampling.loop import Partner, Trajectory

CHECK_S = 0.25  # how often the time limit of environments is looked at while nothing is sent


class HostedConversations(Partner):
    """The partner of the policy, see `rl.sampling.loop.Partner`: `Conversations`, for which another process works.

    Args and errors are those of `Conversations`. Systems other than Linux raise ValueError too. What it has read and
    checked of the user's files and of the chat template is here too; conversations are only there.
    """

    def __init__(self, flags: EnvironmentFlags, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]):
        flag = f"--environment {flags.environment}" if flags.environment else f"--tools {' '.join(flags.tools)}"
        need_linux(flag, "leave it out, or train on a Linux machine")
        self.here = Conversations(flags, tokenizer, stop_ids)
        self.prompt_text, self.outcome_of = self.here.prompt_text, self.here.outcome_of
        self.chat, self.environments = self.here.chat, self.here.environments
        self.count = 0  # conversations that were ever begun
        self.open: dict[int, Trajectory] = {}  # by number
        self.numbers: dict[Trajectory, int] = {}
        self.sent: dict[Trajectory, int] = {}  # ids of each response that the other side knows
        self.outcomes: dict[Trajectory, Outcome] = {}  # of responses that have ended
        self.messages: list[tuple] = []  # to be sent
        self.connection, theirs = Pipe()
        self.poll = select.poll()  # kept, since `Connection.poll` makes such an object in every decoding step
        self.poll.register(self.connection, select.POLLIN)
        if (pid := os.fork()) == 0:
            self.connection.close()
            _host(self.here, theirs)
        self.pid = pid
        theirs.close()
        atexit.register(self.close)

    def begin(self, x: Trajectory, seed: int) -> None:
        """See `Conversations.begin`."""
        self.count += 1
        self.open[self.count], self.numbers[x], self.sent[x] = x, self.count, 0
        row = {name: value for name, value in x.row.items() if name not in ("prompt_ids", "given")}
        self.messages.append(("begin", self.count, row, x.sampling, seed))

    def after(self, x: Trajectory) -> bool:
        """See `Conversations.after`. The answer to any turn comes later."""
        self.messages.append(("after", self.numbers[x], x.ids[self.sent[x] :], x.finish_reason))
        self.sent[x] = len(x.ids)
        return True

    def answers(self, wait_s: float) -> list[tuple[Trajectory, list[int] | None]]:
        """See `Conversations.answers`. Sends all messages first. Raises RuntimeError if the process has ended."""
        answers: list[tuple[Trajectory, list[int] | None]] = []
        self._send()
        try:
            while self.poll.poll(0 if answers else wait_s * 1000):
                answers += [x for message in self.connection.recv() for x in self._heard(*message)]
        except (EOFError, OSError) as error:
            raise self._ended() from error
        return answers

    def _send(self) -> None:
        """Send all messages. Raises RuntimeError if the process has ended."""
        try:
            if self.messages:
                self.connection.send(self.messages)
        except OSError as error:
            raise self._ended() from error
        self.messages = []

    def _ended(self) -> RuntimeError:
        """What to say if the process has ended."""
        if os.WIFSIGNALED(self.status):
            number = os.WTERMSIG(self.status)
            why = f"it was killed by signal {number}, perhaps because the memory of the machine was full"
        else:
            why = "its error stands above"
        return RuntimeError(f"the process of the conversations has ended; {why}")

    @functools.cached_property
    def status(self) -> int:
        """How the process has ended, as `os.waitpid` says, which waits for that and can say it only once."""
        return os.waitpid(self.pid, 0)[1]

    def _heard(
        self, number: int, ids: list[int] | None, finish_reason: str, outcome: Outcome | None
    ) -> list[tuple[Trajectory, list[int] | None]]:
        """What was answered to a response, nothing if that was given up meanwhile."""
        if (x := self.open.get(number)) is None:
            return []
        x.finish_reason = finish_reason
        self.sent[x] += len(ids or ())
        if outcome is not None:
            self.outcomes[x] = outcome
        return [(x, ids)]

    def end(self, x: Trajectory) -> Outcome:
        """See `Conversations.end`. There is nothing to say of a response that is given up."""
        number = self.numbers.pop(x)
        del self.open[number], self.sent[x]
        if x not in self.outcomes:
            self.messages.append(("end", number))
            self._send()  # at once, since no turn may follow
            return self.outcome_of("")
        return self.outcomes.pop(x)

    def close(self) -> None:
        """End all processes."""
        atexit.unregister(self.close)
        # The end of the connection would not do: processes that were forked meanwhile hold this side open too.
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.connection.close()
        with contextlib.suppress(ChildProcessError):
            _ = self.status
        self.here.close()


def _host(conversations: Conversations, connection: Connection) -> NoReturn:
    """Answer the trainer until nothing more comes, and end this process. An error is printed with its traceback."""
    try:
        _answer(conversations, connection)
        os._exit(0)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def _answer(conversations: Conversations, connection: Connection) -> None:
    """See `_host`."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the trainer may still need conversations
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or the first use warns that this process was forked
    selector = conversations.environments.selector = selectors.DefaultSelector()  # the other one is the trainer's too
    trajectories: dict[int, Trajectory] = {}
    sender = ThreadPoolExecutor(1)  # or both sides could wait until the other one reads
    while True:
        answers: list[tuple[Trajectory, list[int] | None]] = []
        # pyrefly: ignore[bad-argument-type]  # a selector of Linux is a file that is ready when one of its files is
        if connection in wait([connection, selector], CHECK_S):
            try:
                messages = connection.recv()
            except (EOFError, OSError):
                break
            if messages is None:
                break
            for message in messages:
                answers += _obey(conversations, trajectories, *message)
        answers += conversations.answers(0.0)
        told = [_told(conversations, trajectories, x, ids) for x, ids in answers if x.key[0] in trajectories]
        if told:
            sender.submit(connection.send_bytes, pickle.dumps(told))
    sender.shutdown()
    conversations.close()


def _obey(
    conversations: Conversations, trajectories: dict[int, Trajectory], command: str, number: int, *values: Any
) -> list[tuple[Trajectory, None]]:
    """Do what a message of the trainer says. Returns the response if it has ended by that."""
    if command == "begin":
        row, sampling, seed = values
        x = trajectories[number] = Trajectory((number, 0), row, sampling, None)
        conversations.begin(x, seed)
    elif (x := trajectories.get(number)) is None:
        pass  # it has ended, which the trainer did not know yet
    elif command == "end":
        conversations.end(trajectories.pop(number))
    else:
        ids, x.finish_reason = values
        x.ids += ids
        if not conversations.after(x):
            return [(x, None)]
    return []


def _told(
    conversations: Conversations, trajectories: dict[int, Trajectory], x: Trajectory, ids: list[int] | None
) -> tuple[int, list[int] | None, str, Outcome | None]:
    """An answer as the trainer gets it."""
    number = x.key[0]
    if ids is not None:
        x.ids += ids
        return number, ids, x.finish_reason, None
    del trajectories[number]
    return number, None, x.finish_reason, conversations.end(x)
