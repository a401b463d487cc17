"""The processes in which environments live: one for each conversation, forked from one that knows the user's file.

They import the standard library and the user's file only. What the trainer sends are pickles; what goes back is JSON, a
line each, so that nothing an environment returns can do more than be data. An environment that hangs or dies costs its
own conversation. See environments.py for the contract.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rl.scoring.worker import PR_SET_PDEATHSIG, fork_worker

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
            result = _awaited(self.functions[call.name](**call.arguments))
            return _cut(result if isinstance(result, str) else json.dumps(result, default=str), self.most), False
        except Exception as error:
            return _cut(f"Error: {type(error).__name__}: {error}", self.most), True

    def report(self) -> dict[str, float]:
        """Metrics environment/calls and environment/errors."""
        return {"calls": self.calls, "errors": self.errors}


def _cut(text: str, most: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text
    return text if len(text) <= most else f"{text[:most]} ... (cut: {len(text)} characters)"


def _awaited(result: Any) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def load_file(spec: str) -> tuple[Any, str]:
    """The module of `path/to/file.py[:name]`, and the name or ""."""
    path, _, name = spec.partition(":")
    sys.path.append(str(Path(path).resolve().parent))
    found = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module, name


def load(environment: str | None, tools: Sequence[str], most: int) -> tuple[Callable[[], Any], list[Any]]:
    """What makes an environment, and its tools: functions, or schemas of them. Raises whatever the files raise."""
    if environment is not None:
        module, name = load_file(environment)
        cls = getattr(module, name or "Environment")
        functions = {x.__name__: x for x in getattr(cls, "tools", ()) if callable(x)}
        if hasattr(cls, "step"):
            return cls, list(getattr(cls, "tools", ()))
        return partial(Tools, functions, most), list(functions.values())
    functions, described = {}, []
    for spec in tools:
        if spec.startswith(("http://", "https://")):
            for tool in _mcp_tools(spec):
                functions[tool["function"]["name"]] = partial(_mcp_call, spec, tool["function"]["name"])
                described.append(tool)
            continue
        module, name = load_file(spec)
        own = [x for x in vars(module).values() if inspect.isfunction(x) and x.__module__ == module.__name__]
        picked = [getattr(module, name)] if name else [x for x in own if not x.__name__.startswith("_")]
        functions |= {x.__name__: x for x in picked}
        described += picked
    return partial(Tools, functions, most), described


def _mcp_tools(url: str) -> list[dict]:
    """The schemas of a tool server's tools."""
    from mcp import Client

    async def ask() -> Any:
        async with Client(url) as client:
            return (await client.list_tools()).tools

    listed = asyncio.run(ask())
    found = [dict(name=x.name, description=x.description or "", parameters=x.input_schema) for x in listed]
    return [{"type": "function", "function": x} for x in found]


def _mcp_call(url: str, name: str, **arguments: Any) -> str:
    """The text that a tool of a server returns. Raises RuntimeError with it if that is an error."""
    from mcp import Client

    async def ask() -> Any:
        async with Client(url) as client:
            return await client.call_tool(name, arguments)

    result = asyncio.run(ask())
    text = "\n".join(x.text for x in result.content if x.type == "text")
    if result.is_error:
        raise RuntimeError(text)
    return text


def schemas_of(tools: list[Any]) -> list[dict]:
    """JSON schemas of tools, as transformers makes them of a function's types and docstring. In a child of its own:
    transformers takes memory and time that no conversation needs.
    """
    if all(isinstance(x, dict) for x in tools):
        return tools
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            from transformers.utils import get_json_schema

            found = {"tools": [x if isinstance(x, dict) else get_json_schema(x) for x in tools]}
        except BaseException:
            found = {"problem": traceback.format_exc(limit=-4)}
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
    requests, answers = connection.makefile("rb"), connection.makefile("w")
    loop = environment = None
    while True:
        try:
            method, arguments = pickle.load(requests)
        except EOFError:
            signal.alarm(CLOSE_SECONDS)  # which ends this process
            with contextlib.suppress(BaseException):
                environment.close()
            os._exit(0)
        try:
            environment = environment or make()
            result = getattr(environment, method)(*arguments) if hasattr(environment, method) else ()
            if inspect.isawaitable(result):
                loop = loop or asyncio.new_event_loop()
                result = loop.run_until_complete(result)
            messages = None if result is None else [dict(x) for x in result]
            if any(not isinstance(x.get("role"), str) or not isinstance(x.get("content"), str) for x in messages or ()):
                raise ValueError(f"{method} returned {messages!r:.300}: a message has a role and a content, both texts")
            report = dict(environment.report()) if hasattr(environment, "report") else {}
            answer = json.dumps({"messages": messages, "report": report}, default=str)
        except BaseException:  # an environment may raise anything, SystemExit included; the conversation ends
            answer = json.dumps({"problem": traceback.format_exc(limit=-4)[-4000:]})
        print(answer, file=answers, flush=True)


def main() -> None:
    """argv: the descriptor of a socket. The first message names the user's files; the others start or end processes."""
    fork_worker()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    try:
        make, tools = load(*pickle.loads(control.recv(1 << 20)))
        cls = make if isinstance(make, type) else Tools
        hello = {"tools": schemas_of(tools), "has_reset": hasattr(cls, "reset")}
    except BaseException:
        hello = {"problem": traceback.format_exc(limit=-4)[-20_000:]}
    control.send(json.dumps(hello).encode())
    children: dict[int, int] = {}  # process by the conversation's number
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 10, 1)
        if not message:
            return  # the guard kills the rest
        command, number = json.loads(message)
        if command == "end":
            _kill(children.get(number))
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if (pid := os.fork()) == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            os.setsid()
            control.close()
            converse(socket.socket(fileno=descriptors[0]), make)
        children[number] = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.close(descriptors[0])


def _reap(children: dict[int, int]) -> None:
    """Forget processes that have ended, and kill what they have left behind."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            for number, pid in list(children.items()):  # another signal may come meanwhile
                if pid == ended and children.pop(number, None):
                    _kill(ended)


def _kill(pid: int | None) -> None:
    """End a conversation's process, and all that it has started."""
    if pid is not None:
        for end in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(pid, signal.SIGKILL)
