"""The test process in the sandbox: run the asserts, and ask the candidate's process for what they call.

This process knows the expected values. It is locked up as the candidate's is, since what a test does with an answer can
use up time and memory. What is not plain data stays in the candidate's process; the tests get a stand-in, whose class
stands for the object's class and passes on what is done to it. A stand-in never gives the tests a special attribute
(`__annotations__`, `__reduce__`): such texts get evaluated.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import marshal
import os
import queue
import sys
import threading
import types
import unittest
from _collections_abc import Callable, Iterator

from rewards.sandbox import candidate, wire

_SAFE = ("__name__", "__qualname__", "__doc__", "__dict__", "__module__")  # special attributes that can be asked for


class Ended(Exception):
    """StopIteration out of anything but `next`: as itself, it would end a loop of the tests as if nothing was wrong."""

    value = property(lambda self: self.args[0] if self.args else None)


class _State:
    """What the test process knows of an object of the candidate's.

    An object has a new state when a test makes it by other arguments than before, as with a class that always gives the
    same object. It also has one when it is an answer although a test made it and never handed it over. Its last state
    is the current one; the data of the others stays what it was.

    Attributes:
        stand, made: the stand-ins for the object as an answer, and as a test made it.
        data: a snapshot: the fields of a dataclass, or the data in an object of a data type.
        clock: when that was taken.
        odd: [data] of an object that does not hold what it was given.
        given: the arguments, if a test made the object with some.
        handed: such an object to the candidate, which may have changed it since.
        frozen: its data changed while a test made another object, and counts as it was before.
        status, text, skips: of an exception; skips: an assert, in a with statement.
    """

    def __init__(self, number: int):
        self.number, self.stand, self.made = number, None, None
        self.data, self.clock, self.odd = None, -1, []
        self.given, self.handed, self.frozen = None, False, False
        self.status, self.text, self.skips = "fail", "", False

    def live(self) -> bool:
        """Whether calls of the candidate's may have changed the object's data."""
        current = _candidate.states[self.number] is self
        return current and not self.frozen and (self.given is None or self.handed)

    def held(self) -> bool:
        """Whether anybody has one of the stand-ins beside this object and the caller."""
        return sys.getrefcount(self.stand) > 2 or sys.getrefcount(self.made) > 2 and self.made is not None


class _Stand:
    """A stand-in for an object of the candidate's; subclasses have the methods that the object's class has.

    It equals what has the same state, and what it is by its data: a number of an IntEnum is that number, and objects of
    a dataclass are equal if their fields are. Its own == decides only where the data set says so (`own_eq`).
    """

    __slots__ = ("_glassrl", "_glassrl_made")  # what is known of it; whether a test made it


def _state(x: object) -> _State | None:
    """What is known of a stand-in; None if it is none. Exceptions of the candidate's are no stand-ins but have it."""
    own = vars(x) if isinstance(x, BaseException) else {}
    return x._glassrl if isinstance(x, _Stand) else own.get("_glassrl")


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

    def __iter__(cls):
        return _items(_candidate.ask("iter", cls))

    def __bool__(cls):
        return True

    def __instancecheck__(cls, x):
        return type(x) is cls or isinstance(type(x), _Kind) and _candidate.ask("isinstance", x, cls)

    def __subclasscheck__(cls, x):
        return isinstance(x, _Kind) and _candidate.ask("issubclass", x, cls)


def _items(iterator: object) -> Iterator[object]:
    """The items of an iterator of the candidate's, one question each."""
    with contextlib.suppress(StopIteration):
        while True:
            yield _candidate.ask("next", iterator)


def _decides(self: object, *others: object) -> bool:
    """Whether the candidate's class decides what an operator does: where only objects of its classes take part.

    Other data takes part only with an object that the test has made, as in `V(3, 4) * 2`. What the candidate returned
    does not get it: it may be what the answer is to be, and `abs(area() / 12.56 - 1) < 1e-9` would hold for an object
    whose quotient is always 1. The tests must name a class of the candidate's, or the data set give its == the word.
    """
    stands = all(isinstance(other, _Stand | _Kind) for other in others)
    return _candidate.own_eq or self._glassrl_made or stands and _candidate.objects


def _operator(name: str, swapped: bool = False) -> Callable[..., object]:
    """A method for an operator: the candidate's class decides where it may, else the data in the objects does."""

    def method(self: object, *others: object) -> object:
        operands = (*others, self) if swapped else (self, *others)
        if _decides(self, *others):
            result = _candidate.ask(name, *operands)
            return self if name in _IN_PLACE and _state(result) is self._glassrl else result
        if _bits(self) & candidate.IS_DATA:
            return candidate._OPERATIONS[_IN_PLACE.get(name, name)](*map(_plain, operands))
        raise TypeError(f"{name}: an object that was returned, and other data, without own_eq")

    return method


def _bits(x: object) -> int:
    return vars(type(x)).get("_glassrl_bits", 0) if isinstance(type(x), _Kind) else 0


def _data(x: _Stand) -> object:
    """The data in an object: what came with it, unless the candidate's code has run since and may have changed it."""
    state = x._glassrl
    if state.clock < _candidate.clock and state.live():
        _candidate.ask("same", [x])
    return state.data


def _itself(x: object) -> object:
    """What stands for the same object as this stand-in, whoever made it."""
    return _candidate.states[_state(x).number].stand if _state(x) else x


def _plain(x: object) -> object:
    """The data in an object of a subclass of a data type; everything else as it is."""
    return _data(x) if _bits(x) & candidate.IS_DATA else x


def _compared(x: _Stand, given: set[str]) -> dict[str, object]:
    """Fields of a dataclass's object: those that == looks at; if it looks at none, all those that a test gave.

    Of an object of another class all attributes count, and one whose attributes are not known is like itself only.
    """
    if _bits(x) & candidate.IS_PLAIN:
        return _data(x) or {"": x}
    names = {name for name, _, compare, _ in vars(type(x))["_glassrl_fields"] if compare}
    if given and not given & names:
        names |= given
    return {name: value for name, value in (_data(x) or {name: x for name in names}).items() if name in names}


def _equal(self: object, other: object) -> bool:
    """What == says, by the rules that README.md of this folder has under "Equality".

    The == of a class that is not a dataclass is asked only about objects whose attributes are equal, so it can deny
    that they are equal but cannot make them so.
    """
    if self is other:
        return True
    if _candidate.own_eq:
        return bool(_candidate.ask("eq", self, other))
    stands = [x for x in (self, other) if isinstance(x, _Stand)]
    plain, same = _bits(self) & candidate.IS_PLAIN, _state(self) is _state(other)
    if plain and (same or any(x._glassrl_made and not x._glassrl.given for x in stands)):
        return same
    if any(x._glassrl.odd and [_data(x)] == x._glassrl.odd for x in stands):
        return False
    if (_bits(self) | _bits(other)) & candidate.IS_DATA:
        return _plain(self) == _plain(other)
    if type(self) is type(other) and _bits(self) & candidate.HAS_FIELDS:
        given = set().union(*(_given(type(x), *x._glassrl.given) for x in stands if x._glassrl.given))
        equal = _compared(self, given) == _compared(other, given)
        return equal and (not plain or bool(_candidate.ask("eq", self, other)))
    return same


def _given(cls: type, args: tuple, kwargs: dict) -> dict[str, object]:
    """The fields that these arguments give an object of a dataclass."""
    names = [name for name, positional, _, _ in vars(cls)["_glassrl_fields"] if positional]
    return dict(zip((names + [None] * len(args))[: len(args)], args, strict=True)) | kwargs


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
    with contextlib.suppress(TypeError, ValueError):
        return type(value)(*args, **kwargs) == value
    return False


def _hash(self: object) -> int:
    if _candidate.own_eq or _bits(self) & candidate.IS_PLAIN:
        return _candidate.ask("hash", self)
    if _bits(self) & candidate.IS_DATA:
        return hash(_plain(self))
    if _bits(self) & candidate.HAS_FIELDS:
        return hash(tuple(_compared(self, set()).values()))
    return hash(self._glassrl.number)


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
    """As for operators, the candidate's class decides where it may; else its items do."""
    if _decides(self, item):
        return bool(_candidate.ask("contains", self, item))
    return any(item is x or item == x for x in self)


def _leave(self: object, kind: type | None, error: BaseException | None, trace: object) -> bool:
    """The end of a with statement: the candidate's class may end its own exceptions there, if they skip no assert."""
    state = _state(error)
    ends = _candidate.ask("exit", self, error if state else None)
    return bool(state and ends and not state.skips)


def _await(self: object) -> Iterator[object]:
    """The candidate's coroutines run to their end in its process, one at a time."""
    return _candidate.ask("run", self)
    yield


_OTHERS = "lt le gt ge divmod int float complex round floor ceil trunc"
# What a stand-in's class gets: always, or if the object's class has the method.
_ALWAYS = {
    "__eq__": _equal,
    "__hash__": _hash,
    "__bool__": lambda self: bool(_candidate.ask("bool", self)),
    "__getattr__": lambda self, name: _candidate.attribute(self, name),
    "__deepcopy__": lambda self, memo: _candidate.ask("deepcopy", self),
    "__doc__": property(lambda self: _candidate.attribute(self, "__doc__")),
    **{f"__{name}__": _passed_on(name) for name in "str repr format setattr delattr copy".split()},
    **{f"__{name}__": _operator(name) for name in f"{candidate.BINARY} {candidate.UNARY} {_OTHERS}".split()},
    **{f"__r{name}__": _operator(name, swapped=True) for name in f"divmod {candidate.BINARY}".split()},
}
_IN_PLACE = {f"i{name}": name for name in candidate.BINARY.split()}
_BY_METHOD = {
    "__call__": lambda self, *args, **kwargs: _candidate.call(self, args, kwargs),
    "__iter__": _iterate,
    "__len__": _length,
    "__contains__": _contains,
    "__reversed__": lambda self: _items(_candidate.ask("reversed", self)),
    "__await__": _await,
    "__exit__": _leave,
    **{f"__{name}__": _passed_on(name) for name in "next aiter anext getitem setitem delitem bytes enter".split()},
}
_LOOKS = "same eq isinstance issubclass getattr hash len bool str repr threads".split() + wire.KINDS  # no changes


class Candidate:
    """The candidate's process, asked through a socket; what it answers is data and stand-ins.

    Args:
        process: the socket.
        end: called with ("gone" or "bad", why), does not return: the process is of no further use, or the tests are.
        objects: the tests name a class of the candidate's, so its operators decide.
        own_eq: its == decides.
        in_place: every call gives its arguments back as it left them, not only one that returns None.

    Attributes:
        answered: in the current test, so it may depend on the candidate.
        shared: between threads, for all of which one reads.
        clock: goes on when the candidate's code may have changed objects.
        classes: those of the candidate's that the tests name.
        kinds, states: by the number of a class, and of an object its current one.
        watched: {state: data} of objects that the making of others may not change.
        asked: {number of a thread of the tests: the _Asked that it waits for}.
        threads: {identity of a thread of the tests: its number}.
    """

    def __init__(self, process: wire.BinaryIO, end: Callable, objects: bool, own_eq: bool, in_place: bool):
        self.process, self.end, self.objects, self.own_eq, self.in_place = process, end, objects, own_eq, in_place
        self.answered, self.shared, self.clock = False, False, 0
        self.classes: list[_Kind] = []
        self.kinds, self.states, self.watched, self.asked = {}, {}, {}, {}
        self.threads, self.start = {threading.get_ident(): 0}, threading.Thread.start
        self.lock = threading.RLock()  # a test's own stdout may ask, too

    def start_thread(self, thread: threading.Thread) -> None:
        """`Thread.start`. From then on each thread has its own in the candidate's process, and may wait for another."""
        if not self.shared:
            self.ask("threads")
            self.shared = True
            self.start(threading.Thread(target=candidate.repeat, args=(self._read,), daemon=True))
        self.start(thread)

    def exchange(self, message: object, asked: "_Asked") -> object:
        """Send a message, return the value of the answer, or raise what the candidate's code raised."""
        with self.lock:  # if only one thread is known of, until the answer is there
            thread = self.threads.setdefault(threading.get_ident(), len(self.threads))
            limit = wire.MAX_MESSAGE
            data = wire.encode(message, functools.partial(self._number, asked), limit, limit)
            self.asked[thread] = asked
            with contextlib.suppress(OSError):  # it ended; `_read` finds out
                wire.send(self.process, data, thread)
            if not self.shared:
                self._read()
        kind, value, changed = asked.answer.get()
        if kind != "value":
            if isinstance(value, StopIteration) and asked.operation != "next":
                raise Ended(*value.args)
            raise value
        if changed is not None and asked.operation == "call" and (value is None or self.in_place):
            _restored(tuple(message[2:]), changed)
        return value

    def _read(self) -> None:
        """Read an answer, take what it tells of objects, and hand it to the thread that asked."""
        try:
            answer, thread = wire.receive(self.process)
        except (EOFError, OSError):
            self.end("gone", "")
        self.answered = True
        try:
            asked = self.asked.pop(thread)
            plain = answer[:1] == b"="
            stand = functools.partial(self._stand, asked)
            answer = wire.decode(answer[plain:], stand, 2 * wire.MAX_ANSWER_VALUES)
            _, snapshots, kind, value, changed, printed = ((), (), "value", answer, None, "") if plain else answer
            for number, data in snapshots:
                self._take(asked, number, data)
            sys.stdout.write(printed)
            if kind != "value":
                value, text = value
                _state(value).status, _state(value).text = "memory" if kind == "memory" else "fail", str(text)
        except (ValueError, TypeError, LookupError, AttributeError):
            self.end("gone", "the answer is malformed")
        asked.answer.put((kind, value, changed))

    def _take(self, asked: "_Asked", number: int, data: object) -> None:
        """Keep the data in an object, which came with an answer."""
        state = self.states[number]
        if number not in asked.new and (asked.making or not state.live()):
            return
        state.data, state.clock = data, self.clock
        x = state.stand
        if isinstance(x, BaseException):
            args, names, (cause, context, suppress) = data
            vars(x).update(names, _glassrl=state)
            with contextlib.suppress(TypeError):  # sets what the builtin class has beside args
                x.__init__(*args)
            if isinstance(x, OSError) and len(args) == 3:
                x.errno, x.strerror, x.filename = args
                args = args[:2]
            x.args = args
            x.__cause__, x.__context__, x.__suppress_context__ = cause, context, bool(suppress)

    def ask(self, operation: str, *arguments: object, asked: "_Asked | None" = None) -> object:
        """One of candidate.py's operations on the candidate's objects; `asked` if a test makes one."""
        if operation not in _LOOKS and not asked:
            if self.watched:
                self._look_after()
            self.clock += 1
        return self.exchange([operation, *arguments], asked or _Asked(operation))

    def _look_after(self) -> None:
        """Before calls may change objects again: data that the making of others has changed stays what it was."""
        watched, self.watched = self.watched, {}
        if states := [state for state in watched if state.live()]:
            self.ask("same", [state.stand for state in states])
        for state in states:
            if state.data != watched[state]:
                state.data, state.frozen = watched[state], True

    def attribute(self, x: object, name: str) -> object:
        if name.startswith("__") and name.endswith("__") and name not in _SAFE or name.startswith("_glassrl"):
            raise AttributeError(name)
        value = self.ask("getattr", x, name)
        if isinstance(value, _Stand) and isinstance(x, _Stand):  # such as a method, which may change it
            self._hand_over(x._glassrl)
        return value

    def call(self, function: object, args: tuple, kwargs: dict) -> object:
        if not isinstance(function, _Kind) or issubclass(function, BaseException):
            return self.ask("call", function, list(args), kwargs)
        # What the candidate reads here may be what an answer is to be equal to. So first what changed is asked for, of
        # objects that somebody holds beside this loop.
        held = [x for x in [*self.states.values()] if x.data is not None and x.live() and x.held()]
        if changed := [x.stand for x in held if x.clock < self.clock]:
            self.ask("same", changed)
        asked = _Asked("call", making=True)
        result = self.ask("call", function, list(args), kwargs, asked=asked)
        self.watched = {x: x.data for x in held if x.number not in asked.named} | self.watched
        given = (args, kwargs) if args or kwargs else None
        if not isinstance(result, _Stand):
            if given and not _state(result) and not _keeps(result, args, kwargs):
                raise TypeError(f"{function!r} gives data that is not what it was given")
            return result
        state = result._glassrl
        if given:
            if state.number not in asked.new and state.given != given:  # one that it gave before
                state = self._new_state(state.number, type(result))
                self.ask("same", [state.stand])
            state.given = given
            if _bits(result) & (candidate.IS_DATA | candidate.HAS_FIELDS) and not _keeps(state.stand, args, kwargs):
                state.odd = [state.data]
        state.made = self._new(type(result), state, made=function in self.classes and type(result) is function)
        return state.made

    def refuse(self, problem: str) -> None:
        """The tests cannot be used. What depends on an answer of the candidate's is not said to be their fault."""
        if not self.answered:
            self.end("bad", problem)
        raise TypeError(problem)

    def _number(self, asked: "_Asked", x: object) -> tuple[int]:
        if isinstance(x, _Kind):
            return (vars(x)["_glassrl_class"],)
        state = _state(x)
        if state is None:
            self.refuse(f"a test hands the candidate an object of type {type(x).__name__}: only plain data can cross")
        asked.named.add(state.number)
        if asked.operation not in _LOOKS:
            self._hand_over(state)
        return (state.number,)

    def _hand_over(self, state: _State) -> None:
        if state.given and not state.handed:
            state.handed, self.states[state.number] = True, state

    def _stand(self, asked: "_Asked", number: int, kind: tuple | type = (), own: tuple | None = None) -> object:
        """The stand-in for an object that an answer names. A new object comes with its class.

        It is the same one each time, except for an object that a test made and the candidate was never handed: that is
        no answer, whatever the candidate says, but what the answer holds is.
        """
        if own is not None:
            return self._kind(*own)
        if number in self.kinds:
            return self.kinds[number]
        if kind and number not in self.states:
            cls = self._kind(*kind) if isinstance(kind, tuple) else _exception(kind)
            asked.new.add(number)
            return self._new_state(number, cls).stand
        state = self.states[number]
        if state.given and not (state.handed or asked.making or number in asked.named | asked.new):
            asked.new.add(number)
            state = self._new_state(number, type(state.stand))
        return state.stand

    def _new_state(self, number: int, cls: type) -> _State:
        state = self.states[number] = _State(number)
        state.stand = self._new(cls, state)
        return state

    @staticmethod
    def _new(cls: type, state: _State, made: bool = False) -> object:
        stand = cls.__new__(cls)
        object.__setattr__(stand, "_glassrl", state)
        if isinstance(stand, _Stand):
            object.__setattr__(stand, "_glassrl_made", made)
        return stand

    def _kind(self, number: int, name: str, bits: int, parents: tuple, fields: tuple, like: str) -> _Kind:
        """The class that stands for one of the candidate's."""
        if number in self.kinds:
            return self.kinds[number]
        if (type(number), type(name), type(bits)) != (int, str, int):
            raise ValueError("malformed message")
        name = name if name.isidentifier() else "Object"
        bases = tuple(self._kind(*base) if isinstance(base, tuple) else _exception(base) for base in parents)
        space = {"_glassrl_bits": bits, "_glassrl_class": number, "_glassrl_fields": fields}
        if fields and not bits & candidate.IS_PLAIN:  # for the functions of dataclasses
            described = [(x, object, dataclasses.field(init=init, compare=compare)) for x, _, compare, init in fields]
            made = dataclasses.make_dataclass(name, described, init=False, repr=False, eq=False)  # no code is generated
            space["__dataclass_fields__"] = made.__dataclass_fields__
        if bases:
            space["__getattr__"] = _ALWAYS["__getattr__"]
            space["__str__"] = lambda error: _state(error).text or _candidate.ask("str", error)
        else:
            bases = (_Stand,)
            if seen_as := wire.BUILTIN.get(like) or next((x for x in wire.DATA_BASES if x.__name__ == like), None):
                if like not in wire.BUILTIN:
                    seen_as = _Kind(name, (seen_as,), space)
                space = space | {"__class__": property(lambda self: seen_as)}
            space |= {"__slots__": (), **_ALWAYS}
            space |= {f"__{name}__": _operator(name) for name in _IN_PLACE if self.objects}
            space |= {name: _BY_METHOD[name] for name, bit in candidate.METHOD_BITS.items() if bits & bit}
        try:
            kind = _Kind(name, bases, space)
        except TypeError:  # bases that do not go together
            kind = _Kind("Object", (Exception,), space)
        self.kinds[number] = kind
        return kind


class _Asked:
    """A question to the candidate's process.

    Attributes:
        making: a test makes an object, and may compare an answer with it. So no other's data may change.
        named: the numbers of the objects in the question.
        new: those of the objects in the answer that have a new state.
    """

    def __init__(self, operation: str, making: bool = False):
        self.operation, self.making, self.answer = operation, making, queue.SimpleQueue()
        self.named, self.new = set(), set()


def _exception(cls: type) -> type:
    """A builtin class of exceptions; of groups there are none, since they need arguments."""
    if not issubclass(cls, BaseException):
        raise ValueError("malformed message")
    return Exception if issubclass(cls, BaseExceptionGroup) else cls


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
        problem = problem or wire.receive(process)[0].decode()
    except (EOFError, OSError):
        problem = "it ended"
    if problem:
        end("broken", f"could not lock a process up: {problem}")
    _candidate = Candidate(process, end, bool(job["classes"]), job["own_eq"], job["in_place"])
    for name in wire.KINDS:
        setattr(inspect, name, _kind_of(vars(inspect)[name]))
    asyncio.iscoroutine = _kind_of(asyncio.iscoroutine)
    run = asyncio.run
    asyncio.run = lambda main, **options: _candidate.ask("run", main) if _state(main) else run(main, **options)

    try:
        found = _candidate.ask("load", job["code"], job["names"], job["capture"], job["in_place"])
        if type(found) is not dict or not found.keys() <= set(job["names"]):
            end("gone", "the answer is malformed")
    except BaseException as error:
        end("memory" if _status(error) == "memory" else "error", _why(error))
    _candidate.classes = [found[name] for name in job["classes"] if isinstance(found.get(name), _Kind)]
    names = {name: importlib.import_module(name) for name in job["modules"]} | found
    names |= {"__assert_held__": lambda: _held.append(True), "__caught__": _caught, "__skips__": _skips}
    names |= {"__ended__": Ended, "__refuse__": _candidate.refuse, "id": lambda x: id(_itself(x))}
    names["__same__"] = lambda a, b: _itself(a) is _itself(b)
    threading.stack_size(1 << 20)
    threading.Thread.start = lambda thread: _candidate.start_thread(thread)

    def set_up() -> dict[str, object]:
        """The globals of a test, with what the setup makes anew: a candidate may have changed what it made before."""
        _candidate.answered = False
        sys.modules["tests"] = types.ModuleType("tests")  # unittest and dataclasses look their module up
        space = vars(sys.modules["tests"])
        space |= names
        exec(job["setup"], space)
        return space

    try:
        space = set_up()
    except BaseException as error:
        if job["setup_uses_candidate"]:
            end(_status(error), f"setup: {_why(error)}")
        end("bad", f"setup code raises {_why(error)}")
    report("loaded", "")
    for test in job["tests"]:
        try:
            space = space or set_up()
            _held.clear()
            exec(test, space)
        except BaseException as error:
            report(_status(error), _why(error))
        else:
            report("pass" if _held else "fail", "" if _held else "no assert was reached")
        space = None
    os._exit(0)


def _kind_of(look: Callable[[object], bool]) -> Callable[[object], bool]:
    """One of wire.KINDS, which looks at what the tests do not get, as at a function's code."""
    return lambda x: bool(_candidate.ask(look.__name__, x)) if isinstance(x, _Stand) else look(x)


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


def count_checks() -> None:
    """From now on unittest's checks count as asserts."""
    for name in [name for name in dir(unittest.TestCase) if name.startswith("assert")]:
        check = functools.partialmethod(_checked, getattr(unittest.TestCase, name))
        setattr(unittest.TestCase, name, check)


def _checked(case: unittest.TestCase, check: Callable[..., object], *args: object, **kwargs: object) -> object:
    if check.__name__ in ("assertIs", "assertIsNot"):
        args = map(_itself, args)
    result = check(case, *args, **kwargs)
    _held.append(True)
    return result
