"""What an agent has asked the policy: a tree of calls, each with the exact tokens that the engine saw and sampled.

    call 1: P1 + S1                    P1 was told (mask 0), and S1 was sampled (mask 1)
    call 2: P1 + S1 + T2 + S2          its messages extend those of call 1: T2 is what the chat template writes between
    call 3: P3 + S3                    they extend no earlier call, as after a compaction or in a sub-agent: a new root
    call 4: P1 + S1 + T4 + S4          they extend call 1, as those of call 2 do: a fork

Each path from a root to a leaf is a row of the response. The first row that has a sampled token has it with mask 1, and
all others with mask 0, so that it is learned from once. A row is a trajectory, which the loop samples.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from extras.agents.chat import THOUGHT, TURN, Chat
from extras.agents.programs.requests import Refused, as_message, mark_of
from extras.demonstrations import encode_behind, without_control_tokens
from rl.data.template import FAULTS, render
from rl.data.types import Sample
from rl.sampling.loop import Trajectory


class AgentRow(Trajectory):
    """One row of an agent's response."""

    tip: "Call | None" = None  # the last call in it


@dataclass(eq=False)
class Call:
    """One completion that an agent was given, or is to be given."""

    parent: "Call | None"  # whose conversation it extends
    marks: tuple[str, ...]  # of the messages of the request and, once it is complete, of the answer
    messages: list[dict]  # of the request and, once it is complete, the answer
    tools: str  # as JSON, which tells requests with other tools apart
    told: str  # what the template writes behind the parent, or from the start
    told_ids: list[int]
    row: AgentRow | None = None
    end: int = 0  # of this call's tokens among those of its row, once it is complete
    num_sampled: int = 0
    has_thought: bool = False  # whether thoughts were sampled. Templates remove those of earlier turns.
    ended_by: str = ""  # the text of stop that ends it, which the agent has not seen
    answer: Any = None  # which the agent got, see `server.Answer`

    @property
    def path(self) -> "list[Call]":
        """From the root to this call."""
        return [*(self.parent.path if self.parent else ()), self]

    @property
    def start(self) -> int:
        """How many tokens stand before what is sampled."""
        return (self.parent.end if self.parent else 0) + len(self.told_ids)


class Choice(NamedTuple):
    """What a call has sampled, as the agent sees it."""

    message: dict
    finish_reason: str
    ids: list[int]
    logprobs: list[float]


class Tree:
    """The calls of one agent. Args: response, whose rows they make; chats, by tools, shared by all agents."""

    def __init__(
        self,
        response: Trajectory,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        chats: dict[str, Chat],
    ):
        self.response, self.tokenizer, self.stop_ids, self.chats = response, tokenizer, stop_ids, chats
        self.complete: dict[tuple, Call] = {}  # by tools and the marks of the whole conversation
        self.calls: list[Call] = []  # those that the agent was given, in the order in which they became complete
        self.rows: list[AgentRow] = []
        self.forks = 0

    def call(self, messages: list[dict], tools: list[dict] | None) -> Call:
        """The call that these messages ask for, behind the longest conversation that they extend, or from the start.
        Nothing is noted of it until `open`. Raises Refused if the chat template cannot write them.
        """
        said = [as_message(x) for x in messages]
        marks, key = tuple(map(mark_of, said)), json.dumps(tools, sort_keys=True)
        for k in sorted({len(x) for _, x in self.complete if len(x) < len(said)}, reverse=True):
            parent = self.complete.get((key, marks[:k]))
            if parent is not None and (told := self._behind(parent, said, tools)) is not None:
                last_id = parent.row.ids[parent.end - 1]
                last = self.tokenizer.decode([last_id])
                text = told.removeprefix(last) if last_id in self.stop_ids else told
                return Call(parent, marks, said, key, told, encode_behind(self.tokenizer, last, text))
        told = self._render(said, tools)
        return Call(None, marks, said, key, told, self.tokenizer(told, add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[dict], tools: list[dict] | None) -> str:
        try:
            clean = [cleaned(self.tokenizer, x) for x in messages]
            return render(self.tokenizer, clean, add_generation_prompt=True, tools=tools)
        except FAULTS as error:
            raise Refused(f"the chat template refuses these messages: {error!r:.300}") from error

    def _behind(self, parent: Call, messages: list[dict], tools: list[dict] | None) -> str | None:
        """What the template writes behind `parent`, or None if it changes what stands before, so that the messages are
        no extension. One rendering, with marks in the place of what was sampled, has to give the texts that were told.
        A second one shows whether the template removes thoughts that were sampled.
        """
        path, marked = parent.path, [dict(x) for x in messages]
        places = [len(call.marks) - 1 for call in path]
        for place in places:
            marked[place] = {"role": "assistant", "content": TURN}
        told = self._render(marked, tools).split(TURN)
        # What was told may have more at its end, such as a generation prompt that opens a thought.
        if len(told) != len(path) + 1 or not all(
            call.told.startswith(text) for text, call in zip(told, path, strict=False)
        ):
            return None
        if any(call.has_thought for call in path):
            for place, call in zip(places, path, strict=True):
                if call.has_thought:
                    marked[place] = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{TURN}"}
            if self._render(marked, tools).count(THOUGHT) < sum(call.has_thought for call in path):
                return None
        return told[-1]

    def open(self, call: Call) -> list[int]:
        """Give a call its row: that of its parent, if nothing has extended this yet, or a new one. Returns the ids that
        the row goes on with.
        """
        parent = call.parent
        if parent is not None and parent.row.tip is parent:
            call.row, ids = parent.row, call.told_ids
        else:
            x = self.response
            data = {"prompt_ids": [], "row_index": x.row["row_index"]}
            call.row = AgentRow((*x.key, len(self.rows)), data, x.sampling, None, x)
            self.rows.append(call.row)
            self.forks += parent is not None
            ids = [*(parent.row.ids[: parent.end] if parent else ()), *call.told_ids]
        call.row.tip, call.row.turns = call, len(call.path) - 1  # seeds follow from turns, whichever row they are in
        return ids

    def read(self, call: Call, tools: list[dict] | None, stop: Sequence[str]) -> Choice:
        """What was sampled. It is cut behind the token with which the first of the texts `stop` is complete."""
        row, reason = call.row, call.row.finish_reason
        ids = row.ids[call.start :]
        if stop and (size := self._until(ids, stop)) is not None:
            _cut(row, call.start + size)
            ids, reason = ids[:size], "stop"
        call.end, call.num_sampled = len(row.ids), len(ids)
        body = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text = self.text_of(body)
        call.has_thought = "</think>" in text
        whole = text
        for x in stop:
            text = text.partition(x)[0]
        call.ended_by = next((x for x in stop if whole.startswith(text + x)), "")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = self.chat(tools).read(ids)[1] if tools else []
        if calls and all(arguments is not None for _, arguments in calls):
            message["tool_calls"] = [
                {
                    "id": f"call_{len(self.calls)}_{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(calls)
            ]
            message["content"] = text.partition("<tool_call>")[0].strip() or None
            reason = "tool_calls" if reason == "stop" else reason
        return Choice(message, reason, ids, row.logprobs[call.start :])

    def _until(self, ids: list[int], stop: Sequence[str]) -> int | None:
        """How many tokens there are until one of the texts is complete, or None if none of them is there."""
        if not any(x in self.text_of(ids) for x in stop):
            return None
        return next(n for n in range(1, len(ids) + 1) if any(x in self.text_of(ids[:n]) for x in stop))

    def text_of(self, ids: list[int]) -> str:
        """What an agent sees of tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def chat(self, tools: list[dict]) -> Chat:
        """What reads calls of these tools. Raises Refused if the chat template does not know tools."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self.chats:
            try:
                self.chats[key] = Chat(self.tokenizer, tools, self.stop_ids)
            except FAULTS as error:
                raise Refused(f"these tools cannot be used: {error!s:.500}") from error
        return self.chats[key]

    def finish(self, call: Call, answer: dict) -> None:
        """The agent gets `answer`, so from here on its messages may extend it."""
        said = as_message(answer)
        call.marks, call.messages = (*call.marks, mark_of(said)), [*call.messages, said]
        self.complete[call.tools, call.marks] = call
        if call.ended_by:  # smolagents puts it back
            again = mark_of(said | {"content": said["content"] + call.ended_by})
            self.complete[call.tools, (*call.marks[:-1], again)] = call
        self.calls.append(call)

    def undo(self, call: Call) -> None:
        """Nobody has seen what a complete call has sampled, so its row ends where its parent does."""
        if call.row.tip is call:
            _cut(call.row, call.parent.end if call.parent else 0)
            call.row.tip = call.parent
            if call in self.calls:
                self.calls.remove(call)

    def samples(self) -> tuple[Sample, ...]:
        """The rows in which something was sampled. What the engine still samples is left out."""
        found = []
        for row in map(copy.copy, self.rows):
            if row.tip is not None and not row.tip.end:
                _cut(row, row.tip.parent.end if row.tip.parent else 0)
            if any(row.mask):
                found.append(row.sample())
        return tuple(found)


def _cut(row: Trajectory, size: int) -> None:
    """Forget all tokens of a row but the first ones."""
    row.ids, row.mask, row.logprobs = row.ids[:size], row.mask[:size], row.logprobs[:size]
    row.columns = {name: x[:size] for name, x in row.columns.items()}


def cleaned(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """Messages in which no text spells a control token, such as the end of a turn."""
    if isinstance(value, str):
        return without_control_tokens(tokenizer, value)
    if isinstance(value, list):
        return [cleaned(tokenizer, x) for x in value]
    return {key: cleaned(tokenizer, x) for key, x in value.items()} if isinstance(value, dict) else value
