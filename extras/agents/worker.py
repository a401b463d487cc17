"""The processes in which environments live: one for each conversation, forked from one that knows the user's file.

They import the standard library and the user's file only. What the trainer sends are pickles; what goes back is JSON, a
line each, so that nothing an environment returns can do more than be data. An environment that hangs or dies costs its
own conversation. See environments.py for the contract.
"""

import asyncio
import contextlib
import dataclasses
import enum
import inspect
import json
import numbers
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable, Mapping, MappingView, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rl.scoring import guard
from rl.scoring.guard import awaited, traceback_text
from rl.scoring.worker import as_number

MAX_ANSWER = 64 << 20  # bytes of one answer
MAX_REPORT = 1 << 20  # characters of a report, and of what messages have besides their content: all of it is kept
RESERVED = ("error_frac", "observation_tokens", "seconds", "turn_rewards")  # metrics that the run itself computes
SCALARS = (str, int, float, type(None))
CLOSE_SECONDS = 10  # that an environment's `close` may take
MOST_CALLS = 32  # of a turn; the policy is told that more are not made


class Call(NamedTuple):
    """A call of a tool."""

    id: str
    name: str
    arguments: dict[str, Any] | None  # None: it could not be read


class Reply(NamedTuple):
    """A turn of the policy."""

    text: str  # without special tokens
    calls: tuple[Call, ...]
    turn: int  # 1, 2, ...


class Tools:
    """The environment of --tools: it makes the calls of a turn, side by side, and ends with a turn without calls."""

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
            return _cut(result if isinstance(result, str) else json.dumps(_plain(result)), self.most), False
        except (Exception, SystemExit) as error:  # argparse exits
            while isinstance(error, BaseExceptionGroup):  # of the client of a tool server, which says nothing itself
                error = error.exceptions[0]
            return _cut(f"Error: {type(error).__name__}: {error}", self.most), True

    def report(self) -> dict[str, float]:
        """Metrics environment/calls and environment/errors."""
        return {"calls": self.calls, "errors": self.errors}


def _cut(text: str, most: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text
    return text if len(text) <= most else f"{text[:most]} ... (cut: {len(text)} characters)"


def load_file(spec: str) -> tuple[Any, str]:
    """The module of `path/to/file.py[:name]`, and the name or "". Raises ValueError if there is no such file or name,
    and whatever importing the file raises.
    """
    path, _, name = spec.partition(":")
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}; give path/to/file.py:name")
    module = guard.import_file(path)
    if name and not hasattr(module, name):
        raise ValueError(f"{path} has no {name!r}")
    return module, name


def load(environment: str | None, tools: Sequence[str], most: int) -> tuple[Callable[[], Any], list[Any], bool]:
    """What makes an environment; its tools: functions, or schemas of them; and whether it has a `reset`. Raises
    ValueError for a class that cannot answer, and whatever the files raise.
    """
    if environment is not None:
        module, name = load_file(environment)
        cls = vars(module).get(name or "Environment")
        if not isinstance(cls, type):
            raise ValueError(f"{environment.partition(':')[0]} has no class {name or 'Environment'!r}")
        listed = list(getattr(cls, "tools", ()))
        if not hasattr(cls, "step") and not (listed and all(map(callable, listed))):
            raise ValueError(f"{cls.__name__} has no `step`, and no `tools` that are functions to be called without")
        _check_names([(environment, x) for x in listed])
        functions = {_name_of(x): x for x in listed if callable(x)}
        make = cls if hasattr(cls, "step") else partial(_with_tools, cls, functions, most)
        return make, listed, hasattr(cls, "reset")
    functions, described = {}, []
    for spec in tools:
        if spec.startswith(("http://", "https://")):
            picked = _mcp_tools(spec)
            functions |= {_name_of(x): partial(_mcp_call, spec, _name_of(x)) for x in picked}
        else:
            module, name = load_file(spec)
            own = [x for x in vars(module).values() if inspect.isfunction(x) and x.__module__ == module.__name__]
            public = [x for x in dict.fromkeys(own) if not x.__name__.startswith("_")]  # one may have two names
            picked = [getattr(module, name)] if name else public
            if not all(map(callable, picked)):
                raise ValueError(f"{spec} is no function but {picked[0]!r:.300}")
            functions |= {_name_of(x): x for x in picked}
        described += [(spec, x) for x in picked]
    if not described:
        raise ValueError(f"{' '.join(tools)}: there is no function in it whose name does not begin with _")
    _check_names(described)
    return partial(Tools, functions, most), [x for _, x in described], False


def _name_of(tool: Any) -> str:
    """The name of a function or of a schema. Raises ValueError for what is neither."""
    if isinstance(tool, dict):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
    else:
        name = getattr(tool, "__name__", None) if callable(tool) else None
    if not isinstance(name, str):
        raise ValueError(f"{tool!r:.300} is no tool: give a function, or its JSON schema with a name")
    return name


def _check_names(tools: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError if two tools, each behind the place that it is from, have one name: only one would be called."""
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


def _mcp_tools(url: str) -> list[dict]:
    """The schemas of a tool server's tools."""

    async def ask(client: Any) -> list[Any]:
        page = await client.list_tools()
        found, cursors = [*page.tools], set()
        while page.next_cursor is not None:
            if page.next_cursor in cursors:
                raise ValueError(f"{url} lists its tools in a circle: page {page.next_cursor!r} came before")
            cursors.add(page.next_cursor)
            page = await client.list_tools(cursor=page.next_cursor)
            found += page.tools
        return found

    listed = _mcp_answer(url, ask)
    return [dict(name=x.name, description=x.description or "", parameters=x.input_schema) for x in listed]


def _mcp_call(url: str, name: str, /, **arguments: Any) -> str:
    """What a tool of a server returns, as text. Raises RuntimeError with it if that is an error."""
    result = _mcp_answer(url, lambda client: client.call_tool(name, arguments))
    text = "\n".join(map(_mcp_text, result.content))
    if result.is_error:
        raise RuntimeError(text)
    return text if result.content or result.structured_content is None else json.dumps(result.structured_content)


def _mcp_answer(url: str, ask: Callable[[Any], Any]) -> Any:
    """What `ask` gets from a client of a tool server, for which it may wait."""
    from mcp import Client

    async def connect() -> Any:
        async with Client(url) as client:
            return await ask(client)

    return asyncio.run(connect())


def _mcp_text(part: Any) -> str:
    """A part of a result as text; a part that is none is named, so that the policy knows of it."""
    source = getattr(part, "resource", part)
    about = [str(x) for x in (getattr(source, "mime_type", None), getattr(source, "uri", None)) if x]
    named = " ".join([part.type.replace("_", " "), *about])
    return getattr(source, "text", f"[the result has a part that is not text and cannot be shown: {named}]")


def schemas_of(tools: list[Any]) -> list[dict]:
    """JSON schemas of tools, as transformers makes them of a function's types and docstring. In a child of its own:
    transformers takes memory and time that no conversation needs. Raises ValueError for a function without these.
    """
    tools = [_plain(x) if isinstance(x, dict) else x for x in tools]
    tools = [{"type": "function", "function": x} if isinstance(x, dict) and "name" in x else x for x in tools]
    if all(isinstance(x, dict) for x in tools):
        return tools
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            from transformers.utils import get_json_schema

            found = {"tools": [x if isinstance(x, dict) else get_json_schema(x) for x in tools]}
        except BaseException:
            found = {"problem": traceback_text()}
        with open(writing, "w") as file:
            file.write(json.dumps(found))
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        found = json.loads(file.read())
    os.wait()
    if "problem" in found:
        raise ValueError(found["problem"])
    return found["tools"]


def converse(connection: socket.socket, make: Callable[[], Any]) -> None:
    """Let one environment answer, until the trainer closes the connection; does not return."""
    requests, answers = connection.makefile("rb"), connection.makefile("w", encoding="utf-8", errors="replace")
    runner, environment = asyncio.Runner(), None
    with contextlib.suppress(EOFError, OSError):  # the trainer has closed the connection
        while True:
            method, arguments = pickle.load(requests)
            try:
                environment = environment or make()
                found = getattr(environment, method)(*arguments) if hasattr(environment, method) else ()
                found, reward = awaited(found, runner.run), None
                is_pair = isinstance(found, tuple) and len(found) == 2 and not isinstance(found[1], Mapping)
                if is_pair and method == "step":
                    found, reward = found[0], as_number(found[1])
                # A `reset` that returns nothing adds nothing.
                messages = None if found is None and method == "step" else [dict(x) for x in found or ()]
                texts = [x.get(name) for x in messages or () for name in ("role", "content")]
                if not all(isinstance(x, str) for x in texts):
                    raise ValueError(f"{method} returned {found!r:.300}: a message has a role and a content, texts")
                report = environment.report() if hasattr(environment, "report") else {}
                messages, report = _plain(messages), _plain(dict(awaited(report, runner.run)))
                if reserved := [name for name in RESERVED if name in report]:
                    raise ValueError(f"the report has {reserved[0]!r}, a name that the run uses itself; rename it")
                about = [{name: x for name, x in message.items() if name != "content"} for message in messages or ()]
                if (size := len(json.dumps([report, about]))) > MAX_REPORT:
                    raise ValueError(f"the report, or messages without their content, has {size} characters of JSON")
                # A lone surrogate becomes a "?".
                line = json.dumps({"messages": messages, "reward": reward, "report": report}, ensure_ascii=False)
                if len(line) > MAX_ANSWER:
                    raise ValueError(f"{method} answered {len(line)} characters, over the limit of {MAX_ANSWER}")
            except BaseException:  # an environment may raise anything, SystemExit included; the conversation ends
                line = json.dumps({"problem": traceback_text()})
            print(line, file=answers, flush=True)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CLOSE_SECONDS)  # which ends this process
    with contextlib.suppress(BaseException):
        awaited(environment.close(), runner.run)
    os._exit(0)


def _plain(value: Any) -> Any:
    """What JSON has of a value: numbers and lists of those of numpy and torch, of Decimal and Fraction, of sets, of
    dataclasses, of pydantic's models and of enums, also inside others; the text of anything else.
    """
    value = value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, type):
        return str(value)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for method in ("tolist", "model_dump"):  # of numpy and torch, and of pydantic
        if hasattr(value, method):
            return _plain(getattr(value, method)())
    if isinstance(value, Mapping):
        names = {name: _plain(name) for name in value}
        return {names[name] if isinstance(names[name], SCALARS) else str(name): _plain(value[name]) for name in value}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=lambda x: (str(type(x)), x if isinstance(x, SCALARS) else str(x)))
    if isinstance(value, (Sequence, MappingView)) and not isinstance(value, (bytes, bytearray)):
        return [_plain(x) for x in value]
    if isinstance(value, numbers.Real | Decimal):
        number = float(value)
        return int(number) if number.is_integer() and abs(number) < 2**53 else number
    return str(value)


def main() -> None:
    """The first message names the user's files; the others start or end processes."""
    control = guard.begin_worker()
    try:
        make, tools, has_reset = load(*pickle.loads(control.recv(1 << 20)))
        hello = {"tools": schemas_of(tools), "has_reset": has_reset}
    except BaseException:
        hello = {"problem": traceback_text()}
    line = json.dumps(hello).encode() + b"\n"
    for start in range(0, len(line), 1 << 16):  # the socket takes no long messages
        control.send(line[start : start + (1 << 16)])
    if "problem" in hello:
        os._exit(1)
    kept, processes = guard.children_of_this(), {}  # started by the user's file; of conversations, by their number
    guard.adopt_orphans()
    signal.signal(signal.SIGCHLD, lambda *_: _reap(processes, kept))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 10, 1)
        if not message:
            break
        command, number = json.loads(message)
        if command == "end":
            _kill(processes.get(number))
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with contextlib.suppress(OSError):  # raised where no process can be started: this conversation ends
            if (pid := os.fork()) == 0:
                guard.die_with_parent()
                guard.adopt_orphans()  # what it starts becomes ours when it has ended, not before
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


def _reap(processes: dict[int, int], kept: set[int]) -> None:
    """Forget processes that have ended, and kill what they have left behind: it is a child of this one then."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            for number, pid in list(processes.items()):  # another signal may come meanwhile
                if pid == ended:
                    processes.pop(number, None)
    for pid in guard.children_of_this() - kept - set(processes.values()):
        _kill(pid)


def _kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
