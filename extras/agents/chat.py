"""Conversations by the model's chat template: what the policy is told as token ids, what it calls as data.

A conversation is never rendered again. What the policy sampled stays as it is, and the ids of what it is told are
appended. They are the ids of the text that the template writes after a turn. The difference of two renderings shows
that text.

Which reader of calls.py fits a template is tried out: `Chat` renders calls of the tools, and takes the readers that
return them.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from extras.agents.calls import ALL_TYPES, READERS, Calls, Reader, json_calls, types_of, without_thoughts
from extras.demonstrations import encode_behind, without_control_tokens
from rl.data.rows import Row, named
from rl.data.template import FAULTS, render
from rl.data.text import forms, start_of, write

TURN, THOUGHT = "\u2042turn", "\u2042thought"  # found again in what a template makes of them
USER = {"role": "user", "content": "x"}
# With a thought, since Qwen3's template writes an empty one only while a turn is the last.
SAID = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{TURN}"}

# What is called to try a template: values that a reader may take for another type or cut, by the types of the schema.
_STRINGS = ("42", 'two "words"\nand <b>a line</b>', "true")
_OTHERS = {"number": 0.5, "integer": 42, "boolean": True, "array": ["x", 1], "object": {"x": "1"}, "null": None}


def _example(name: str, schema: dict, start: int) -> tuple[str, dict[str, Any]]:
    """A call of a tool with a value for every parameter."""
    values = {}
    for i, (key, x) in enumerate((schema.get("properties") or {}).items(), start):
        types = types_of(x, schema)
        other = next((value for kind, value in _OTHERS.items() if kind in types), None)
        values[key] = _STRINGS[i % len(_STRINGS)] if "string" in types and types != ALL_TYPES else other
    return name, values


def _same(calls: Calls | None, expected: Calls) -> bool:
    return calls is not None and json.dumps(calls, sort_keys=True) == json.dumps(expected, sort_keys=True)


def prompt_text(tokenizer: PreTrainedTokenizerBase, row: Row, *, tools: Sequence[dict]) -> str:
    """The text of a row's prompt with the tools, as `rl.data.encode.prompt_text`, but without what makes the policy
    speak, which is part of what it is told first. Raises ValueError for a prompt that cannot begin a conversation.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        raise ValueError(f"{named(row)}: the prompt is a text; --environment and --tools need messages")
    if row.get("tools"):
        raise ValueError(f"{named(row)}: has tools, and --environment or --tools answer calls of others; remove them")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{named(row)}: the prompt ends with a message of the assistant, which a conversation with --environment "
            "or --tools does not continue; end it with a message of the user"
        )
    return write(tokenizer, row, prompt, tools=tools or None, add_generation_prompt=False)


class Chat:
    """How a model's chat template goes on with a conversation.

    Args: tools, JSON schemas of functions, as transformers makes them; stop_ids, that end a turn. Raises ValueError if
    the template does not only append, does not render tools, writes calls that cannot be read back, or ends a turn by
    anything but a token of `stop_ids`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict], stop_ids: Sequence[int]):
        self.tokenizer, self.tools, self.stop_ids = tokenizer, list(tools), set(stop_ids)
        self.where = f"the chat template of {tokenizer.name_or_path!r}"
        if tokenizer.chat_template is None:
            raise ValueError(f"--environment and --tools need a chat template, and {tokenizer.name_or_path!r} has none")
        told = {"role": "user", "content": "x"}
        if self.tools:
            told |= {"role": "tool", "name": self.tools[0]["function"]["name"], "tool_call_id": "call00000"}
        try:
            before, after = self._render([USER, SAID], False), self._render([USER, SAID, told], True)
        except TemplateError as error:
            raise ValueError(f"{self.where} refuses a conversation with {told['role']!r} messages: {error}") from error
        if self.tools and any(x["function"]["name"] not in self._render([USER], False) for x in self.tools):
            raise ValueError(f"--tools: {self.where} does not render tools; use a model that was trained with tools")
        self.end = before.rpartition(TURN)[2]  # what the template writes after a turn
        if not after.startswith(before.removesuffix(self.end)) or THOUGHT not in before:
            raise ValueError(
                f"{self.where} rewrites what the policy has said, such as its thoughts, when the conversation goes on; "
                "what is sampled would not be what is trained on: use a template that only appends"
            )
        if not any(self.end.startswith(token) for token in map(self._text, self.stop_ids)):
            raise ValueError(
                f"{self.where} ends a turn with {self.end[:20]!r}, which begins with none of the model's "
                "end-of-sequence tokens; add that token to eos_token_id of its generation config"
            )
        # What stands before the environment's messages: a prompt, or a prompt and a turn.
        self.starts = {False: self._render([USER], False), True: before.removesuffix(self.end)}
        self.told([told], has_turn=True)
        self.opening = self.told([], has_turn=False)  # what makes the policy speak first
        rest = without_thoughts(self.opening + TURN)
        self.thought = "" if rest.endswith(TURN) else self.opening.removeprefix(rest)  # which the policy goes on with
        self.parameters = {x["function"]["name"]: x["function"].get("parameters") or {} for x in self.tools}
        by_template = [None] if getattr(tokenizer, "response_template", None) is not None else []
        self.readers: list[Reader | None] = [*by_template, *READERS.values()]  # None: by tokenizer.parse_response
        self.readers = self._tried_readers() if self.tools else []

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        return render(self.tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=self.tools or None)

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _tried_readers(self) -> list[Reader | None]:
        """The readers that return calls of all tools as they were before the template wrote them."""
        functions = [x["function"] for x in self.tools]
        calls = [_example(x["name"], x.get("parameters") or {}, start) for x in functions for start in (0, 1)]
        problems = []
        for as_json in (False, True):  # most templates want arguments as a dict, some as JSON
            try:
                turns = [([x], *self._turn_with([x], as_json)) for x in calls]
            except FAULTS as error:
                problems.append(f"refuses tool_calls ({error!r})")
                continue
            with contextlib.suppress(*FAULTS):  # raised by a template that writes one call in a turn
                turns.append((calls, *self._turn_with(calls, as_json)))
            readers = self.readers
            for expected, text, stop in turns:
                readers = [x for x in readers if stop and _same(self._calls(x, text, stop), expected)]
                if not readers:
                    what = "cannot be read back" if stop else "ends with none of the end-of-sequence tokens"
                    problems.insert(0, f"writes the call {expected[0]} as {text!r:.500}, which {what}")
                    break
            else:
                return readers
        raise ValueError(
            f"--tools: {self.where} {problems[0]}; use the template of a model that was trained with tools and has "
            f"calls of the forms {', '.join(READERS)}, or give the tokenizer a response_template that reads its calls"
        )

    def _turn_with(self, calls: Calls, as_json: bool) -> tuple[str, str]:
        """What the template makes of a turn with these calls, as `read` has it, and the token that ends the turn."""
        written = [{"name": name, "arguments": json.dumps(x) if as_json else x} for name, x in calls]
        listed = [{"id": f"call{i:05d}", "type": "function", "function": x} for i, x in enumerate(written)]
        text = self._render([USER, {"role": "assistant", "content": "", "tool_calls": listed}], False).rstrip()
        text = text.removeprefix(self.starts[False])
        text = self.thought + text.removeprefix(self.opening) if text.startswith(self.opening) else text
        stop = max((x for x in map(self._text, self.stop_ids) if text.endswith(x)), key=len, default="")
        return text.removesuffix(stop), stop

    def _calls(self, reader: Reader | None, text: str, stop: str) -> Calls | None:
        """A turn's calls, see `read`, or None if transformers cannot read it by the tokenizer's response template."""
        text = without_thoughts(text)
        if reader is not None:
            return reader(text, self.parameters)
        try:
            header = self.opening.removesuffix(self.thought)
            message = self.tokenizer.parse_response(text + stop, prefix=header, tools=self.tools)
        except FAULTS:
            return None
        return json_calls(message.get("tool_calls") or [])

    def told(self, messages: Sequence[dict], *, has_turn: bool) -> str:
        """The text that messages add after the prompt or after a turn, and what makes the policy speak.

        Raises ValueError if the template does not only append them. It may move a system message to the top, merge two
        messages of one role, or leave one out. Raises what the template raises, such as jinja2.TemplateError.
        """
        text = self._render([USER, SAID][: 1 + has_turn] + [*messages], True)
        if not text.startswith(self.starts[has_turn]):
            roles = ", ".join(x["role"] for x in messages)
            raise ValueError(f"{self.where} does not append messages of the roles {roles}, but moves or merges them")
        text = text.removeprefix(self.starts[has_turn])
        written, at = "".join(text.split()), 0
        for x in messages:
            ends = [start + len(form) for form in forms(x["content"]) if (start := written.find(form, at)) >= 0]
            if not ends:
                raise ValueError(f"{self.where} leaves out what a message says: {x!r:.300}")
            at = min(ends)
        return text

    def ids_of(self, messages: Sequence[dict], ids: Sequence[int], room: int = sys.maxsize) -> list[int] | None:
        """What a conversation goes on with: ids of messages and of what makes the policy speak again.

        Args: messages, each with role and content; ids of the conversation after the prompt so far, which end with a
        turn of the policy; [] if it has not said anything; room, in tokens: None is returned if the ids do not leave
        some of it, and only the beginning of a text that is far too long is tokenized. Text that spells a control token
        stays text. Raises as `told`.
        """

        def clean_text(x: Any) -> Any:
            return without_control_tokens(self.tokenizer, x) if isinstance(x, str) else x

        clean = [{name: clean_text(x) for name, x in message.items()} for message in messages]
        last = self._text(ids[-1]) if ids else ""
        text = self.told(clean, has_turn=bool(ids)).removeprefix(last)
        told = encode_behind(self.tokenizer, last, start_of(self.tokenizer, text, room))
        return told if len(told) < room else None

    def read(self, ids: Sequence[int]) -> tuple[str, Calls]:
        """A turn of the policy: its text without special tokens, and what it calls. Calls that cannot be read at all,
        by a tokenizer with a response template, are one with the name "" and the arguments None.
        """
        text, raw = (self.tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False))
        stop = self._text(ids[-1]) if ids and ids[-1] in self.stop_ids else ""
        readings = (self._calls(x, self.thought + raw.removesuffix(stop), stop) for x in self.readers)
        return text, next((x for x in readings if x is not None), [("", None)] if self.readers else [])
