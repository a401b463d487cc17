"""The partner of the policy with --agent, see `rl.sampling.loop.Partner`: each response is a process of its own.

A response waits in the loop as long as its agent lives. What the agent asks for becomes a row of the response, or goes
on with one. Whatever it samples has a seed that follows from the agent, from the tokens before it, and from how often
it was asked for with these. So it does not matter when requests arrive, and which others are sampled beside them.
"""

import atexit
import queue
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from extras.agents import EnvironmentFlags
from extras.agents.chat import Chat
from extras.agents.outcome import make_outcome
from extras.agents.programs.history import AgentRow, Call, Tree
from extras.agents.programs.requests import Refused, answer_to, max_tokens_of, stops, tools_of
from extras.agents.programs.server import Asked, Ended, Left, Server
from rl.console import say
from rl.data.encode import prompt_text
from rl.data.order import derive_seed
from rl.data.rows import Row, named
from rl.data.template import FAULTS
from rl.data.types import Completion, Outcome, Sample, unknown
from rl.sampling.loop import Key, Partner, Trajectory
from rl.scoring.worker import as_number

LOOK_EVERY = 4  # tokens of an answer that a text may end
MOST_FAILED = 256  # agents one after the other that may fail before the run ends
# What frameworks send by default. It is the run's, or it would change what is sampled.
OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(eq=False)
class Ask:
    """A request of an agent that is being sampled."""

    asked: Asked
    tools: list[dict] | None
    stop: tuple[str, ...]
    calls: list[Call] = field(default_factory=list)
    choices: dict[Call, Any] = field(default_factory=dict)  # those that are complete


@dataclass(eq=False)
class Agent:
    """An agent that lives, and what it has asked."""

    tree: Tree
    began: float = field(default_factory=time.monotonic)
    asks: dict[Call, Ask] = field(default_factory=dict)  # of calls that are in the engine
    times: dict[int, int] = field(default_factory=dict)  # how often it asked with a prompt, by the hash of that
    num_calls: int = 0  # that it has asked for
    is_full: bool = False  # it was told that its messages are too long, or that it has had all its calls
    numbers: dict[str, float] = field(default_factory=lambda: {"dropped": 0, "refused": 0})
    outcome: Outcome | None = None


class Agents(Partner):
    """The agents of the responses that a rank has in flight.

    Raises ValueError on a system other than Linux, beside --environment or --tools, or without a chat template.
    """

    def __init__(self, flags: EnvironmentFlags, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]):
        self.tokenizer, self.stop_ids, self.max_calls = tokenizer, tuple(stop_ids), flags.agent_max_calls
        if tokenizer.chat_template is None:
            raise ValueError(f"--agent needs a chat template, and {tokenizer.name_or_path!r} has none")
        self.chats: dict[str, Chat] = {}  # by tools
        self.server = Server(flags.agent, flags.environment_timeout, flags.agents_at_once)
        self.inbox = self.server.inbox
        self.open: dict[Trajectory, Agent] = {}
        self.aside: dict[Trajectory, Agent] = {}  # those of a loop that pauses
        self.later: list[Asked | Left | Ended] = []  # what came from them meanwhile
        self.said: set[str] = set()  # what was said once
        self.failed = 0  # agents in a row that have failed
        self.unwanted: set[Key] = set()  # of rows whose agent has ended, or reads no answer
        self.stopping: dict[Key, AgentRow] = {}  # whose answers end with texts
        self.keys_aside: tuple[set[Key], dict[Key, AgentRow]] = set(), {}  # those two of a loop that pauses
        atexit.register(self.close)

    def prompt_text(self, tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
        """The text of a row's prompt. It says how long the prompt is, and what the policy is told is for the agent."""
        if row.get("images"):
            raise ValueError(f"{named(row)}: has images, and agents ask for text only; leave such rows out, or --agent")
        return prompt_text(tokenizer, row)

    def begin(self, x: Trajectory, seed: int) -> None:
        """Start an agent, as soon as there is room for its process."""
        self.open[x] = Agent(Tree(x, self.tokenizer, self.stop_ids, self.chats))
        row = {name: value for name, value in x.row.items() if name not in ("prompt_ids", "given")}
        self.server.start(x, row, seed)

    def after(self, x: Trajectory) -> bool:
        """Take notice of what a row has sampled. When all that a request asks for is there, the agent gets it."""
        self.unwanted.discard(x.key)
        self.stopping.pop(x.key, None)
        if (agent := self.open.get(x.response)) is None or (ask := agent.asks.pop(x.tip, None)) is None:
            return True  # the agent has ended meanwhile
        call = x.tip
        ask.choices[call] = None if ask.asked.answer.is_gone else agent.tree.read(call, ask.tools, ask.stop)
        if len(ask.choices) < len(ask.calls):
            return True
        if ask.asked.answer.is_gone:
            for call in ask.calls:
                agent.tree.undo(call)
                agent.numbers["dropped"] += 1
            return True
        choices = [ask.choices[call] for call in ask.calls]
        for call, choice in zip(ask.calls, choices, strict=True):
            call.answer = ask.asked.answer
            agent.tree.finish(call, choice.message)
        texts = lambda ids: self.tokenizer.batch_decode([[i] for i in ids])  # noqa: E731
        ask.asked.answer.put(answer_to(ask.asked.body, choices, ask.calls[0].start, texts))
        return True

    def enough(self, completions: Iterable[Completion]) -> list[Key]:
        """See `rl.sampling.loop.Partner`. An answer is complete with a text that ends it, of which engines do not know,
        and needless if nobody waits for it.
        """
        if not (self.unwanted or self.stopping):
            return []
        return [x.request.key for x in completions if x.request.key in self.unwanted or self._is_complete(x)]

    def _is_complete(self, x: Completion) -> bool:
        """Whether an answer has a text that ends it. To look is not worth while after every token."""
        row = self.stopping.get(x.request.key)
        if row is None or not x.token_ids or len(x.token_ids) % LOOK_EVERY:
            return False
        agent = self.open[row.response]
        stop, text_of, ids = agent.asks[row.tip].stop, agent.tree.text_of, [*row.ids[row.tip.start :], *x.token_ids]
        tail = ids[-LOOK_EVERY - max(len(text.encode()) for text in stop) :]  # a token has a byte or more
        return any(text in text_of(tail) and text in text_of(ids) for text in stop)

    def answers(self, wait_s: float) -> list[tuple[Trajectory, list[int] | None]]:
        """The rows for which agents have asked, and the responses whose agents have ended."""
        answers: list[tuple[Trajectory, list[int] | None]] = []
        for event in self._events(wait_s):
            if event.key in self.aside:
                self.later.append(event)
            elif (agent := self.open.get(event.key)) is None:
                if isinstance(event, Asked):
                    event.answer.put(Refused("this response is over", status=410))
            elif isinstance(event, Left):
                self.unwanted.update(call.row.key for call, ask in agent.asks.items() if ask.asked is event.asked)
            elif isinstance(event, Ended):
                self._ended(event.key, agent, event)
                answers.append((event.key, None))
            else:
                try:
                    answers += self._ask(event.key, agent, event)
                except Refused as refused:
                    agent.numbers["refused"] += 1
                    event.answer.put(refused)
                except FAULTS as error:  # of what an agent has sent
                    agent.numbers["refused"] += 1
                    event.answer.put(Refused(f"this request cannot be read: {error!r:.300}"))
        return answers

    def _events(self, wait_s: float) -> Iterator[Asked | Left | Ended]:
        ready: list[Asked | Left | Ended] = []
        if not self.aside:
            ready, self.later = self.later, []
        yield from ready
        try:
            yield self.inbox.get(timeout=wait_s) if wait_s and not ready else self.inbox.get_nowait()
            while True:
                yield self.inbox.get_nowait()
        except queue.Empty:
            return

    def set_aside(self) -> bool:
        """See `rl.sampling.loop.Partner`. Agents live on, and what they ask waits. They leave others their places."""
        self.aside, self.open = {**self.aside, **self.open}, {}
        self.keys_aside, self.unwanted, self.stopping = (self.unwanted, self.stopping), set(), {}
        self.server.set_aside()
        return True

    def take_up(self) -> None:
        """See `rl.sampling.loop.Partner`."""
        self.open, self.aside = {**self.aside, **self.open}, {}
        (self.unwanted, self.stopping), self.keys_aside = self.keys_aside, (set(), {})
        self.server.take_up()

    def _ask(self, x: Trajectory, agent: Agent, asked: Asked) -> list[tuple[Trajectory, list[int]]]:
        """The rows that a request goes on with, and what they are told. Raises Refused, or one of FAULTS."""
        body = asked.body
        ask, n = Ask(asked, tools_of(body), stops(body)), body.get("n") or 1
        self._notice(x, agent, body)
        if ask.tools:
            agent.tree.chat(ask.tools)
        if agent.num_calls + n > self.max_calls:
            agent.is_full = True
            raise Refused(f"this agent has had its {self.max_calls} calls, see --agent-max-calls", code="max_calls")
        call = agent.tree.call(body["messages"], ask.tools)
        longest = x.sampling.max_tokens
        if call.start >= longest:
            agent.is_full = True
            problem = f"This model's maximum context length is {longest} tokens, and the messages have {call.start}."
            raise Refused(problem, code="context_length_exceeded")
        agent.num_calls += n
        rows: list[tuple[Trajectory, list[int]]] = []
        for i in range(n):
            call = agent.tree.call(body["messages"], ask.tools) if i else call
            ids = agent.tree.open(call)
            ask.calls.append(call)
            agent.asks[call] = ask
            row, size = call.row, call.start
            if ask.stop:
                self.stopping[row.key] = row
            row.sampling = replace(x.sampling, n=1, max_tokens=min(size + max_tokens_of(body), longest))
            prompt = np.array([*row.ids, *ids], np.int32)
            which = zlib.crc32(prompt.tobytes())
            times = agent.times[which] = agent.times.get(which, -1) + 1
            row.seed = derive_seed(x.seed, which, times)
            rows.append((row, ids))
        return rows

    def _notice(self, x: Trajectory, agent: Agent, body: dict) -> None:
        """Say once, and count, what a request asks for in vain."""
        ignored = [
            f"{name} {body[name]!r:.40} is ignored: the run's is used, or what is learned would not be what is sampled"
            for name in OF_THE_RUN
            if body.get(name) is not None and body[name] != getattr(x.sampling, name, None)
        ]
        if body.get("tool_choice") not in (None, "auto", "none"):
            ignored.append("a forced tool_choice counts as auto: the policy chooses whether it calls a tool")
        agent.numbers["ignored"] = agent.numbers.get("ignored", 0) + len(ignored)
        for problem in ignored:
            if (first := problem.split()[0]) not in self.said:
                self.said.add(first)
                say(f"agent: {problem}", sys.stderr)

    def _ended(self, x: Trajectory, agent: Agent, event: Ended) -> None:
        """Make the rows and the outcome of a response whose agent has ended."""
        tree, problem, report = agent.tree, event.problem, event.report
        self.unwanted.update(call.row.key for call in agent.asks)
        for ask in {id(ask): ask for ask in agent.asks.values()}.values():
            agent.numbers["dropped"] += len(ask.calls)
            for call in ask.choices:  # others of this request are still sampled
                tree.undo(call)
        for call in [call for call in tree.calls if not call.answer.is_delivered]:
            tree.undo(call)
            agent.numbers["dropped"] += call not in tree.calls
        try:
            reward = as_number(report.get("reward", 0.0))
        except ValueError as error:
            reward, problem = 0.0, problem or f"the reward of its report {error}"
        x.rows = tree.samples()
        if not x.rows:
            problem = problem or "it has sampled nothing"
        # An agent that ends because its context is full is scored as it is: that is the policy's doing.
        is_cut = agent.is_full and bool(event.exit_code) and bool(x.rows)
        x.finish_reason = "stop" if problem is None else "length" if is_cut else "error"
        if x.finish_reason == "error":
            self._fail(x, str(problem))
        else:
            self.failed = 0
        if not x.rows:
            x.rows = (_without_calls(x),)
        numbers = {"calls": len(tree.calls), "rows": len(x.rows), "forks": tree.forks, **agent.numbers}
        seconds = round(time.monotonic() - agent.began, 6)
        report = (
            report
            | numbers
            | {"seconds": seconds}
            | ({} if event.exit_code is None else {"exit_code": event.exit_code})
        )
        messages = tree.calls[-1].messages if tree.calls else []
        outcome = make_outcome(messages, report, [call.num_sampled for call in tree.calls], [])
        agent.outcome = outcome._replace(reward=reward)

    def _fail(self, x: Trajectory, problem: str) -> None:
        """Say why an agent has failed, if it is the first one. Raises RuntimeError if too many have failed."""
        place = x.row.get("row_place", "a row")
        if "failed" not in self.said:
            self.said.add("failed")
            say(f"agent: that of {place} failed, so its response has no score: {problem}", sys.stderr)
        self.failed += 1
        if self.failed == MOST_FAILED:
            raise RuntimeError(
                f"--agent: {MOST_FAILED} agents have failed one after the other, the last one, of {place}, since "
                f"{problem}. What agents print stands above; fix the program"
            )

    def end(self, x: Trajectory) -> Outcome:
        """Forget a response. If its agent lives, it is killed."""
        self.unwanted.discard(x.key)
        self.stopping.pop(x.key, None)
        agent = self.open.pop(x, None)
        if agent is not None and agent.outcome is not None:
            return agent.outcome
        if agent is not None:
            self.server.end(x)
        return self.outcome_of("")

    def outcome_of(self, text: str) -> Outcome:
        """What would be said of a response in which the policy says only this: to try reward functions."""
        return make_outcome([{"role": "assistant", "content": text}], {}, [], [])

    def close(self) -> None:
        """End all agents and the endpoint."""
        atexit.unregister(self.close)
        self.server.close()


def _without_calls(x: Trajectory) -> Sample:
    """The row of a response in which nothing was sampled: its prompt, of which nothing is learned."""
    row = AgentRow((*x.key, 0), {"prompt_ids": [], "row_index": x.row["row_index"]}, x.sampling, None, x)
    row.tell(list(x.row["prompt_ids"][: x.sampling.max_tokens]))
    row.columns = {"versions": np.full(len(row.ids), unknown(np.empty(0, np.int32)), np.int32)}
    return row.sample()
