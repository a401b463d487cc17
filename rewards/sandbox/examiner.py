"""The test process in the sandbox: run the asserts, and ask the candidate's process for what they call.

This process knows the expected values. It is locked up as the candidate's is, since what a test does with an answer can
use up time and memory. What is not plain data stays in the candidate's process; the tests get a stand-in, whose class
stands for the object's class and passes on what is done to it. A stand-in never gives the tests a special attribute
(`__annotations__`, `__reduce__`): such texts get evaluated.
"""

import asyncio
import collections
import contextlib
import importlib
import marshal
import os
import sys
import types
import unittest
from _collections_abc import Callable, Iterator
from itertools import zip_longest
from typing import BinaryIO

from rewards.sandbox import candidate, wire

_SAFE = ("__name__", "__qualname__", "__doc__", "__dict__", "__module__")  # special attributes that can be asked for


class Ended(Exception):
    """StopIteration out of anything but `next`: as itself, it would end a loop of the tests as if nothing was wrong."""

    value = property(lambda self: self.args[0] if self.args else None)


class _State:
    """What the test process knows of an object of the candidate's."""

    def __init__(self, number: int):
        self.number = number
        self.data: object = None  # a snapshot: the fields of a dataclass, or the data in an object of a data type
        self.clock = -1  # when that was taken
        self.made: tuple | None = None  # the arguments, if a test made the object
        self.odd = False  # it does not hold them
        self.status, self.text, self.skips = "fail", "", False  # of an exception; skips: an assert, in a with statement


class _Stand:
    """A stand-in for an object of the candidate's; subclasses have the methods that the object's class has.

    It equals itself, and what it is by its data: a number of an IntEnum is that number, and objects of a dataclass are
    equal if their fields are. Its own == decides only where the data set says so (`own_eq`).
    """

    __slots__ = ("_glassrl",)


def _state(x: object) -> _State | None:
    """What is known of a stand-in; None if it is none. Exceptions of the candidate's are no stand-ins but have it."""
    if isinstance(x, BaseException):
        return vars(x).get("_glassrl")
    return x._glassrl if isinstance(x, _Stand) else None


def _passed_on(name: str) -> Callable[..., object]:
    """A method that the candidate's process carries out."""
    return lambda self, *arguments: _candidate.ask(name, self, *arguments)


class _Kind(type):  # a class of the candidate's, as the tests see it
    __doc__ = property(lambda cls: _candidate.attribute(cls, "__doc__"))
    __setattr__, __getitem__, __len__, __repr__ = map(_passed_on, ("setattr", "getitem", "len", "repr"))

    def __call__(cls, *args, **kwargs):
        return _candidate.call(cls, args, kwargs)

    def __getattr__(cls, name):
        return _candidate.attribute(cls, name)

    def __instancecheck__(cls, x):
        return type(x) is cls or isinstance(type(x), _Kind) and _candidate.ask("isinstance", x, cls)

    def __subclasscheck__(cls, x):
        return isinstance(x, _Kind) and _candidate.ask("issubclass", x, cls)

    def __iter__(cls):
        return _items(_candidate.ask("iter", cls))

    def __bool__(cls):
        return True


def _items(iterator: object) -> Iterator[object]:
    """The items of an iterator of the candidate's, one question each."""
    while True:
        try:
            item = _candidate.ask("next", iterator)
        except StopIteration:
            return
        yield item


_COMPARING = "lt le gt ge sub mod divmod floordiv".split()


def _operator(name: str, swapped: bool = False) -> Callable[[object, object], object]:
    """A method for a binary operator.

    The candidate's class decides if the tests name a class of its own; else the data in the objects does. Otherwise
    `abs(f(x) - 3) < 1e-6` would hold for an object whose difference to anything is 0. So where other data is compared
    with an object, or the distance to it taken, the candidate's class decides only if its == does, too.
    """

    def method(self: object, other: object) -> object:
        pair = (other, self) if swapped else (self, other)
        compares = name in _COMPARING and not isinstance(type(other), _Kind)
        if _candidate.own_eq or _candidate.objects and not compares:
            return _candidate.ask(name, *pair)
        if _bits(self) & candidate.IS_DATA:
            return candidate._OPERATIONS[name](*map(_plain, pair))
        return NotImplemented

    return method


def _function(name: str) -> Callable[..., object]:
    """A method for what Python asks of an object that it takes for a number: the same rule."""

    def method(self: object, *arguments: object) -> object:
        if _candidate.objects and name != "hash":
            return _candidate.ask(name, self, *arguments)
        if _bits(self) & candidate.IS_DATA:
            return candidate._OPERATIONS[name](_plain(self), *arguments)
        raise TypeError(f"{type(self).__name__!r} object is not a number")

    return method


def _bits(x: object) -> int:
    return vars(type(x)).get("_glassrl_bits", 0) if isinstance(type(x), _Kind) else 0


def _data(x: _Stand) -> object:
    """The data in an object: what came with it, unless the candidate's code has run since and may have changed it."""
    if x._glassrl.clock < _candidate.clock:
        _candidate.ask("same", [x])
    return x._glassrl.data


def _plain(x: object) -> object:
    """The data in an object of a subclass of a data type; everything else as it is."""
    return _data(x) if _bits(x) & candidate.IS_DATA else x


def _compared(x: _Stand, names: set[str]) -> dict[str, object]:
    """Fields of a dataclass's object: those that == looks at, and these."""
    names = names | {name for name, _, compare in vars(type(x))["_glassrl_fields"] if compare}
    return {name: value for name, value in (_data(x) or {name: x for name in names}).items() if name in names}


def _equal(self: object, other: object) -> bool:
    if _candidate.own_eq:
        return self is other or bool(_candidate.ask("eq", self, other))
    states = [x._glassrl for x in (self, other) if isinstance(x, _Stand)]
    if any(state.odd for state in states):
        return False
    if self is other:
        return True
    if (_bits(self) | _bits(other)) & candidate.IS_DATA:
        return _plain(self) == _plain(other)
    if type(self) is type(other) and _bits(self) & candidate.HAS_FIELDS:
        given = set().union(*(_given(type(self), *state.made) for state in states if state.made))
        return _compared(self, given) == _compared(other, given)
    return False


def _given(cls: type, args: tuple, kwargs: dict) -> dict[str, object]:
    """The fields that these arguments give an object of a dataclass."""
    names = [name for name, positional, _ in vars(cls)["_glassrl_fields"] if positional]
    return dict(zip_longest(names[: len(args)], args)) | kwargs


def _keeps(x: object, args: tuple, kwargs: dict) -> bool:
    """Whether an object that a test has just made, as in `f(2) == Point(4, 6)`, holds what it was given.

    Objects of a class that ignores its arguments would be equal to every expected one.
    """
    value = x._glassrl.data if isinstance(x, _Stand) else x
    if _bits(x) & candidate.HAS_FIELDS:
        given = _given(type(x), args, kwargs)
        return value is not None and all(name in value and value[name] == given[name] for name in given)
    if type(value) is tuple:  # a named tuple, or one that is made of one iterable
        given = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
        return value[: len(given)] == tuple(given) and all(item in value for item in kwargs.values())
    try:
        return type(value)(*args, **kwargs) == value
    except (TypeError, ValueError):
        return False


def _hash(self: object) -> int:
    if _candidate.own_eq:
        return _candidate.ask("hash", self)
    if _bits(self) & candidate.IS_DATA:
        return hash(_plain(self))
    if _bits(self) & candidate.HAS_FIELDS:
        return hash(tuple(_compared(self, set()).values()))
    return object.__hash__(self)


def _length(self: object) -> int:
    length = _candidate.ask("len", self)
    if type(length) is not int or length > wire.MAX_ANSWER_VALUES:
        raise TypeError("no length, or a long one")  # list() reserves that much memory
    return length


def _iterate(self: object) -> Iterator[object]:
    if _bits(self) & candidate.METHOD_BITS["__next__"]:
        return self
    if _bits(self) & candidate.IS_DATA and not _candidate.objects:
        return iter(_plain(self))
    return _items(_candidate.ask("iter", self))


def _contains(self: object, item: object) -> bool:
    """As for operators, the candidate's class decides only if the tests name one; else its items do."""
    if _candidate.objects:
        return bool(_candidate.ask("contains", self, item))
    return any(item is x or item == x for x in self)


def _leave(self: object, kind: type | None, error: BaseException | None, trace: object) -> bool:
    """The end of a with statement: the candidate's class may end its own exceptions there, if they skip no assert."""
    if _state(error):
        return bool(_candidate.ask("exit", self, error)) and not _state(error).skips
    _candidate.ask("exit", self, None)
    return False


def _await(self: object) -> Iterator[object]:
    """The candidate's coroutines run to their end in its process, one at a time."""
    return _candidate.ask("run", self)
    yield


# What a stand-in's class gets: always, or if the object's class has the method.
_ALWAYS = {
    "__eq__": _equal,
    "__hash__": _hash,
    "__bool__": lambda self: bool(_candidate.ask("bool", self)),
    "__getattr__": lambda self, name: _candidate.attribute(self, name),
    "__deepcopy__": lambda self, memo: _candidate.ask("deepcopy", self),
    "__doc__": property(lambda self: _candidate.attribute(self, "__doc__")),
    **{f"__{name}__": _passed_on(name) for name in "str repr format setattr delattr copy".split()},
    **{f"__{name}__": _operator(name) for name in f"lt le gt ge divmod {candidate.BINARY}".split()},
    **{f"__r{name}__": _operator(name, swapped=True) for name in f"divmod {candidate.BINARY}".split()},
    **{
        f"__{name}__": _function(name) for name in f"{candidate.UNARY} int float complex round floor ceil trunc".split()
    },
}
_IN_PLACE = {f"__i{name}__": _operator(f"i{name}") for name in candidate.BINARY.split()}
_BY_METHOD = {
    "__call__": lambda self, *args, **kwargs: _candidate.call(self, args, kwargs),
    "__iter__": _iterate,
    "__len__": _length,
    "__contains__": _contains,
    "__reversed__": lambda self: _items(_candidate.ask("reversed", self)),
    "__await__": _await,
    "__exit__": _leave,
    **{f"__{name}__": _passed_on(name) for name in "next getitem setitem delitem bytes enter".split()},
}
_LOOKS = ("same", "isinstance", "issubclass", "getattr", "hash", "len", "bool", "str", "repr")  # change nothing


class Candidate:
    """The candidate's process, asked through a socket; what it answers is data and stand-ins.

    Args:
        process: the socket.
        end: called with ("gone" or "bad", why), does not return: the process is of no further use, or the tests are.
        objects: the tests name a class of the candidate's, so its operators decide.
        own_eq: its == decides.
        in_place: every call gives its arguments back as it left them, not only one that returns None.
    """

    def __init__(self, process: BinaryIO, end: Callable, objects: bool, own_eq: bool, in_place: bool):
        self.process, self.end, self.objects, self.own_eq, self.in_place = process, end, objects, own_eq, in_place
        self.operation, self.answered = "", False  # answered: in the current test, so it may depend on the candidate
        self.kinds: dict[int, _Kind] = {}
        self.stands: dict[int, object] = {}
        self.clock = 0  # goes on when the candidate's code may have changed objects
        self.making = False  # a test makes an object, and may compare an answer with it: no other's data may change
        self.new: set[int] = set()  # objects of the current answer that were not known before

    def exchange(self, message: object) -> object:
        """Send a message, return the value of the answer, or raise what the candidate's code raised."""
        limit = wire.MAX_MESSAGE
        try:
            wire.send(self.process, wire.encode(message, self._number, limit, limit))
            answer = wire.receive(self.process)
        except (EOFError, OSError):
            self.end("gone", "")
        self.answered, self.new = True, set()
        try:
            plain = answer[:1] == b"="
            answer = wire.decode(answer[plain:], self._stand, 2 * wire.MAX_ANSWER_VALUES)
            if plain:
                return answer
            _, snapshots, kind, value, changed, printed = answer
            for number, data in snapshots:
                self._take(number, data)
            sys.stdout.write(printed)
            if kind != "value":
                error, text = value
                _state(error).status, _state(error).text = "memory" if kind == "memory" else "fail", str(text)
        except (ValueError, TypeError, LookupError, AttributeError):
            self.end("gone", "the answer is malformed")
        if kind != "value":
            if isinstance(error, StopIteration) and self.operation != "next":
                raise Ended(*error.args)
            raise error
        if changed is not None and self.operation == "call" and (value is None or self.in_place):
            _restored(tuple(message[2:]), changed)
        return value

    def _take(self, number: int, data: object) -> None:
        """Keep the data in an object, which came with an answer."""
        x = self.stands[number]
        state = _state(x)
        if self.making and number not in self.new:
            return
        state.data, state.clock = data, self.clock
        if isinstance(x, BaseException):
            args, names = data
            vars(x).update(names, _glassrl=state)
            with contextlib.suppress(TypeError):  # sets what the builtin class has beside args
                x.__init__(*args)
            if isinstance(x, OSError) and len(args) == 3:
                x.errno, x.strerror, x.filename = args
                args = args[:2]
            x.args = args

    def ask(self, operation: str, *arguments: object) -> object:
        """One of candidate.py's operations on the candidate's objects."""
        self.operation = operation
        if operation not in _LOOKS and not self.making:
            self.clock += 1
        return self.exchange([operation, *arguments])

    def attribute(self, x: object, name: str) -> object:
        if name.startswith("__") and name.endswith("__") and name not in _SAFE or name.startswith("_glassrl"):
            raise AttributeError(name)
        return self.ask("getattr", x, name)

    def call(self, function: object, args: tuple, kwargs: dict) -> object:
        if not isinstance(function, _Kind) or issubclass(function, BaseException):
            return self.ask("call", function, list(args), kwargs)
        # What the candidate reads here may be what an answer is to be equal to. So first what changed is asked for, of
        # objects that somebody holds beside this loop.
        old = [x for x in self.stands.values() if isinstance(x, _Stand) and sys.getrefcount(x) > 3]
        old = [x for x in old if x._glassrl.data is not None and x._glassrl.clock < self.clock]
        if old:
            self.ask("same", old)
        self.making = True
        try:
            result = self.ask("call", function, list(args), kwargs)
        finally:
            self.making = False
        state, given = _state(result), (args, kwargs)
        if not any(given):
            return result
        if state is None:
            if not _keeps(result, args, kwargs):
                raise TypeError(f"{function!r} gives data that is not what it was given")
        elif isinstance(result, _Stand):
            if not _bits(result) & (candidate.IS_DATA | candidate.HAS_FIELDS):
                state.odd = state.number not in self.new and state.made != given  # it equals nothing, but it is itself
            elif not _keeps(result, args, kwargs):
                if state.number not in self.new:  # the answer that it was before is not what this is
                    result = self._new(type(result), state.number)
                result._glassrl.odd = True
            result._glassrl.made = given
        return result

    def refuse(self, problem: str) -> None:
        """The tests cannot be used. What depends on an answer of the candidate's is not said to be their fault."""
        if not self.answered:
            self.end("bad", problem)
        raise TypeError(problem)

    def _number(self, x: object) -> tuple[int]:
        if isinstance(x, _Kind):
            return (vars(x)["_glassrl_class"],)
        state = _state(x)
        if state is None:
            self.refuse(f"a test hands the candidate an object of type {type(x).__name__}: only plain data can cross")
        if self.operation not in ("same", "hash", "isinstance"):  # these only look
            state.odd = False
        return (state.number,)

    def _stand(self, number: int, kind: tuple | type = (), own: tuple | None = None) -> object:
        """The stand-in for an object that an answer names; the same one each time. A new one comes with its class."""
        if own is not None:
            return self._kind(*own)
        if kind and number not in self.stands:
            self.new.add(number)
            cls = self._kind(*kind) if isinstance(kind, tuple) else _exception(kind)
            self.stands[number] = self._new(cls, number)
        return self.kinds[number] if number in self.kinds else self.stands[number]

    @staticmethod
    def _new(cls: type, number: int) -> object:
        stand = cls.__new__(cls)
        object.__setattr__(stand, "_glassrl", _State(number))
        return stand

    def _kind(self, number: int, name: str, bits: int, parents: tuple, fields: tuple) -> _Kind:
        """The class that stands for one of the candidate's."""
        if number in self.kinds:
            return self.kinds[number]
        if (type(number), type(name), type(bits)) != (int, str, int):
            raise ValueError("malformed message")
        bases = tuple(self._kind(*base) if isinstance(base, tuple) else _exception(base) for base in parents)
        space = {"_glassrl_bits": bits, "_glassrl_class": number, "_glassrl_fields": fields}
        if bases:
            space |= {"__getattr__": _ALWAYS["__getattr__"], "__str__": _text}
        else:
            bases = (_Stand,)
            space |= {"__slots__": (), **_ALWAYS, **(_IN_PLACE if self.objects else {})}
            space |= {name: _BY_METHOD[name] for name, bit in candidate.METHOD_BITS.items() if bits & bit}
        try:
            kind = _Kind(name if name.isidentifier() else "Object", bases, space)
        except TypeError:  # bases that do not go together
            kind = _Kind("Object", (Exception,), space)
        self.kinds[number] = kind
        return kind


def _exception(cls: type) -> type:
    """A builtin class of exceptions; of groups there are none, since they need arguments."""
    if not issubclass(cls, BaseException):
        raise ValueError("malformed message")
    return Exception if issubclass(cls, BaseExceptionGroup) else cls


def _text(error: BaseException) -> str:
    return _state(error).text or _candidate.ask("str", error)


def _restored(old: object, new: object) -> object:
    """What stands in the place of an argument after a call: itself if it can be, with the contents that it has then."""
    if type(old) is not type(new) or not isinstance(old, (tuple, *wire.MUTABLE)):
        return new
    if isinstance(old, list | tuple) and len(old) == len(new):
        new = type(new)(_restored(a, b) for a, b in zip(old, new, strict=True))
    elif isinstance(old, dict):
        new = {key: _restored(old.get(key), value) for key, value in new.items()}
    if isinstance(old, tuple):
        return old if old == new else new
    if isinstance(old, types.SimpleNamespace):
        _restored(vars(old), vars(new))
    elif isinstance(old, dict | set | collections.deque):
        old.clear()
        (old.extend if isinstance(old, collections.deque) else old.update)(new)
    else:  # list, bytearray, array
        old[:] = new
    return old


# === the tests ===

_candidate: Candidate  # set once, by `serve`


def serve(reports: int, fd: int, problem: str) -> None:
    """Wait for the job, load the candidate's code and the setup, then run one test after the other; does not return.

    Args:
        reports: where the job comes from, in packets up to an empty one, and what became of it goes, a packet each:
            ("loaded", ""), then for each test (status, why). At another place: ("error", "memory" or "fail", why): the
            code does not load; "bad": the tests are wrong, whatever the code is; "gone": the candidate's process ended
            or broke the protocol; "broken": it could not be locked up.
        fd: the socket to the candidate's process.
        problem: why this process could not be locked up, if so.
    """
    global _candidate

    def report(kind: str, why: str) -> None:
        os.write(reports, wire.encode([kind, why[:4000]], lambda x: (), 1 << 15, 3))

    def end(kind: str, why: str) -> None:
        report(kind, why)
        os._exit(0)

    job = marshal.loads(b"".join(iter(lambda: os.read(reports, wire.MAX_PACKET), b"")))
    process = open(fd, "rb")
    try:
        problem = problem or wire.receive(process).decode()
    except (EOFError, OSError):
        problem = "it ended"
    if problem:
        end("broken", f"could not lock a process up: {problem}")
    _candidate = Candidate(process, end, job["objects"], job["own_eq"], job["in_place"])
    run = asyncio.run
    asyncio.run = lambda main, **options: _candidate.ask("run", main) if _state(main) else run(main, **options)

    try:
        found = _candidate.exchange([job["code"], job["names"], job["capture"], job["in_place"]])
        if type(found) is not dict or not found.keys() <= set(job["names"]):
            end("gone", "the answer is malformed")
    except BaseException as error:
        end("memory" if _status(error) == "memory" else "error", _why(error))
    _candidate.answered = False
    sys.modules["tests"] = types.ModuleType("tests")  # unittest and dataclasses look their module up
    space = vars(sys.modules["tests"])
    space |= {name: importlib.import_module(name) for name in job["modules"]} | found
    space |= {"__assert_held__": _holds, "__caught__": _caught, "__skips__": _skips, "__ended__": Ended}
    space["__refuse__"] = _candidate.refuse
    try:
        exec(job["setup"], space)
    except BaseException as error:
        if job["setup_uses_candidate"]:
            end(_status(error), f"setup: {_why(error)}")
        end("bad", f"setup code raises {_why(error)}")
    report("loaded", "")
    for test in job["tests"]:
        _held.clear()
        _candidate.answered = False
        try:
            exec(test, dict(space))
        except BaseException as error:
            report(_status(error), _why(error))
        else:
            report("pass" if _held else "fail", "" if _held else "no assert was reached")
    os._exit(0)


def _status(error: BaseException) -> str:
    return _state(error).status if _state(error) else "fail"


def _why(error: BaseException) -> str:
    """An exception in words; the text of one that a test raised may hold a stand-in, whose str() is a question."""
    texts = [_state(error).text] if _state(error) else [x for x in error.args if type(x) is str]
    return f"{type(error).__name__}: {texts[0]}" if texts else type(error).__name__


def _caught() -> None:
    """At the start of each handler for all exceptions: a failed assert of the tests' own is not to be swallowed."""
    error = sys.exc_info()[1]
    if type(error) is AssertionError and not _state(error):
        raise error


def _skips() -> None:
    """In a with statement, where an exception skips an assert."""
    if state := _state(sys.exc_info()[1]):
        state.skips = True


_held: list[bool] = []  # asserts of the current test that held


def _holds() -> None:
    _held.append(True)


def count_checks() -> None:
    """From now on unittest's checks count as asserts."""

    def counted(check: Callable[..., object]) -> Callable[..., object]:
        def method(*args: object, **kwargs: object) -> object:
            result = check(*args, **kwargs)
            _holds()
            return result

        return method

    for name in [name for name in dir(unittest.TestCase) if name.startswith("assert")]:
        setattr(unittest.TestCase, name, counted(getattr(unittest.TestCase, name)))
