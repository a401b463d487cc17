"""Conversations with an environment, by the model's chat template: what it is told as token ids, what it calls as data.

A conversation is never rendered again. What the policy sampled stays as it is, and the ids of what it is told are
appended: those of the text that the template writes behind a turn, found by the difference of two renderings.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rl.data.encode import encode_behind, without_control_tokens

TURN, THOUGHT, TOLD = "\u2042turn", "\u2042thought", "\u2042told"  # found again in what a template makes of them


Calls = list[tuple[str, Any]]  # name and arguments, a dict, or None if they could not be read


def _loaded(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _json_calls(texts: Sequence[str]) -> Calls:
    """{"name": ..., "arguments" or "parameters": {...}}, or a list of such, each text by itself."""
    found: Calls = []
    for values in map(_loaded, texts):
        for x in values if isinstance(values, list) else [values]:
            x = x if isinstance(x, dict) else {}
            arguments = x.get("arguments", x.get("parameters", {} if "name" in x else None))
            if isinstance(arguments, str):  # some models write JSON in JSON
                arguments = _loaded(arguments)
            found.append((str(x.get("name", "")), arguments if isinstance(arguments, dict) else None))
    return found


def _hermes(text: str) -> Calls:
    return _json_calls(re.findall(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", text, re.DOTALL))


def _qwen_xml(text: str) -> Calls:
    found = []
    for name, body, end in re.findall(r"<function=([^>\n]+)>(.*?)(</function>|$)", text, re.DOTALL):
        values = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        is_whole = end and len(values) == body.count("<parameter=")
        found.append((name.strip(), {key.strip(): _loaded(x, x) for key, x in values} if is_whole else None))
    return found or [("", None)] * text.count("<tool_call>")


def _mistral(text: str) -> Calls:
    found: Calls = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, bracket, arguments = part.partition("{")
        newer = re.fullmatch(r"\s*([\w.-]+)\s*(\[CALL_ID\]\w+)?(\[ARGS\])?\s*", name)  # name{...} or name[ARGS]{...}
        if bracket and newer:
            read = _loaded(bracket + arguments.strip())
            found.append((newer[1], read if isinstance(read, dict) else None))
        else:
            found += _json_calls([part.strip()])
    return found


def _llama(text: str) -> Calls:
    body, parts = text.strip().removeprefix("<|python_tag|>").strip(), []
    while re.match(r'\{\s*"(name|type)"', body):  # several stand behind each other, with ; between them
        try:
            end = json.JSONDecoder().raw_decode(body)[1]
        except (ValueError, RecursionError):
            end = len(body)
        parts.append(body[:end])
        body = body[end:].lstrip("; \n")
    return _json_calls(parts)


# What a template that renders tools has in it -> how its models write calls. The first that is found counts.
FORMATS: dict[str, Callable[[str], Calls]] = {
    "<function=": _qwen_xml,
    "<tool_call>": _hermes,
    "[TOOL_CALLS]": _mistral,
    "<|python_tag|>": _llama,
    '"parameters"': _llama,
}


class Chat:
    """How a model's chat template goes on with a conversation.

    Args: tools, JSON schemas of functions, as transformers makes them; stop_ids, that end a turn. Raises ValueError if
    the template does not only append, does not render tools, or ends a turn by anything but a token of `stop_ids`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict], stop_ids: Sequence[int]):
        self.tokenizer, self.tools, self.stop_ids = tokenizer, list(tools), set(stop_ids)
        where = f"the chat template of {tokenizer.name_or_path!r}"
        if tokenizer.chat_template is None:
            raise ValueError(f"--environment and --tools need a chat template, and {tokenizer.name_or_path!r} has none")
        user, template = {"role": "user", "content": "x"}, str(tokenizer.chat_template)
        thought = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{TURN}"}
        told = {"role": "user", "content": TOLD}
        if self.tools:
            told |= {"role": "tool", "name": self.tools[0]["function"]["name"], "tool_call_id": "call00000"}
        try:
            before, after = self._render([user, thought], False), self._render([user, thought, told], True)
        except TemplateError as error:
            raise ValueError(f"{where} refuses a conversation with {told['role']!r} messages: {error}") from error
        if self.tools and any(x["function"]["name"] not in self._render([user], False) for x in self.tools):
            raise ValueError(f"--tools: {where} does not render tools; use a model that was trained with tools")
        known = [read for mark, read in FORMATS.items() if mark in template]
        if self.tools and not known:
            raise ValueError(f"--tools: {where} writes calls in no form that is read here: {', '.join(FORMATS)}")
        self.read_calls = known[0] if self.tools else lambda text: []
        self.end = before.rpartition(TURN)[2]  # what the template writes behind a turn
        if not after.startswith(before.removesuffix(self.end)) or THOUGHT not in before or TOLD not in after:
            raise ValueError(
                f"{where} rewrites what the policy has said, such as its thoughts, when the conversation goes on; what "
                "is sampled would not be what is trained on: use a template that only appends"
            )
        if not any(self.end.startswith(token) for token in map(self._text, self.stop_ids)):
            raise ValueError(
                f"{where} ends a turn with {self.end[:20]!r}, which begins with none of the model's end-of-sequence "
                "tokens; add that token to eos_token_id of its generation config"
            )
        self.opening = self._behind([user], [])  # what makes the policy speak first

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        kept = dict(tokenize=False, add_generation_prompt=add_generation_prompt, tools=self.tools or None)
        return self.tokenizer.apply_chat_template(messages, **kept)

    def _text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _behind(self, start: list[dict], messages: list[dict]) -> str:
        before, after = self._render(start, False), self._render(start + messages, True)
        assert after.startswith(before), (before, after)
        return after.removeprefix(before)

    def ids_of(self, messages: Sequence[dict], ids: Sequence[int]) -> list[int]:
        """What a conversation goes on with: ids of messages and of what makes the policy speak again.

        Args: messages, each with role and content; ids of the conversation behind the prompt so far, which end with a
        turn of the policy; [] if it has not said anything. Text that spells a control token stays text. Raises
        jinja2.TemplateError if the template refuses the messages.
        """

        def clean_text(x: Any) -> Any:
            return without_control_tokens(self.tokenizer, x) if isinstance(x, str) else x

        clean = [{name: clean_text(x) for name, x in message.items()} for message in messages]
        if not ids:
            text = self._behind([{"role": "user", "content": "x"}], clean) if clean else self.opening
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TURN}]
        text = self._render([*turn, *clean], True).partition(TURN)[2]
        last = self._text(ids[-1])
        return encode_behind(self.tokenizer, last, text.removeprefix(last))

    def read(self, ids: Sequence[int]) -> tuple[str, Calls]:
        """A turn of the policy: its text without special tokens, and what it calls."""
        text, raw = (self.tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False))
        return text, self.read_calls(raw.removesuffix(self._text(ids[-1])) if ids and ids[-1] in self.stop_ids else raw)
