"""Runs a program inside the sandbox as if its input came from a pipe; `rewards/programs.py` sends this file there.

A line at the end of what it sends adds `program`, the compiled program. Nothing here is trusted: the program may change
all of it, and then its answers are wrong.
"""

import atexit
import builtins
import importlib
import io
import os
import sys
import types
from collections.abc import Callable

program = compile("", "solution.py", "exec")
# Where a name is looked for that the program uses and forgot to import.
MODULES = """math collections itertools functools heapq bisect string re copy random operator typing datetime statistics
io sys os json""".split()
known = {"exit": sys.exit, "quit": sys.exit}
os_read, os_write, os_open, os_exit, io_open = os.read, os.write, os.open, os._exit, io.open
STREAMS = {0: 0, 1: 1, "/dev/stdin": 0, "/dev/stdout": 1}


class Exit(BaseException):
    """os._exit: the end, and what is not flushed is lost."""


class Stream(io.TextIOWrapper):
    """stdin or stdout, over bytes in memory."""

    def __init__(self, data: bytes, number: int):
        super().__init__(io.BytesIO(data), encoding="utf-8", errors="replace")
        self.number, self.mode = number, "rw"[number]

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:  # what the program wrote before is still wanted
        self.flush()


def opened(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
    """`open`, which also opens stdin and stdout, by number or name."""
    number = STREAMS.get(file if isinstance(file, int) else os.fspath(file))
    if number is None:
        return io_open(file, mode, *args, **kwargs)
    stream = (sys.stdin, sys.stdout)[number]
    return stream.buffer if "b" in mode else stream


def leave(code: int) -> None:
    """`os._exit`."""
    raise Exit


def with_names(action: Callable[[], object], space: dict[str, object]) -> object:
    """action(), again with each name that it lacked and that MODULES have; `space` gets the name too."""
    while True:
        try:
            return action()
        except NameError as error:
            name = error.name
            if name is None or name in known:
                raise
            owner = next((m for m in MODULES if m == name or hasattr(importlib.import_module(m), name)), None)
            if owner is None:
                raise
            module = importlib.import_module(owner)
            space[name] = known[name] = module if owner == name else getattr(module, name)


def load(name: str) -> dict[str, object]:
    """Run the program as a module of that name; returns its globals."""
    sys.setrecursionlimit(100_000)  # not at import: the trainer's processes read this file too
    module = sys.modules[name] = types.ModuleType(name)
    space = vars(module)
    space |= known
    exec(program, space)
    return space


def run(text: str) -> str:
    """What the program prints when it reads `text`."""
    return with_names(lambda: _run(text), {})


def _run(text: str) -> str:
    stdin, stdout = Stream(text.encode(), 0), Stream(b"", 1)
    sys.stdin = sys.__stdin__ = stdin
    sys.stdout = sys.__stdout__ = stdout
    builtins.open = io.open = opened
    os.open = lambda path, *args, **kwargs: STREAMS[path] if path in STREAMS else os_open(path, *args, **kwargs)
    os._exit = leave
    os.read = lambda fd, size: stdin.buffer.read(size) if fd == 0 else os_read(fd, size)
    os.write = lambda fd, data: stdout.buffer.write(data) if fd == 1 else os_write(fd, data)
    try:
        load("__main__")
    except Exit:
        return stdout.buffer.getvalue().decode("utf-8", "replace")
    except SystemExit:
        pass
    finally:
        os._exit = os_exit  # the sandbox's process itself ends by it
    if "threading" in sys.modules:
        threading = sys.modules["threading"]
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, stdout):  # the program may have put its own there
        stream.flush()
    return stdout.buffer.getvalue().decode("utf-8", "replace")


def call(name: str, arguments: list) -> object:
    """What the program's function of that name returns, or that method of its class Solution."""
    space = with_names(lambda: load("solution"), {})
    function = space[name] if name in space else getattr(space["Solution"](), name)
    return with_names(lambda: function(*arguments), space)
