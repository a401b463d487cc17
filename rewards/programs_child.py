"""Runs a program inside the sandbox as if its input came from a pipe. `rewards/programs.py` sends this file there.

A line at the end of what it sends adds `program`, the compiled program. Nothing here is trusted: the program may change
all of it, and then its answers are wrong.
"""

import atexit
import builtins
import contextlib
import importlib
import io
import mmap
import os
import sys
import threading
import types
from collections.abc import Callable

program = compile("", "solution.py", "exec")
# Where a name is looked for that the program uses and forgot to import.
MODULES = """math collections itertools functools heapq bisect string re copy random operator typing datetime statistics
io sys os json""".split()
known = {"exit": sys.exit, "quit": sys.exit}
os_read, os_write, os_open, os_exit, io_open = os.read, os.write, os.open, os._exit, io.open
os_fstat, os_stat, mmap_mmap, stack_size = os.fstat, os.stat, mmap.mmap, threading.stack_size
STREAMS = {0: 0, 1: 1, "/dev/stdin": 0, "/dev/stdout": 1, "/dev/fd/0": 0, "/dev/fd/1": 1}
STREAMS |= {"/proc/self/fd/0": 0, "/proc/self/fd/1": 1}
MAX_STACK = 64 << 20  # bytes of a thread's stack: more does not fit into memory, and calls in Python do not use it


class Exit(BaseException):
    """os._exit: the end, and what is not flushed is lost."""


class File(io.BytesIO):
    """What a file descriptor stands for: bytes in memory."""

    def __init__(self, data: bytes, number: int):
        super().__init__(data)
        self.number, self.mode = number, ("rb", "wb")[number]

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:  # what the program wrote before is still wanted
        pass

    def readall(self) -> bytes:
        return self.read()

    def status(self) -> os.stat_result:
        """`os.fstat`: a regular file that its user may read and write."""
        return os.stat_result((0o100600, 0, 0, 1, 0, 0, len(self.getbuffer()), 0, 0, 0))


class Stream(io.TextIOWrapper):
    """stdin or stdout, over a file in memory."""

    def __init__(self, data: bytes, number: int):
        self.file = File(data, number)
        buffer = io.BufferedReader(self.file) if number == 0 else io.BufferedWriter(self.file)
        super().__init__(buffer, encoding="utf-8", errors="replace")
        self.mode = "rw"[number]

    def written(self) -> str:
        """What has been written and flushed."""
        return self.file.getvalue().decode("utf-8", "replace")

    def close(self) -> None:  # what the program wrote before is still wanted
        self.flush()


def opened(file: object, mode: str = "r", *args: object, **kwargs: object) -> object:
    """`open`, which also opens stdin and stdout, by number or name."""
    number = STREAMS.get(file if isinstance(file, int) else os.fspath(file))
    if number is None:
        return io_open(file, mode, *args, **kwargs)
    stream = (sys.stdin, sys.stdout)[number]
    return stream.buffer if "b" in mode else stream


def mapped(stdin: File, fileno: int, length: int, *args: object, **kwargs: object) -> mmap.mmap:
    """`mmap.mmap`, which gives a copy of stdin."""
    if fileno != 0:
        return mmap_mmap(fileno, length, *args, **kwargs)
    data = stdin.getvalue()
    copy = mmap_mmap(-1, length or len(data))
    copy[: len(data)] = data[: len(copy)]
    return copy


def leave(code: int) -> None:
    """`os._exit`."""
    raise Exit


def with_names(action: Callable[[], object], space: dict[str, object]) -> object:
    """action(), again with each name that it lacked and that MODULES have. `space` gets the name too."""
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
    """Run the program as a module of that name. Returns its globals."""
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
    files = {0: stdin.file, 1: stdout.file}
    builtins.open = io.open = opened
    io.FileIO = lambda file, *args, **kwargs: files[STREAMS[file]] if file in STREAMS else io_open(file, "rb", 0)
    os.open = lambda path, *args, **kwargs: STREAMS[path] if path in STREAMS else os_open(path, *args, **kwargs)
    os._exit = leave
    os.read = lambda fd, size: stdin.file.read(size) if fd == 0 else os_read(fd, size)
    os.write = lambda fd, data: stdout.file.write(data) if fd == 1 else os_write(fd, data)
    os.fstat = lambda fd: files[fd].status() if fd in files else os_fstat(fd)
    os.stat = lambda path, **kwargs: files[STREAMS[path]].status() if path in STREAMS else os_stat(path, **kwargs)
    mmap.mmap = lambda *args, **kwargs: mapped(stdin.file, *args, **kwargs)
    threading.stack_size = lambda size=0: stack_size(min(size, MAX_STACK))
    try:
        load("__main__")
    except Exit:
        return stdout.written()
    except SystemExit:
        pass
    finally:
        os._exit = os_exit  # the sandbox's process itself ends by it
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, stdout):  # the program may have put its own there
        with contextlib.suppress(ValueError):  # it is closed, and was flushed then
            stream.flush()
    return stdout.written()


def call(name: str, arguments: list) -> object:
    """What the program's function of that name returns, or that method of its class Solution."""
    space = with_names(lambda: load("solution"), {})
    function = space[name] if name in space else getattr(space["Solution"](), name)
    return with_names(lambda: function(*arguments), space)
