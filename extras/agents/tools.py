"""Functions that the policy may call, and what is loaded from a user's files: tools, or a class of environments.

It imports the standard library and the user's files only, as worker.py does.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from extras.agents import tool_server
from extras.agents.plain import plain
from rl.scoring.worker import awaited, import_file

MOST_CALLS = 32  # of a turn. The policy is told that more are not made.


class Call(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any] | None  # None if it could not be read


class Reply(NamedTuple):
    """A turn of the policy."""

    text: str  # without special tokens
    calls: tuple[Call, ...]
    turn: int  # 1, 2, ...


class Tools:
    """The environment of --tools. It makes the calls of a turn, side by side, and ends with a turn without calls."""

    def __init__(self, functions: dict[str, Callable], most: int):
        self.functions, self.most, self.calls, self.errors = functions, most, 0, 0

    def step(self, reply: Reply) -> list[dict] | None:
        """The results of the calls as messages."""
        if not reply.calls:
            return None
        with ThreadPoolExecutor(MOST_CALLS) as threads:
            results = list(threads.map(self._result, reply.calls[:MOST_CALLS]))
        results += [(f"Error: at most {MOST_CALLS} calls in one turn", True)] * (len(reply.calls) - MOST_CALLS)
        self.calls += len(results)
        self.errors += sum(is_error for _, is_error in results)
        return [
            {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": text}
            for call, (text, _) in zip(reply.calls, results, strict=True)
        ]

    def _result(self, call: Call) -> tuple[str, bool]:
        """A tool's answer as text, and whether it is an error: that is for the policy to know, and ends nothing."""
        try:
            if call.arguments is None:
                raise ValueError("this call could not be read; write it as JSON with a name and arguments")
            if call.name not in self.functions:
                raise ValueError(f"there is no tool {call.name!r}; there are {', '.join(self.functions)}")
            result = awaited(self.functions[call.name](**call.arguments))
            return _cut(result if isinstance(result, str) else json.dumps(plain(result)), self.most), False
        except (Exception, SystemExit) as error:  # argparse exits
            while isinstance(error, BaseExceptionGroup):  # of the client of a tool server, which says nothing itself
                error = error.exceptions[0]
            return _cut(f"Error: {type(error).__name__}: {error}", self.most), True

    def report(self) -> dict[str, float]:
        """Metrics environment/calls and environment/errors."""
        return {"calls": self.calls, "errors": self.errors}


def _cut(text: str, most: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate is not text
    return text if len(text) <= most else f"{text[:most]} ... (cut: {len(text)} characters)"


def load(environment: str | None, tools: Sequence[str], most: int) -> tuple[Callable[[], Any], list[Any], bool]:
    """What makes an environment, its tools (functions, or schemas of them), and whether it has a `reset`. Raises
    ValueError for a class that cannot answer, and whatever the files raise.
    """
    return _load_tools(tools, most) if environment is None else _load_class(environment, most)


def _load_class(spec: str, most: int) -> tuple[Callable[[], Any], list[Any], bool]:
    """See `load`, for --environment."""
    module, name = load_file(spec)
    cls = vars(module).get(name or "Environment")
    if not isinstance(cls, type):
        raise ValueError(f"{spec.partition(':')[0]} has no class {name or 'Environment'!r}")
    tools = list(getattr(cls, "tools", ()))
    if not hasattr(cls, "step") and not (tools and all(map(callable, tools))):
        raise ValueError(f"{cls.__name__} has no `step`, and no `tools` that are functions to be called without")
    _check_names([(spec, x) for x in tools])
    functions = {_name_of(x): x for x in tools if callable(x)}
    make = cls if hasattr(cls, "step") else partial(_with_tools, cls, functions, most)
    return make, tools, hasattr(cls, "reset")


def _load_tools(specs: Sequence[str], most: int) -> tuple[Callable[[], Any], list[Any], bool]:
    """See `load`, for --tools."""
    functions, tools = {}, []
    for spec in specs:
        if spec.startswith(("http://", "https://")):
            picked = tool_server.listed(spec)
            functions |= {_name_of(x): partial(tool_server.call, spec, _name_of(x)) for x in picked}
        else:
            picked = _functions_of(spec)
            functions |= {_name_of(x): x for x in picked}
        tools += [(spec, x) for x in picked]
    if not tools:
        raise ValueError(f"{' '.join(specs)}: there is no function in it whose name does not begin with _")
    _check_names(tools)
    return partial(Tools, functions, most), [x for _, x in tools], False


def _functions_of(spec: str) -> list[Callable]:
    """The function that `path/to/file.py:name` names, or all functions of `path/to/file.py` that are not private."""
    module, name = load_file(spec)
    if name:
        if not callable(function := getattr(module, name)):
            raise ValueError(f"{spec} is not a function but {function!r:.300}")
        return [function]
    defined = [x for x in vars(module).values() if inspect.isfunction(x) and x.__module__ == module.__name__]
    return [x for x in dict.fromkeys(defined) if not x.__name__.startswith("_")]  # one may have two names


def load_file(spec: str) -> tuple[Any, str]:
    """The module of `path/to/file.py[:name]`, and the name or "". Raises ValueError if there is no such file or name,
    and whatever importing the file raises.
    """
    path, _, name = spec.partition(":")
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}; give path/to/file.py:name")
    module = import_file(path)
    if name and not hasattr(module, name):
        raise ValueError(f"{path} has no {name!r}")
    return module, name


def _name_of(tool: Any) -> str:
    """The name of a function or of a schema. Raises ValueError for what is neither."""
    if isinstance(tool, dict):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
    else:
        name = getattr(tool, "__name__", None) if callable(tool) else None
    if not isinstance(name, str):
        raise ValueError(f"{tool!r:.300} is not a tool: give a function, or its JSON schema with a name")
    return name


def _check_names(tools: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError if two tools, each after the place that it is from, have one name: only one would be called."""
    places: dict[str, str] = {}
    for place, tool in tools:
        if (name := _name_of(tool)) in places:
            raise ValueError(f"two tools are called {name!r}, from {places[name]} and {place}; rename or leave out one")
        places[name] = place


def _with_tools(cls: type, functions: dict[str, Callable], most: int) -> Any:
    """An environment without `step`, which gets that of `Tools`."""
    environment, tools = cls(), Tools(functions, most)
    environment.step = tools.step
    if not hasattr(cls, "report"):
        environment.report = tools.report
    return environment


def schemas_of(tools: Sequence[Any]) -> list[dict]:
    """JSON schemas of tools, which are schemas or functions: those of a function are made by transformers of its types
    and docstring. Raises ValueError for a function without these.
    """
    schemas = []
    for tool in tools:
        if isinstance(tool, dict):
            schema = plain(tool)
            schemas.append({"type": "function", "function": schema} if "name" in schema else schema)
        else:
            from transformers.utils import get_json_schema

            schemas.append(get_json_schema(tool))
    return schemas
