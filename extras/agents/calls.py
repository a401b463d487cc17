"""What a turn of the policy calls: thoughts are left out, calls are read, and their values get the types of a schema.

1. Thoughts are left out first. A thought begins with an opening marker and ends with its closing marker, or with the
   turn if that marker never comes. If the generation prompt has opened a thought, the turn begins inside it. A closing
   marker that nothing has opened ends a thought too: what stands before it is left out. `THOUGHTS` lists the markers.
2. A call's marker, such as <tool_call>, counts if what follows begins like a call (a bracket, or <function=), or if it
   begins a line and its closing tag ends one. Such a call that cannot be read is reported as unreadable. Any other
   mention of a marker, and each one directly after a backtick, is prose.
3. JSON keeps the types that the policy wrote. A value in XML has none, so the tool's schema decides, see `_typed`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Calls = list[tuple[str, Any]]  # name and arguments, a dict, or None if they could not be read
Tools = Mapping[str, dict]  # the JSON schemas of parameters, by the names of the tools
Reader = Callable[[str, Tools], Calls]

# Opening and closing markers of thoughts. The first line is <think>, <thinking>, <seed:think>, <|thought|>, <reasoning>
# and all others of this shape.
_NAME = r"(?i:(?:\w+[:|])?(?:think|thinking|thoughts?|reason|reasoning|reflection|analysis|scratchpad)(?:[:_]\w+)?)"
THOUGHTS = {
    rf"<(?P<left>\|?)(?P<name>{_NAME})(?P<right>\|?)>": r"<(?P=left)/(?P=name)(?P=right)>",
    r"<\|channel\|>analysis<\|message\|>": r"<\|end\|>",  # gpt-oss
    r"<\|channel>thought": r"<channel\|>",  # Gemma 4
    r"\[THINK\]": r"\[/THINK\]",  # Magistral
    r"◁think▷": r"◁/think▷",  # Kimi
    r"<\|START_THINKING\|>": r"<\|END_THINKING\|>",  # Command A
    r"<\|begin_of_thought\|>": r"<\|end_of_thought\|>",  # OpenThinker
    r"<\|plamo:begin_think:plamo\|>": r"<\|plamo:end_think:plamo\|>",
    r"<\|inner_prefix\|>": r"<\|inner_suffix\|>",  # Apertus
}
_CLOSING = "|".join([rf"<\|?/{_NAME}\|?>", *list(THOUGHTS.values())[2:]])  # <|end|> ends other things too
_TOOL_CALLS = r"(?<!`)\[TOOL_CALLS\](?=\s*[\[{]|\s*[\w.-]+\s*(?:\[CALL_ID\]|\[ARGS\]|\{))|(?m:^)[ \t]*\[TOOL_CALLS\]"
_LLAMA_CALL = r'\{\s*"(?:name|type)"'
# Markers inside a call belong to its arguments, so a call is passed over as a whole.
_CALL = (
    r"(?<!`)<tool_call>\s*[\[{<].*?(?:</tool_call>|\Z)|(?<!`)<function=.*?(?:</function>|\Z)|"
    rf"(?:{_TOOL_CALLS}).*?(?=\[TOOL_CALLS\]|\Z)|\A\s*(?:<\|python_tag\|>\s*)?{_LLAMA_CALL}.*"
)
_MARKS = re.compile(
    f"(?P<call>{_CALL})|(?<!`)(?:"
    + "|".join(rf"{opening}(?:.*?(?<!`){closing}|.*)" for opening, closing in THOUGHTS.items())
    + f"|(?P<closing>{_CLOSING}))",
    re.DOTALL,
)


def without_thoughts(text: str) -> str:
    """What a turn says after and between its thoughts."""
    said, at = "", 0
    for mark in _MARKS.finditer(text):
        said, at = said + text[at : mark.start()] + (mark["call"] or ""), mark.end()
        said = "" if mark["closing"] else said
    return said + text[at:]


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a JSON number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def _loaded(text: str, otherwise: Any = None) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return otherwise


def json_calls(values: Any) -> Calls:
    """{"name": ..., "arguments" or "parameters": {...}}, or a list of such, with or without a "function" around it."""
    calls: Calls = []
    for x in values if isinstance(values, list) else [values]:
        x = x if isinstance(x, dict) else {}
        x = x["function"] if isinstance(x.get("function"), dict) else x
        arguments = x.get("arguments", x.get("parameters", {} if "name" in x else None))
        if isinstance(arguments, str):  # some models write JSON in JSON
            arguments = _loaded(arguments)
        calls.append((str(x.get("name", "")), arguments if isinstance(arguments, dict) else None))
    return calls


def _first_value(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value that begins there, and where it ends, or None and the beginning if none does."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


_TAG = r"(?<!`)<tool_call>\s*(?=[\[{]|<function=)|^[ \t]*<tool_call>\s*(?=[^<]*</tool_call>[ \t]*$)"


def hermes(text: str, tools: Tools | None = None) -> Calls:
    """Calls as JSON in <tool_call> tags, as Qwen2.5 and Qwen3 write them."""
    calls, at = [], 0
    while tag := re.compile(_TAG, re.MULTILINE).search(text, at):
        value, end = _first_value(text, tag.end())
        is_whole = re.compile(r"\s*(?:</?tool_call>|\Z)").match(text, end)
        calls += json_calls(value if is_whole else None)
        at = end if is_whole else (text + "</tool_call>").index("</tool_call>", end)
    return calls


# A value may contain its closing tag, unless another parameter or the end of the function follows.
_PARAMETER = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
_FUNCTION = re.compile(
    rf"(?<!`)(?:<tool_call>\s*)?(?<!`)<function=([^>\n]+)>\s*((?:(?>{_PARAMETER})\s*)*</function>)(?:\s*</tool_call>)?"
    r"|(?:(?<!`)<tool_call>\s*|^[ \t]*)<function=([^>\n]*).*?(?:</function>(?:\s*</tool_call>)?|\Z)"
    rf"|(?:{_TAG}).*?(?:</tool_call>|\Z)",
    re.DOTALL | re.MULTILINE,
)


def qwen_xml(text: str, tools: Tools | None = None) -> Calls:
    """Calls as tags with a tag for each parameter, as Qwen3-Coder writes them."""
    calls: Calls = []
    for name, body, _, _, broken_name in _FUNCTION.findall(text):
        values = {key.strip(): x for key, x in re.findall(_PARAMETER, body, re.DOTALL)}
        schema = (tools or {}).get(name.strip(), {})
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        arguments = {key: _typed(x, known.get(key, others), schema) for key, x in values.items()}
        calls.append((name.strip(), arguments) if body else (broken_name.strip(), None))
    return calls


_NAMED = r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)"  # name{...} or name[ARGS]{...}


def mistral(text: str, tools: Tools | None = None) -> Calls:
    """Calls after [TOOL_CALLS]."""
    calls: Calls = []
    for part in re.split(_TOOL_CALLS, text)[1:]:
        if named := re.match(_NAMED, part):
            arguments = _loaded(part[named.end() :])
            calls.append((named[1], arguments if isinstance(arguments, dict) else None))
        else:
            calls += json_calls(_loaded(part))
    return calls


def llama(text: str, tools: Tools | None = None) -> Calls:
    """Calls that are the whole turn, as JSON."""
    body, calls = text.strip().removeprefix("<|python_tag|>").strip(), []
    while re.match(_LLAMA_CALL, body):  # several stand one after the other, with ; between them
        value, end = _first_value(body)
        calls += json_calls(value)
        body = body[end or len(body) :].lstrip("; \n")
    return calls


READERS: dict[str, Reader] = {"Hermes": hermes, "Qwen's XML": qwen_xml, "Mistral": mistral, "Llama": llama}


JSON_TYPES = {bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
ALL_TYPES = {*JSON_TYPES.values(), "string"}


def types_of(schema: Any, whole: dict, depth: int = 0) -> set[str]:
    """The JSON types that a schema allows, all if it does not say. References are looked up in `whole`."""
    if not isinstance(schema, dict) or depth > 32:  # a reference may lead back to itself
        return ALL_TYPES

    def any_of(schemas: Sequence) -> set[str]:
        return set().union(*(types_of(x, whole, depth + 1) for x in schemas))

    limits = [any_of(schema[key]) for key in ("anyOf", "oneOf") if schema.get(key)]
    limits += [any_of([x]) for x in schema.get("allOf") or ()]
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = whole
        for key in reference.removeprefix("#").split("/")[1:]:
            target = target.get(key) if isinstance(target, dict) else None
        limits.append(any_of([target]))
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    limits.append({JSON_TYPES.get(type(x), "string") for x in values})
    named = schema.get("type")
    kinds = {x for x in (named if isinstance(named, list) else [named]) if isinstance(x, str)}
    limits.append(ALL_TYPES & (kinds | {"integer"} if "number" in kinds else kinds))
    return ALL_TYPES.intersection(*filter(None, limits)) | ({"null"} if schema.get("nullable") else set())


def _typed(text: str, schema: Any, whole: dict) -> Any:
    """A parameter's value by its schema: what the text is as JSON if the schema allows that type, or else the text.

    So a string stays as it is, a text that does not fit is left to the tool, and where a string and another type are
    allowed, the other one is tried first. True, False and None are read too, since templates write Python's values.
    """
    value = _loaded({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text), text)
    types = types_of(schema, whole)
    if isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    return value if JSON_TYPES.get(type(value)) in types else text
