"""The inside of the sandbox: lock this process up, load the candidate's code, answer the judge's calls.

`rewards/sandbox.py` sends this file to a fresh interpreter, so it imports nothing from the project and little from the
standard library. It also holds the wire format, which both sides use. After `lock_up` nothing in this process is
trusted any more: the candidate's code may change every object in it. What keeps the judge safe is the kernel, and that
`decode` only ever builds plain data.
"""

import ctypes
import os
import resource
import struct
import sys
import types
from _collections_abc import (
    Callable,
)  # built into the interpreter; collections.abc and typing would cost 5 ms each time

MAX_ANSWER = 1 << 20  # bytes
MAX_ANSWER_VALUES = 10_000  # numbers, texts and containers; so few that a set of colliding numbers costs a second
MAX_REQUEST = 16 << 20  # bytes
MAX_DEPTH = 60
_CONTAINERS = {b"l": list, b"t": tuple, b"s": set, b"z": frozenset, b"r": lambda items: range(*items)}
_TAGS = {list: b"l", tuple: b"t", set: b"s", frozenset: b"z"}
_DICTS = {("collections", "Counter"), ("collections", "defaultdict"), ("collections", "OrderedDict")}
_TYPES = {kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, set, frozenset, dict)}


def encode(value: object, to_number: Callable[[object], int], max_bytes: int, max_values: int) -> bytes:
    """Write `value` as bytes.

    Data are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict and range, and the builtin
    types that _TYPES lists. Types are exact: an object of a subclass of int is not an int. Only a Counter,
    defaultdict or OrderedDict is written as the dict that it holds. Every other object is written as the number that
    `to_number` gives it. A value is one letter, a 4-byte size, and that many bytes or values.

    Raises:
        ValueError: nested deeper than MAX_DEPTH, or more bytes or values than allowed.
    """
    parts: list[bytes] = []
    left = [max_bytes, max_values]

    def put(tag: bytes, size: int, payload: bytes = b"") -> None:
        left[0] -= 5 + len(payload)
        left[1] -= 1
        if min(left) < 0:
            raise ValueError(f"too long to cross: more than {max_bytes} bytes or {max_values} values")
        parts.append(tag + struct.pack(">I", size) + payload)

    def data(tag: bytes, payload: bytes) -> None:
        put(tag, len(payload), payload)

    def write(x: object, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        kind = type(x)
        if x is None:
            data(b"N", b"")
        elif kind is bool:
            data(b"B", b"\1" if x else b"\0")
        elif kind is int:
            data(b"i", x.to_bytes(x.bit_length() // 8 + 1, "big", signed=True))
        elif kind is float:
            data(b"f", struct.pack(">d", x))
        elif kind is complex:
            data(b"c", struct.pack(">dd", x.real, x.imag))
        elif kind is str:
            data(b"u", x.encode("utf-8", "surrogatepass"))
        elif kind is bytes:
            data(b"b", x)
        elif kind in _TAGS:
            put(_TAGS[kind], len(x))
            for item in x:
                write(item, depth + 1)
        elif kind is range:
            put(b"r", 3)
            for item in (x.start, x.stop, x.step):
                write(item, depth + 1)
        elif kind is dict or (kind.__module__, kind.__name__) in _DICTS:
            put(b"d", len(x))
            for key, item in x.items():
                write(key, depth + 1)
                write(item, depth + 1)
        elif kind is type and _TYPES.get(x.__name__) is x:
            data(b"y", x.__name__.encode())
        else:
            data(b"h", struct.pack(">I", to_number(x)))

    write(value, 0)
    return b"".join(parts)


def decode(message: bytes, from_number: Callable[[int], object], max_values: int) -> object:
    """Read what `encode` wrote, from anybody: builds nothing but plain data and what `from_number` returns.

    Raises:
        ValueError: not a message that `encode` could have written with this many values.
    """
    at = 0
    values = 0

    def read(depth: int) -> object:
        nonlocal at, values
        values += 1
        if depth > MAX_DEPTH or values > max_values or at + 5 > len(message):
            raise ValueError("malformed message")
        tag, size = message[at : at + 1], int.from_bytes(message[at + 1 : at + 5], "big")
        at += 5
        if tag in _CONTAINERS:
            return _CONTAINERS[tag]([read(depth + 1) for _ in range(size)])
        if tag == b"d":
            return dict([(read(depth + 1), read(depth + 1)) for _ in range(size)])
        payload = message[at : at + size]
        at += size
        if len(payload) != size:
            raise ValueError("malformed message")
        if tag == b"N" and not payload:
            return None
        if tag == b"B" and payload in (b"\0", b"\1"):
            return payload == b"\1"
        if tag == b"i":
            return int.from_bytes(payload, "big", signed=True)
        if tag == b"f":
            return struct.unpack(">d", payload)[0]
        if tag == b"c":
            return complex(*struct.unpack(">dd", payload))
        if tag == b"u":
            return payload.decode("utf-8", "surrogatepass")
        if tag == b"b":
            return payload
        if tag == b"y":
            return _TYPES[payload.decode()]
        if tag == b"h":
            return from_number(struct.unpack(">I", payload)[0])
        raise ValueError("malformed message")

    try:
        value = read(0)
    except (struct.error, TypeError, LookupError) as error:  # wrong width, a list in a set, unknown names
        raise ValueError("malformed message") from error
    if at != len(message):
        raise ValueError("malformed message")
    return value


def _read(fd: int, size: int) -> bytes:
    """Exactly `size` bytes; ends the process when the judge is gone."""
    chunks = []
    while size:
        chunk = os.read(fd, size)
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _receive(fd: int) -> bytes:
    return _read(fd, int.from_bytes(_read(fd, 4), "big"))


def _send(fd: int, message: bytes) -> None:
    data = memoryview(struct.pack(">I", len(message)) + message)
    while data:
        data = data[os.write(fd, data) :]


def lock_up(plan: dict[str, object]) -> None:
    """Give up, for good, all that the candidate's code does not need.

    Args:
        plan: judge: process id that must be this process's parent. limits: {resource: value}. uid: user and group to
            become, or None. ruleset: Landlock file descriptor, or -1. program: seccomp filter, or no bytes.

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
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[plan["uid"]] * 3)
        os.setresuid(*[plan["uid"]] * 3)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    must("capset", libc.capset(header, nothing))
    prctl("PR_SET_DUMPABLE", 4, 0, 0, 0, 0)  # /proc/<pid> of this process now belongs to root
    prctl("PR_SET_PDEATHSIG", 1, 9, 0, 0, 0)  # after the change of user, which clears it
    if os.getppid() != plan["judge"]:
        os._exit(0)  # the judge died before the line above
    prctl("PR_SET_NO_NEW_PRIVS", 38, 1, 0, 0, 0)
    if plan["ruleset"] >= 0:
        must("landlock_restrict_self", libc.syscall(446, plan["ruleset"], 0))
        os.close(plan["ruleset"])
    if plan["program"]:
        program = ctypes.create_string_buffer(plan["program"], len(plan["program"]))
        fprog = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(program))
        prctl("PR_SET_SECCOMP", 22, 2, ctypes.c_char_p(fprog), 0, 0)


_OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda container, key: container[key],
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
}


def serve(fd: int) -> None:
    """Lock up, say so, load the candidate's code, then answer calls until the judge goes.

    Answers are ("value", v), ("error", what) or ("memory", what). All after the first one come from a process that the
    candidate's code controls.
    """
    objects: dict[int, object] = {}  # keeps them alive, so that no other object gets their id
    numbers: dict[int, int] = {}

    def to_number(x: object) -> int:
        if id(x) not in numbers:
            numbers[id(x)] = len(objects)
            objects[len(objects)] = x
        return numbers[id(x)]

    def answer(function: Callable[..., object], *args: object) -> None:
        try:
            reply = encode(("value", function(*args)), to_number, MAX_ANSWER, MAX_ANSWER_VALUES)
        except BaseException as error:  # SystemExit too: how the candidate's code fails is for the judge to know
            kind = "memory" if isinstance(error, MemoryError) else "error"
            try:
                text = str(error)
            except BaseException:
                text = ""
            reply = encode((kind, f"{type(error).__name__}: {text[:200]}"), to_number, MAX_ANSWER, 3)
        _send(fd, reply)

    plan = decode(_receive(fd), objects.__getitem__, MAX_REQUEST)
    answer(lock_up, plan)
    code, names = decode(_receive(fd), objects.__getitem__, MAX_REQUEST)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses and typing look their module up here

    def load() -> dict[str, object]:
        try:
            program = compile(code, "solution.py", "exec", dont_inherit=True)
        except MemoryError:
            raise SyntaxError("too deeply nested") from None
        exec(program, vars(module))
        return {name: vars(module)[name] for name in names if name in vars(module)}

    answer(load)
    while True:
        operation, *arguments = decode(_receive(fd), objects.__getitem__, MAX_REQUEST)
        answer(_OPERATIONS[operation], *arguments)
