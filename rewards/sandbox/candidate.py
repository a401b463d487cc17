"""The candidate's process in the sandbox: lock it up, load the candidate's code, answer the test process's calls.

After `lock_up` nothing in this process is trusted any more: the candidate's code may change every object in it. What
keeps the others safe is the kernel, and that `wire.decode` only builds plain data and stand-ins for what stays
here.
"""

import asyncio
import contextlib
import copy
import ctypes
import dataclasses
import inspect
import io
import math
import operator
import os
import queue
import resource
import struct
import sys
import threading
import types
from _collections_abc import Callable

from rewards.sandbox import wire

MAX_WORKERS = 16  # threads that answer those of the tests, beside the main one
MAX_SNAPSHOTS = 4 << 20  # bytes of all snapshots in an answer
# What a stand-in for an object can do, as bits: those of these methods that the object's class has, and three more. Its
# class is a subclass of a data type; it has `_fields`; it has them and is not a dataclass.
METHODS = "call iter next len contains getitem setitem delitem reversed bytes await aiter anext enter exit".split()
METHOD_BITS = {f"__{name}__": 1 << i for i, name in enumerate(METHODS)}
IS_DATA, HAS_FIELDS, IS_PLAIN = (1 << len(METHODS) + i for i in range(3))


def lock_up(plan: dict[str, object]) -> None:
    """Give up, for good, all that the candidate's code does not need.

    Args:
        plan: parent: process id that must be this process's parent. limits: {resource: value}. users: first and number
            of ids of which to become one, as user and group, or None. ruleset: Landlock file descriptor, or -1.
            program: seccomp filter, or no bytes.

    Raises:
        OSError: a step failed. Nothing of the candidate's may run then.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def must(step: str, result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{step}: {os.strerror(ctypes.get_errno())}")

    def prctl(step: str, *args: object) -> None:
        must(step, libc.prctl(*[ctypes.c_ulong(x) if isinstance(x, int) else x for x in args]))

    for name, value in plan["limits"].items():
        resource.setrlimit(name, (value, value))
    if plan["users"]:
        first, count = plan["users"]
        os.setgroups([])
        os.setresgid(*[first + os.getpid() % count] * 3)
        os.setresuid(*[first + os.getpid() % count] * 3)
    libc.mallopt(-8, 1)  # M_ARENA_MAX: each thread would get 64 MiB of address space
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    must("capset", libc.capset(header, nothing))
    prctl("PR_SET_DUMPABLE", 4, 0, 0, 0, 0)  # /proc/<pid> of this process now belongs to root
    prctl("PR_SET_PDEATHSIG", 1, 9, 0, 0, 0)  # after the change of user, which clears it
    if os.getppid() != plan["parent"]:
        os._exit(0)  # it died before the line above
    prctl("PR_SET_NO_NEW_PRIVS", 38, 1, 0, 0, 0)
    if plan["ruleset"] >= 0:
        must("landlock_restrict_self", libc.syscall(446, plan["ruleset"], 0))
        os.close(plan["ruleset"])
    if plan["program"]:
        program = ctypes.create_string_buffer(plan["program"], len(plan["program"]))
        fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(program))
        prctl("PR_SET_SECCOMP", 22, 2, ctypes.c_char_p(fprog), 0, 0)


def _run(awaitable: object) -> object:
    async def main() -> object:
        return await awaitable

    if not hasattr(_runners, "own"):  # one for all of a thread: what they leave running goes on with the next
        _runners.own = asyncio.Runner()
    return _runners.own.run(main())


_runners = threading.local()
_BUILTINS = (getattr, setattr, delattr, iter, next, len, bool, str, repr, format, hash, round, divmod, int, float)
_BUILTINS += (complex, bytes, isinstance, issubclass, reversed, aiter, anext, math.floor, math.ceil, math.trunc)
_BUILTINS += (copy.copy, copy.deepcopy, *[vars(inspect)[name] for name in wire.KINDS])
UNARY = "neg pos abs invert index"
BINARY = "add sub mul matmul truediv floordiv mod pow lshift rshift and xor or"
_OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager, error: bool(
        type(manager).__exit__(manager, error and type(error), error, error and error.__traceback__)
    ),
    "run": _run,
    "same": lambda objects: objects,  # their snapshots come with them
    "threads": lambda: None,
    **{function.__name__: function for function in _BUILTINS},
    **{name: vars(operator)[name] for name in f"getitem setitem delitem contains eq lt le gt ge {UNARY}".split()},
    **{name: vars(operator)[f"__{name}__"] for word in BINARY.split() for name in (word, f"i{word}")},
}


class _Objects:
    """The objects that the test process knows by number, and how it is told of them."""

    def __init__(self):
        self.by_number: list[object] = []  # keeps them alive, so that no other object gets their id
        self.numbers: dict[int, int] = {}
        self.told: set[int] = set()  # numbers of those that the test process can make a stand-in for
        self.mentioned: dict[int, object] = {}  # in the answer that is being written

    def assign(self, x: object) -> int:
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.by_number)
            self.by_number.append(x)
        return self.numbers[id(x)]

    def number(self, x: object) -> tuple[int]:
        number = self.assign(x)
        self.mentioned[number] = x
        return (number,)

    def number_new(self, x: object) -> tuple[int]:
        return (self.assign(x),) if self.assign(x) in self.told else self.number(x)

    def kind(self, cls: type) -> tuple | type:
        """A class: its number, name, bits, base classes if it is an exception, fields, and `wire.like`.

        A builtin exception is itself.
        """
        if issubclass(cls, BaseException) and wire.is_type(cls):
            return cls
        has = set().union(*(vars(base) for base in type.mro(cls)))
        fields, is_data = _fields(cls), issubclass(cls, wire.DATA_BASES)
        bits = sum(bit for name, bit in METHOD_BITS.items() if name in has)
        bits |= IS_DATA * is_data | bool(fields) * (HAS_FIELDS | IS_PLAIN * (not dataclasses.is_dataclass(cls)))
        parents = [base for base in cls.__bases__ if issubclass(base, BaseException)]
        bases = tuple(map(self.kind, parents))
        return self.assign(cls), str(cls.__name__), bits, bases, tuple(fields), wire.like(cls)

    def snapshot(self, number: int, x: object, most: int) -> bytes:
        """(number, the data in an object), if it is of a class that has some and it can cross."""
        try:
            if isinstance(x, BaseException):
                args = (*x.args, x.filename) if isinstance(x, OSError) and len(x.args) == 2 else x.args
                causes = (x.__cause__, x.__context__, x.__suppress_context__)
                tries = [(args, vars(x), causes), (args, {}, causes), ((_text(x),), {}, (None, None, False))]
            elif isinstance(x, wire.DATA_BASES):
                tries = [wire.base(x)]
            else:
                fields = _fields(type(x))
                tries = [_attributes(x, fields)] if fields else []
        except Exception:
            tries = []
        for data in tries:
            with contextlib.suppress(Exception):
                return wire.encode((number, data), self.number_new, most, most)
        return b""

    def answer(self, *values: object, max_bytes: int = wire.MAX_MESSAGE) -> bytes:
        """An answer: the objects that are new, data of the objects in it and of all new ones, and the values.

        So it crosses at once, before the test process has asked anything that could tell what it is to be equal to. Of
        a new object it says the number, its class, and the object itself if that is a class.
        """
        self.mentioned = {}
        limits = max_bytes, wire.MAX_ANSWER_VALUES
        parts = [wire.encode(value, self.number, *limits) for value in values]
        snapshots, done, left = [], set(), MAX_SNAPSHOTS
        while todo := self.mentioned.keys() - done:
            for number in sorted(todo):
                if data := self.snapshot(number, self.mentioned[number], left):
                    snapshots.append(data)
                    left -= len(data)
            done |= todo
        new = [x for number, x in self.mentioned.items() if number not in self.told]
        shells = [(self.assign(x), self.kind(type(x)), self.kind(x) if isinstance(x, type) else None) for x in new]
        shells = [b"h" + wire.encode(shell, self.number, *limits)[1:] for shell in shells]  # not as tuples
        self.told.update(self.mentioned)
        return wire.joined((wire.joined(shells), wire.joined(snapshots), *parts))


def _fields(cls: type) -> list[tuple[str, bool, bool, bool]]:
    """The fields of a dataclass, or the parameters of another class that has an == of its own.

    Of each: its name, whether arguments without a name reach it, whether == looks at it, whether any argument does.
    """
    if dataclasses.is_dataclass(cls):
        return [(x.name, x.init and not x.kw_only, x.compare, x.init) for x in dataclasses.fields(cls)]
    code = getattr(cls.__init__, "__code__", None)
    if code is None or cls.__eq__ is object.__eq__ or issubclass(cls, wire.DATA_BASES):
        return []
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return [(name, i < code.co_argcount, True, True) for i, name in enumerate(names, 1)]


def _attributes(x: object, fields: list[tuple[str, bool, bool, bool]]) -> dict[str, object]:
    """The fields of a dataclass's object, or all attributes of another one, where `_x` and `__x` count as `x`."""
    if dataclasses.is_dataclass(x):
        return {name: getattr(x, name, None) for name, *_ in fields}
    state = object.__getstate__(x)  # attributes; with __slots__ a pair of these and of those in slots
    parts = state if isinstance(state, tuple) else (state,)
    return {name.rpartition("__")[2].lstrip("_"): value for part in parts for name, value in (part or {}).items()}


def _text(error: BaseException) -> str:
    try:
        return str(error)[:10_000]
    except BaseException:
        return ""


def serve(fd: int, problem: str) -> None:
    """Load the candidate's code, then answer calls until the test process goes.

    `fd` is the socket to it. First it is told why this process could not be locked up, if there is such a problem.
    An answer is "=" and a value that is plain data, or (new objects, data of objects, kind, value, changed, printed).
    The kind is "value", with the value, or else "error" or "memory", with the exception and its text. `changed` has the
    arguments of a call, if it changed them, and `printed` what was printed since the last answer. All come from a
    process that the candidate's code controls.
    """
    test_process = open(fd, "rb")
    wire.send(test_process, problem.encode())
    if problem:
        return
    objects = _Objects()
    most, values = wire.MAX_MESSAGE, wire.MAX_ANSWER_VALUES

    output, in_place = io.StringIO(), False
    answering = threading.RLock()  # one answer at a time is written

    def load(code: str, names: list[str], capture: bool, changes: bool) -> dict[str, object]:
        nonlocal in_place
        in_place = changes
        if capture:
            sys.stdout = output
        module = sys.modules["solution"] = types.ModuleType("solution")  # dataclasses and typing look it up here
        try:
            program = compile(code, "solution.py", "exec", dont_inherit=True, optimize=0)
        except MemoryError:
            raise SyntaxError("too deeply nested") from None
        exec(program, vars(module))
        return {name: vars(module)[name] for name in names if name in vars(module)}

    def answer(message: bytes, thread: int) -> str:
        operation, *args = wire.decode(message, objects.by_number.__getitem__, wire.MAX_MESSAGE)
        try:
            value, error = (load if operation == "load" else _OPERATIONS[operation])(*args), None
        except BaseException as raised:  # SystemExit, too: how the candidate's code fails is for the tests to know
            value, error = None, raised
        with answering:
            try:
                if error is not None:
                    raise error
                watch = operation == "call" and (value is None or in_place)
                watch = watch and any(map(_mutable, (*args[1], *args[2].values())))
                changed = watch and wire.encode([operation, *args], objects.number, most, values) != message
                objects.mentioned, text = {}, printed()
                reply = b"=" + wire.encode(value, objects.number, most, values)
                if changed or objects.mentioned or text:
                    reply = objects.answer("value", value, tuple(args[1:]) if changed else None, text)
            except BaseException as raised:
                reply = failure("memory" if isinstance(raised, MemoryError) else "error", raised)
            wire.send(test_process, reply, thread)
        value = error = None  # an error holds this frame
        return operation

    def failure(kind: str, error: BaseException) -> bytes:
        try:
            return objects.answer(kind, (error, _text(error)), None, printed(), max_bytes=1 << 16)
        except BaseException:  # an exception that lies about itself
            text = "an exception that cannot be shown"
            return objects.answer(kind, (RuntimeError(text), text), None, "")

    def printed() -> str:
        text = output.getvalue()
        output.truncate(output.seek(0))
        return text

    while answer(*wire.receive(test_process)) != "threads":  # raises if that has ended, so this process ends, too
        pass
    _serve_threads(test_process, answer)


def _serve_threads(test_process: wire.BinaryIO, answer: Callable[[bytes, int], str]) -> None:
    """From now on each thread of the tests has one here, so that a call may wait for what another does."""
    queues = [queue.SimpleQueue()]

    def start(step: Callable[..., object], *args: object) -> None:
        threading.Thread(target=repeat, args=(step, *args), daemon=True).start()

    def read() -> None:
        message, thread = wire.receive(test_process)
        number = thread and 1 + (thread - 1) % MAX_WORKERS
        while number >= len(queues):
            queues.append(queue.SimpleQueue())
            start(work, queues[-1])
        queues[number].put((message, thread))

    def work(messages: queue.SimpleQueue) -> None:
        answer(*messages.get())

    start(read)
    repeat(work, queues[0])


def repeat(step: Callable[..., object], *args: object) -> None:
    """Do it until it fails, which ends the process."""
    try:
        while True:
            step(*args)
    finally:
        os._exit(1)


def _mutable(x: object) -> bool:
    """Whether a value that came over the wire holds something that a call can change."""
    return isinstance(x, wire.MUTABLE) or type(x) is tuple and any(map(_mutable, x))
