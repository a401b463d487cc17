"""Tools in the rows of the data: the column `tools`, and the `tool_calls` of messages."""

import json
from collections.abc import Sequence
from typing import Any

from rl.data.rows import Row, check_encodable, is_absent, named, set_fields, shown


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError for a row of verl's whose tools want to know something of it: those of --tools do not."""
    for row in rows:
        settings = row | row.get("extra_info", {})
        if settings.get("need_tools_kwargs"):
            names = ", ".join(settings.get("tools_kwargs") or {}) or "a tool"
            raise ValueError(
                f"{named(row)}: has need_tools_kwargs, values for {names} that the policy does not see; --tools get "
                "what the policy writes alone. Leave the row out, or give --environment, whose `reset` gets the row"
            )


def with_tools(row: Row, where: str) -> Row:
    """The row with its `tools` checked, or without the column if it has none."""
    others = {name: x for name, x in row.items() if name != "tools"}
    return others if is_absent(row.get("tools")) else others | {"tools": _check_tools(row["tools"], f"{where}: tools")}


def _check_tools(tools: Any, where: str) -> list[dict]:
    """JSON schemas of functions, or a JSON text of such a list, which parquet cannot pad with nulls."""
    schemas = _from_json(tools)
    listed = schemas if isinstance(schemas, list) else [None]
    functions = [x.get("function") if isinstance(x, dict) else None for x in listed]
    if not all(isinstance(x, dict) and isinstance(x.get("name"), str) for x in functions):
        raise ValueError(f'{where} is {shown(tools)}; it must be a list of {{"type": "function", "function": ...}}')
    check_encodable(json.dumps(schemas, ensure_ascii=False, default=str), where)
    return schemas


def check_calls(calls: Any, where: str) -> list[dict]:
    """Calls as OpenAI's API writes them, {"type": "function", "function": {"name", "arguments"}}, or the inner dicts.
    Arguments are a dict, as templates want them, or its JSON text, as the API writes it, which becomes a dict.
    """
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        call = call if isinstance(call, dict) else {}
        if "function" not in call:
            call = {"id": call.get("id"), "function": {x: y for x, y in call.items() if x not in ("id", "type")}}
        function = set_fields(call["function"] if isinstance(call["function"], dict) else {})
        name, arguments = function.get("name"), _from_json(function.get("arguments", {}))
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise ValueError(
                f"{where} is {shown(calls)}; each must hold a function with its name and arguments, a dict or its JSON"
            )
        checked.append(set_fields(call) | {"type": "function", "function": function | {"arguments": arguments}})
    return checked


def with_json_arguments(message: dict) -> dict:
    """The message with the arguments of its calls as JSON texts, which some templates want, such as DeepSeek-V3's."""
    calls = message.get("tool_calls") or []
    texts = [json.dumps(x["function"]["arguments"], ensure_ascii=False) for x in calls]
    calls = [x | {"function": x["function"] | {"arguments": text}} for x, text in zip(calls, texts, strict=True)]
    return message | {"tool_calls": calls} if calls else message


def _from_json(value: Any) -> Any:
    """What a JSON text holds, and anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
