"""What crosses between the processes of the sandbox, as bytes: plain data, standard-library values, numbers of objects.

`decode` reads messages from anybody: it builds nothing but the types listed here, and what its caller makes of an
object's number.
"""

import array
import builtins
import collections
import dataclasses
import datetime
import decimal
import fractions
import json
import os
import pathlib
import struct
import types
import uuid
import zoneinfo
from _collections_abc import Callable, Sequence
from itertools import chain
from typing import BinaryIO

MAX_MESSAGE = 16 << 20  # bytes
MAX_ANSWER_VALUES = 1_000_000  # numbers, texts and containers
MAX_PACKET = 1 << 16  # bytes; what the worker and the test process tell each other is cut into packets
MAX_DEPTH = 200
# {type: (letter, value -> bytes, bytes -> value)}
_SCALARS: dict[type, tuple[bytes, Callable, Callable]] = {
    type(None): (b"N", lambda x: b"", {b"": None}.__getitem__),
    bool: (b"B", lambda x: b"\1" if x else b"\0", {b"\0": False, b"\1": True}.__getitem__),
    int: (
        b"i",
        lambda x: x.to_bytes(x.bit_length() // 8 + 1, "big", signed=True),
        lambda data: int.from_bytes(data, "big", signed=True),
    ),
    float: (b"f", struct.Struct(">d").pack, lambda data: struct.unpack(">d", data)[0]),
    complex: (b"c", lambda x: struct.pack(">dd", x.real, x.imag), lambda data: complex(*struct.unpack(">dd", data))),
    str: (b"u", lambda x: x.encode("utf-8", "surrogatepass"), lambda data: data.decode("utf-8", "surrogatepass")),
    bytes: (b"b", lambda x: x, lambda data: data),
}
_TAGS = {list: b"l", tuple: b"t", set: b"s", frozenset: b"z"}
_CONTAINERS = {tag: kind for kind, tag in _TAGS.items()}
_ARRAYS = {int: (b"I", "q"), float: (b"F", "d")}  # lists of numbers of 8 bytes, written at once
_SHORT = 8  # shorter lists are written value by value
_READ = {  # {letter: bytes -> value}
    **{tag: from_bytes for tag, _, from_bytes in _SCALARS.values()},
    **{tag: lambda data, code=code: array.array(code, data).tolist() for tag, code in _ARRAYS.values()},
    b"y": lambda data: _TYPES[data.decode()],
}


def _zone(zone: datetime.tzinfo | None) -> bool:
    return zone is None or type(zone) in (datetime.timezone, zoneinfo.ZoneInfo) and getattr(zone, "key", "") is not None


def _clock(x: datetime.time | datetime.datetime, *day: int) -> tuple | None:
    return (*day, x.hour, x.minute, x.second, x.microsecond, x.tzinfo, x.fold) if _zone(x.tzinfo) else None


def _datetime(*parts: object) -> datetime.datetime:
    return datetime.datetime(*parts[:-1], fold=parts[-1])


_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath)
# Standard-library values: {name: (type, value -> its parts, parts -> value)}. No parts: it crosses as an object.
_STANDARD: dict[str, tuple[type, Callable, Callable]] = {
    "bytearray": (bytearray, lambda x: (bytes(x),), lambda data: bytearray(memoryview(data))),
    **{x.__name__: (x, lambda value: (value.start, value.stop, value.step), x) for x in (range, slice)},
    **{x.__name__: (x, lambda value: (str(value),), x) for x in (decimal.Decimal, *_PATHS)},
    "Ellipsis": (type(...), lambda x: (), lambda: ...),
    "dict_keys": (type({}.keys()), lambda x: (list(x),), lambda keys: dict.fromkeys(keys).keys()),
    "dict_items": (type({}.items()), lambda x: (list(x),), lambda pairs: dict(pairs).items()),
    "deque": (collections.deque, lambda x: (list(x), x.maxlen), collections.deque),
    **{x.__name__: (x, lambda value: (dict(value),), x) for x in (collections.Counter, collections.OrderedDict)},
    "defaultdict": (
        collections.defaultdict,
        lambda x: (x.default_factory if x.default_factory in _TYPES.values() else None, dict(x)),
        lambda factory, items: collections.defaultdict(factory if factory in _TYPES.values() else None, items),
    ),
    "Fraction": (fractions.Fraction, lambda x: (x.numerator, x.denominator), fractions.Fraction),
    "date": (datetime.date, lambda x: (x.year, x.month, x.day), datetime.date),
    "time": (datetime.time, _clock, lambda *parts: datetime.time(*parts[:-1], fold=parts[-1])),
    "datetime": (datetime.datetime, lambda x: _clock(x, x.year, x.month, x.day), _datetime),
    "timedelta": (datetime.timedelta, lambda x: (x.days, x.seconds, x.microseconds), datetime.timedelta),
    "timezone": (datetime.timezone, lambda x: x.__getinitargs__(), datetime.timezone),
    "ZoneInfo": (zoneinfo.ZoneInfo, lambda x: (x.key,) if _zone(x) else None, zoneinfo.ZoneInfo),
    "UUID": (uuid.UUID, lambda x: (x.int,), lambda number: uuid.UUID(int=number)),
    "array": (array.array, lambda x: (x.typecode, x.tolist()), array.array),
    "SimpleNamespace": (types.SimpleNamespace, lambda x: (vars(x),), lambda names: types.SimpleNamespace(**names)),
}
_NAMES = {kind: name for name, (kind, _, _) in _STANDARD.items()}
_ERRORS = [x for x in vars(builtins).values() if isinstance(x, type) and issubclass(x, BaseException)]
_ERRORS += [dataclasses.FrozenInstanceError, decimal.InvalidOperation, json.JSONDecodeError]
_TYPES = {kind.__name__: kind for kind in (*_SCALARS, *_TAGS, dict, *_NAMES, *_ERRORS)}
MUTABLE = (list, dict, set, bytearray, collections.deque, collections.Counter, collections.OrderedDict)
MUTABLE += (collections.defaultdict, array.array, types.SimpleNamespace)

_COPIED = "bytearray deque Counter OrderedDict Fraction Decimal datetime date timedelta".split()
# The data inside an object of a subclass of a data type, whatever the subclass overrides; the first type that fits.
_BASES: list[tuple[type, Callable]] = [
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, lambda x: bytes(memoryview(x))),
    (complex, lambda x: complex.__add__(x, 0j)),
    *[(kind, lambda x, kind=kind: kind(kind.__iter__(x))) for kind in _TAGS],
    *[(_STANDARD[name][0], lambda x, name=name: _STANDARD[name][2](*_STANDARD[name][1](x))) for name in _COPIED],
    (collections.defaultdict, lambda x: collections.defaultdict(None, dict.items(x))),
    (dict, lambda x: dict(dict.items(x))),
]
DATA_BASES = tuple(kind for kind, _ in _BASES)


def base(x: object) -> object:
    """The plain value inside an object of a subclass of a data type, such as the number of an IntEnum's member."""
    return next(value for kind, value in _BASES if isinstance(x, kind))(x)


# Builtin classes that are no data: objects of them are what they are to `isinstance` in the tests, too.
# No coroutines: asyncio would send to them. As what can only be awaited they run to their end over there.
_BUILTIN = (enumerate, filter, map, reversed, zip, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
BUILTIN = {x.__name__: x for x in (*_BUILTIN, types.GeneratorType, types.AsyncGeneratorType, types.ModuleType)}
KINDS = "isgeneratorfunction iscoroutinefunction isasyncgenfunction iscoroutine".split()  # functions of inspect
_COMPARISONS = "__eq__ __ne__ __lt__ __le__ __gt__ __ge__".split()


def like(cls: type) -> str:
    """The name of the class that `isinstance` takes objects of this one for: a builtin one, or a data type.

    A class that compares in its own way is not a data type: a test that asks for `int` goes on to compare.
    """
    if cls.__name__ in BUILTIN:
        return cls.__name__ * (BUILTIN[cls.__name__] is cls)
    bases = (x for x in DATA_BASES if issubclass(cls, x))
    return next((x.__name__ for x in bases if all(getattr(cls, n) is getattr(x, n) for n in _COMPARISONS)), "")


def is_type(x: object) -> bool:
    """Whether it is one of the types that are data."""
    return type(x) is type and _TYPES.get(x.__name__) is x


def joined(parts: Sequence[bytes]) -> bytes:
    """A list of values that `encode` has written."""
    return b"".join((b"l", struct.pack(">I", len(parts)), *parts))


def encode(value: object, other: Callable[[object], tuple], max_bytes: int, max_values: int) -> bytes:
    """Write `value` as bytes.

    Data are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict, the types in _STANDARD,
    and all these types themselves. Types are exact: an object of a subclass of int is not an int. Every other object is
    written as the values that `other` gives for it. A value is a letter, a 4-byte size, and that many bytes or values.

    Raises:
        ValueError: nested deeper than MAX_DEPTH, or more bytes or values than allowed.
    """
    parts: list[bytes] = []
    left = [max_bytes, max_values]

    def put(tag: bytes, size: int, payload: bytes = b"", values: int = 1) -> None:
        left[0] -= 5 + len(payload)
        left[1] -= values
        if min(left) < 0:
            raise ValueError(f"too long to cross: more than {max_bytes} bytes or {max_values} values")
        parts.append(tag + struct.pack(">I", size) + payload)

    def write(x: object, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
        kind, items = type(x), ()
        if kind in _SCALARS:
            tag, to_bytes, _ = _SCALARS[kind]
            payload = to_bytes(x)
            put(tag, len(payload), payload)
        elif is_type(x):
            payload = x.__name__.encode()
            put(b"y", len(payload), payload)
        elif kind is dict:
            put(b"d", len(x))
            items = chain.from_iterable(x.items())
        elif kind is not list or len(x) < _SHORT or not write_array(x):
            if kind in _TAGS:
                tag, items = _TAGS[kind], x
            elif kind in _NAMES and (values := _STANDARD[_NAMES[kind]][1](x)) is not None:
                tag, items = b"o", (_NAMES[kind], *values)
            else:
                tag, items = b"h", other(x)
            put(tag, len(items))
        for item in items:
            write(item, depth + 1)

    def write_array(x: list) -> bool:
        """Whether the list holds small integers only, or floats only, and was written."""
        tag, code = _ARRAYS.get(type(x[0]), (b"", ""))
        if not tag or len(set(map(type, x))) > 1:
            return False
        try:
            payload = array.array(code, x).tobytes()
        except OverflowError:
            return False
        put(tag, len(payload), payload, len(x))
        return True

    write(value, 0)
    return b"".join(parts)


def decode(message: bytes, other: Callable[..., object], max_values: int) -> object:
    """Read what `encode` wrote, from anybody: builds nothing but plain data and what `other` returns for an object.

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
        if tag == b"h":
            return other(*[read(depth + 1) for _ in range(size)])
        if tag == b"o":
            name, *parts = [read(depth + 1) for _ in range(size)]
            return _STANDARD[name][2](*parts)
        payload = message[at : at + size]
        at += size
        values += size // 8 if tag in (b"I", b"F") else 0
        if len(payload) != size or values > max_values:
            raise ValueError("malformed message")
        return _READ[tag](payload)

    try:
        value = read(0)
    except (struct.error, TypeError, LookupError, ArithmeticError, AttributeError, OSError) as error:
        raise ValueError("malformed message") from error  # wrong width, a list in a set, unknown names, no such date
    if at != len(message):
        raise ValueError("malformed message")
    return value


def send(peer: BinaryIO, message: bytes, thread: int = 0) -> None:
    """Write one message, of the thread of the tests with that number; raises OSError when the other end is closed."""
    data = memoryview(struct.pack(">II", len(message), thread) + message)
    while data:
        data = data[os.write(peer.fileno(), data) :]


def receive(peer: BinaryIO) -> tuple[bytes, int]:
    """One message, and its thread's number.

    Raises OSError or EOFError if the other end is closed, or announces a longer message than is allowed.
    """
    header = peer.read(8)
    size, thread = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
    message = peer.read(size) if size <= MAX_MESSAGE else b""
    if len(header) < 8 or len(message) < size:
        raise EOFError
    return message, thread
