"""The candidate's process in the sandbox: lock it up, load the candidate's code, answer the test process's calls.

rewards/sandbox.py sends this file into the sandbox. After `lock_up` nothing in this process is trusted any more: the
candidate's code may change every object in it. What keeps the others safe is the kernel, and that
`sandbox_wire.decode` only builds plain data and stand-ins for what stays here.
"""

import builtins
import copy
import ctypes
import dataclasses
import io
import operator
import os
import resource
import struct
import sys
import types
from _collections_abc import Callable

from rewards import sandbox_wire

# What a stand-in for an object can do, as bits: those of these methods that the object's class has, and two more.
METHODS = "__call__ __iter__ __next__ __len__ __getitem__ __enter__ __contains__".split()
METHOD_BITS = {name: 1 << i for i, name in enumerate(METHODS)}
IS_DATA, HAS_FIELDS = 1 << len(METHODS), 2 << len(METHODS)  # of a subclass of a data type; a dataclass


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


def _fields(x: object) -> dict[str, object]:
    """The fields of a dataclass's object that its generated == compares."""
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if field.compare}


def _leave(manager: object, error: BaseException | None) -> bool:
    """The end of a with statement."""
    trace = None if error is None else error.__traceback__
    return bool(type(manager).__exit__(manager, error and type(error), error, trace))


def _run(coroutine: object) -> object:
    import asyncio

    return asyncio.run(coroutine)


_OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "format": format,
    "hash": hash,
    "round": round,
    "divmod": divmod,
    "int": int,
    "float": float,
    "complex": complex,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": _leave,
    "base": sandbox_wire.base,
    "fields": _fields,
    "run": _run,
    **{name: getattr(operator, name) for name in "eq lt le gt ge neg pos abs invert index".split()},
    **{
        prefix + name: getattr(operator, prefix + name + ("_" if prefix + name in ("and", "or") else ""))
        for prefix in ("", "i")
        for name in "add sub mul matmul truediv floordiv mod pow lshift rshift and xor or".split()
    },
}


def _is_builtin(cls: type) -> bool:
    return vars(builtins).get(cls.__name__) is cls


class _Objects:
    """The objects that the test process knows by number, and how it is told of them."""

    def __init__(self):
        self.by_number: list[object] = []  # keeps them alive, so that no other object gets their id
        self.numbers: dict[int, int] = {}
        self.kinds: dict[int, tuple] = {}  # descriptions of classes

    def number(self, x: object) -> int:
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.by_number)
            self.by_number.append(x)
        return self.numbers[id(x)]

    def kind(self, cls: type) -> tuple:
        """(number, name, bits, builtin exceptions that it is or "", own base classes if it is an exception)."""
        number = self.number(cls)
        if number not in self.kinds:
            line = type.mro(cls) if isinstance(cls, type) else []
            has = set().union(*(vars(base) for base in line))
            bits = sum(bit for name, bit in METHOD_BITS.items() if name in has)
            bits |= IS_DATA * issubclass(cls, sandbox_wire.DATA_BASES) | HAS_FIELDS * ("__dataclass_fields__" in has)
            name, parents = "", ()
            if issubclass(cls, BaseException):
                builtin = [base for base in line if issubclass(base, BaseException) and _is_builtin(base)]
                name = " ".join(x.__name__ for x in builtin if sum(issubclass(y, x) for y in builtin) == 1)
                own = [base for base in cls.__bases__ if issubclass(base, BaseException) and not _is_builtin(base)]
                parents = () if _is_builtin(cls) else tuple(map(self.kind, own))
            self.kinds[number] = (number, str(cls.__name__), bits, name, parents)
        return self.kinds[number]

    def describe(self, x: object) -> tuple:
        """(number, description of its class, description of itself if it is a class)."""
        own = self.kind(x) if isinstance(x, type) else None
        return (self.number(x), self.kind(type(x)), own)


def serve(fd: int) -> None:
    """Load the candidate's code, then answer calls until the test process goes.

    An answer is (kind, value, changed, printed): "value" and the value; "error" or "memory", with the exception, its
    arguments and its text; the arguments of a call, if it changed them; and what was printed since the last one. All
    come from a process that the candidate's code controls.
    """
    objects = _Objects()
    find = objects.by_number.__getitem__
    most, values = sandbox_wire.MAX_ANSWER, sandbox_wire.MAX_ANSWER_VALUES

    def answer(message: bytes, watch: bool, function: Callable[..., object], *args: object) -> None:
        try:
            value = function(*args)
            changed = None
            if watch and (value is None or in_place) and any(map(_mutable, (*args[1], *args[2].values()))):
                if sandbox_wire.encode(["call", *args], number_only, most, values) != message:
                    changed = args[1:]
            reply = sandbox_wire.encode(("value", value, changed, printed()), objects.describe, most, values)
        except BaseException as error:  # SystemExit too: how the candidate's code fails is for the tests to know
            reply = failure(error)
        sandbox_wire.send(fd, reply)

    def number_only(x: object) -> tuple[int]:
        return (objects.number(x),)

    def failure(error: BaseException) -> bytes:
        kind = "memory" if isinstance(error, MemoryError) else "error"
        try:
            text = str(error)[:10_000]
        except BaseException:
            text = ""
        for args in (error.args, (text,)):
            try:
                if isinstance(error, OSError) and len(args) == 2 and error.filename is not None:
                    args = (*args, error.filename)
                shown = (error, tuple(args), text)
                return sandbox_wire.encode((kind, shown, None, printed()), objects.describe, 1 << 16, 1000)
            except BaseException:  # arguments that are too long, or an exception that lies about itself
                continue
        plain = RuntimeError("an exception that cannot be shown")
        shown = (plain, plain.args, str(plain))
        return sandbox_wire.encode((kind, shown, None, ""), objects.describe, 1 << 16, 1000)

    code, names, capture, in_place = sandbox_wire.decode(sandbox_wire.receive(fd), find, sandbox_wire.MAX_REQUEST)
    output = io.StringIO()
    if capture:
        sys.stdout = output

    def printed() -> str:
        text = output.getvalue() if capture else ""
        output.seek(0)
        output.truncate()
        return text

    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses and typing look their module up here

    def load() -> dict[str, object]:
        try:
            program = compile(code, "solution.py", "exec", dont_inherit=True, optimize=0)
        except MemoryError:
            raise SyntaxError("too deeply nested") from None
        exec(program, vars(module))
        return {name: vars(module)[name] for name in names if name in vars(module)}

    answer(b"", False, load)
    while True:
        try:
            message = sandbox_wire.receive(fd)
        except EOFError:
            os._exit(0)
        operation, *arguments = sandbox_wire.decode(message, find, sandbox_wire.MAX_REQUEST)
        answer(message, operation == "call", _OPERATIONS[operation], *arguments)


def _mutable(x: object) -> bool:
    """Whether a value that came over the wire holds something that a call can change."""
    return isinstance(x, sandbox_wire.MUTABLE) or type(x) is tuple and any(map(_mutable, x))
