"""Right programs of unusual kinds pass in the sandbox: classes, exceptions, iterators, threads, the library. About 15 s."""
# ruff: noqa: E501

from concurrent.futures import ThreadPoolExecutor

import pytest
from sandbox_tables import FRESH, TABLES

from rewards.sandbox import judge as sandbox
from rewards.sandbox import run_tests

if not (sandbox._seccomp_available() and sandbox._landlock_abi()):
    pytest.skip("this kernel or container has no seccomp or no Landlock", allow_module_level=True)

# A module, and tests of it. Each test is judged on its own; the first words of a group may name options of run_tests.
POINT = """
class Point:
    def __init__(self, x, y=0): self.x, self.y = x, y
    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)
    def __iadd__(self, o):
        self.x += o.x
        return self
    def __mul__(self, k): return Point(self.x * k)
    __rmul__ = __mul__
    def __neg__(self): return Point(-self.x)
    def __abs__(self): return self.x
    def __lt__(self, o): return self.x < o.x
    def __eq__(self, o): return type(o) is Point and self.x == o.x
    def __hash__(self): return 1
    def __repr__(self): return f'Point({self.x})'
    def __contains__(self, v): return v in (self.x, self.y)
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __call__(self, a): return a + self.x
    def __len__(self): return 2
"""
DATACLASS = """
from dataclasses import dataclass, field
@dataclass(frozen=True, order=True)
class Point:
    x: int
    y: int = 0
    def shift(self, d): return Point(self.x + d, self.y + d)
@dataclass
class Bag:
    items: list = field(default_factory=list)
    def add(self, x): self.items.append(x)
def f(a): return [Point(a, a), Point(a + 1, a)]
"""
ITERATORS = """
def g(n):
    yield from range(n)
    return 'end'
def echo():
    got = []
    while True: got.append((yield got))
class It:
    def __init__(self, n): self.n = n
    def __iter__(self): return iter(range(self.n))
class Down:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n == 0: raise StopIteration
        self.n -= 1
        return self.n
"""
ERRORS = """
class Mine(ValueError):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code
class Sub(Mine): pass
class Both(Mine, KeyError): pass
class Plain(Exception):
    def __str__(self): return 'plain text'
def f(x):
    if x == 0: raise ValueError('bad zero')
    if x == 1: raise Mine('mine', 42)
    if x == 2: raise Sub('sub', 1)
    if x == 3: return {}['k']
    if x == 4: raise FileNotFoundError(2, 'no', 'file')
    if x == 5: return b'\\xff'.decode()
    if x == 6: raise StopIteration(5)
    if x == 7: raise SystemExit(3)
    if x == 8: assert 0, 'own'
    if x == 9: raise ExceptionGroup('g', [ValueError(1)])
    if x == 10: raise Plain
    if x == 11: raise Both('both', 2)
    if x == 12: return int('x')
    if x == 13: return [][1]
    return 1 / 0
def caught(kind, x): raise NotImplementedError
"""
WITH = """
import contextlib
class Db:
    def __init__(self): self.log = []
    def __enter__(self):
        self.log.append('in')
        return self
    def __exit__(self, kind, error, trace):
        self.log.append(kind.__name__ if kind else 'out')
        return kind is ValueError
    def boom(self): raise ValueError
    def bang(self): raise KeyError('k')
@contextlib.contextmanager
def manager(x):
    yield x + 1
"""
LIBRARY = """
import array, collections, datetime, decimal, fractions, itertools, math, pathlib, random, re, string, types, uuid, zoneinfo
from collections import *
from datetime import *
from decimal import Decimal
from fractions import Fraction
def f(x): return eval(x)
"""
ENUMS = """
import enum
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Number(enum.IntEnum):
    A = 1
    B = 2
class Bits(enum.Flag):
    X = 1
    Y = 2
class Text(str, enum.Enum):
    Q = 'q'
def f(x): return Color(x)
def g(x): return Number(x)
"""
IN_PLACE = """
def sort(x): x.sort()
def put(d): d['k'] = [1]
def corner(m): m[0][0] = 9
def add(s): s.add(3)
def push(d): d.append(1)
def first(b): b[0] = 65
def empty(x): x[:] = []
def move(a, b): a.append(b.pop())
def remove(nums, v):
    k = 0
    for n in nums:
        if n != v: nums[k] = n; k += 1
    return k
"""
THREADS = """
import asyncio, concurrent.futures, queue, threading, time
def pool(n):
    with concurrent.futures.ThreadPoolExecutor(4) as ex: return list(ex.map(lambda x: x * x, range(n)))
def worker(n):
    q, out = queue.Queue(), []
    def work():
        while (i := q.get()) is not None: out.append(i)
    t = threading.Thread(target=work)
    t.start()
    for i in range(n): q.put(i)
    q.put(None)
    t.join()
    return out
def locked(n):
    total, lock = [0], threading.Lock()
    def work():
        for _ in range(100):
            with lock: total[0] += 1
    ts = [threading.Thread(target=work) for _ in range(n)]
    for t in ts: t.start()
    for t in ts: t.join()
    return total[0]
async def double(x):
    await asyncio.sleep(0.001)
    return x * 2
def gathered(n):
    async def main(): return await asyncio.gather(*[double(i) for i in range(n)])
    return asyncio.run(main())
def in_thread(n):
    async def main(): return await asyncio.to_thread(lambda: n + 1)
    return asyncio.run(main())
async def late():
    try: await asyncio.wait_for(asyncio.sleep(5), 0.01)
    except asyncio.TimeoutError: return 'late'
async def numbers(n):
    for i in range(n): yield i
def queued():
    async def main():
        q = asyncio.Queue()
        async def put():
            for i in range(3): await q.put(i)
        task = asyncio.create_task(put())
        return [await q.get() for _ in range(3)] + [x async for x in numbers(2)]
    return asyncio.run(main())
def timer():
    done = threading.Event()
    threading.Timer(0.01, done.set).start()
    return done.wait(5)
"""
KINDS = """
import collections, copy, functools, typing
@functools.lru_cache
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
class Stack(list):
    def push(self, x): self.append(x)
Pair = collections.namedtuple('Pair', 'a b')
class Typed(typing.NamedTuple):
    a: int
    b: int = 2
    def total(self): return self.a + self.b
def compose(*fs): return lambda x: functools.reduce(lambda a, f: f(a), fs, x)
def inc(x): return x + 1
def curry(a): return lambda b: lambda c: a + b + c
class Meta(type):
    def __call__(cls, *args):
        if not hasattr(cls, 'one'): cls.one = super().__call__(*args)
        return cls.one
class Single(metaclass=Meta): pass
class Prop:
    'A class with a property.'
    def __init__(self): self._v = 1
    @property
    def v(self): return self._v
    @v.setter
    def v(self, x):
        if x < 0: raise ValueError
        self._v = x
    @staticmethod
    def same(a): return a
    @classmethod
    def make(cls): return cls()
class Matrix:
    def __init__(self, rows): self.rows = rows
    def __matmul__(self, o): return Matrix([[sum(a * b for a, b in zip(x, y)) for y in zip(*o.rows)] for x in self.rows])
    def __setitem__(self, k, v): self.rows[k[0]][k[1]] = v
    def __getitem__(self, k): return self.rows[k[0]][k[1]]
    def __delitem__(self, k): del self.rows[k]
class Base:
    def name(self): return 'base'
class Child(Base):
    def name(self): return super().name() + ' child'
class Default(dict):
    def __missing__(self, k): return k * 2
def tree(d): return (tree(d - 1), d) if d else None
def say(n): print(*range(n), end='!')
def primes(n):
    s = bytearray([1]) * n
    for i in range(2, int(n ** 0.5) + 1):
        if s[i]: s[i * i::i] = bytes(len(s[i * i::i]))
    return [i for i in range(2, n) if s[i]]
"""
FIELDS = """
from dataclasses import dataclass, field
@dataclass
class Node:
    value: int
    kids: list = field(default_factory=list, compare=False)
    number: int = field(init=False, default=3)
    def add(self, kid): self.kids.append(kid)
@dataclass
class Rect:
    a: int
    area: int = field(init=False)
    b: int = 2
    def __post_init__(self): self.area = self.a * self.b
@dataclass(kw_only=True)
class Named:
    name: str
@dataclass
class Line:
    start: Rect
    end: Rect
@dataclass
class Account:
    total: int = 0
class Bank:
    def __init__(self): self.account = Account()
    def get(self): return self.account
    def pay(self, x): self.account.total += x
class Deck(list):
    def push(self, x): self.append(x)
class Doubles(dict):
    def __missing__(self, k):
        self[k] = 2 * k
        return self[k]
class One:
    one = None
    def __new__(cls, *a):
        cls.one = cls.one or object.__new__(cls)
        return cls.one
class Color:
    known = {}
    def __new__(cls, name): return cls.known.setdefault(name, object.__new__(cls))
def node(x): return Node(x, [1])
def rect(x): return Rect(x)
def chain(n):
    x = None
    for i in range(n): x = Node(i, x)
    return x
"""
OTHERS = """
import asyncio
class Mine(ValueError): pass
def f(x):
    if x == 0: raise ValueError('zero')
    if x == 1: raise Mine('one')
    error = ValueError('two')
    error.code = 5
    raise error
def parse(s):
    import json
    return json.loads(s)
def made(): return ValueError('a', 1)
def kind(): return KeyError
async def late(x):
    await asyncio.sleep(0.001)
    if x < 0: raise KeyError(x)
    return x + 1
class Number:
    def __floor__(self): return 3
    def __ceil__(self): return 4
    def __trunc__(self): return 3
    def __bytes__(self): return b'x'
    def __reversed__(self): return iter([2, 1])
class Pair:
    def __len__(self): return 2
    def __getitem__(self, i): return (1, 2)[i]
def deep(n): return [deep(n - 1)] if n else []
def big(): return 'x' * (12 << 20)
def same(x): return x
def ends():
    yield 1
    return 'end'
"""
CATCH = "try:\n    f({})\n    assert False\nexcept {} as e:\n    assert {}"
GROUPS = {
    "operators": (POINT, {}, [
        "assert (Point(1) + Point(2)).x == 3", "assert Point(1) < Point(2) and not Point(2) < Point(1) and Point(2) > Point(1)",
        "assert repr(Point(1)) == 'Point(1)' and f'{Point(3)}' == 'Point(3)' and str(Point(2)) == 'Point(2)'", "assert 5 in Point(5) and 6 not in Point(5)",
        "assert Point(1, 2)[1] == 2 and list(Point(1, 2)) == [1, 2]", "assert abs(Point(7)) == 7", "assert (Point(2) * 3).x == 6 and (3 * Point(2)).x == 6",
        "p = Point(1)\np += Point(4)\nassert p.x == 5", "assert (-Point(1)).x == -1", "assert Point(1)(4) == 5 and callable(Point(1))", "assert len(Point(1)) == 2",
        "assert sorted([Point(3), Point(1)])[0].x == 1 and max([Point(3), Point(1)]).x == 3", "assert isinstance(Point(1), Point) and not isinstance(3, Point)",
        "assert type(Point(1)) is Point and type(Point(1)).__name__ == 'Point'", "assert vars(Point(1, 2)) == {'x': 1, 'y': 2}",
        "assert hasattr(Point(1), 'x') and not hasattr(Point(1), 'zz') and getattr(Point(1), 'zz', 5) == 5", "p = Point(1)\np.x = 9\nassert p.x == 9",
        "p = Point(1)\np.new = [1]\nassert p.new == [1]\ndel p.new\nassert not hasattr(p, 'new')", "p = Point(1)\nassert p == p and p is p and p in [p]",
    ]),
    "own ==": (POINT, {"own_eq": True}, ["assert Point(1) == Point(1) and Point(1) != Point(2)", "assert {Point(1), Point(1)} == {Point(1)}", "assert Point(1) in [Point(1)] and [Point(1), 2] == [Point(1), 2]"]),
    "dataclasses": (DATACLASS, {}, [
        "assert Point(1, 2) == Point(1, 2) and Point(1) != Point(2)", "assert Point(1, 2).shift(1) == Point(2, 3)", "assert f(3) == [Point(3, 3), Point(4, y=3)]",
        "assert {Point(1, 2), Point(1, 2)} == {Point(1, 2)}", "assert repr(Point(1, 2)) == 'Point(x=1, y=2)'", "assert Point(1) < Point(2) and max(Point(1), Point(3)).x == 3",
        "try:\n    Point(1).x = 3\n    assert False\nexcept Exception as e:\n    assert type(e).__name__ == 'FrozenInstanceError'", "assert Point(1) == Point(1, 0)",
        "b = Bag()\nb.add(1)\nassert b == Bag([1]) and b.items == [1]", "assert {Point(1): 'a'}[Point(1)] == 'a'",
    ]),
    "iterators": (ITERATORS, {}, [
        "i = g(3)\nassert next(i) == 0 and next(i) == 1 and list(i) == [2]", "assert sum(g(5)) == 10 and list(zip(g(2), g(2))) == [(0, 0), (1, 1)]", "assert next(g(0), None) is None",
        "try:\n    next(g(0))\n    assert False\nexcept StopIteration as e:\n    assert e.value == 'end'", "a, b, c = g(3)\nassert c == 2", "e = echo()\nnext(e)\nassert e.send(1) == [1] and e.send(2) == [1, 2]",
        "assert list(It(3)) == [0, 1, 2] and 1 in It(3) and [*It(2)] == [0, 1]", "assert list(Down(3)) == [2, 1, 0]", "d = Down(2)\nassert iter(d) is d and next(d) == 1",
        "import collections.abc as abc\nassert isinstance(g(1), abc.Iterator) and isinstance(It(1), abc.Iterable) and not isinstance(It(1), abc.Iterator)",
        "import itertools\nassert list(itertools.islice(g(10**9), 3)) == [0, 1, 2]", "i = g(3)\ni.close()\nassert list(i) == []",
    ]),
    "errors": (ERRORS, {}, [
        CATCH.format(0, "ValueError", "str(e) == 'bad zero' and e.args == ('bad zero',)"), CATCH.format(1, "Mine", "e.code == 42 and 'mine' in str(e)"),
        CATCH.format(2, "Mine", "isinstance(e, Sub) and isinstance(e, ValueError) and type(e) is Sub"), CATCH.format(3, "KeyError", "e.args == ('k',)"),
        CATCH.format(4, "OSError", "e.errno == 2 and e.filename == 'file'"), CATCH.format(5, "UnicodeDecodeError", "e.reason == 'invalid start byte'"), CATCH.format(6, "StopIteration", "e.value == 5"),
        CATCH.format(7, "SystemExit", "e.code == 3"), CATCH.format(8, "AssertionError", "str(e) == 'own'"), CATCH.format(9, "Exception", "'g' in str(e)"), CATCH.format(10, "Plain", "str(e) == 'plain text'"),
        CATCH.format(11, "KeyError", "isinstance(e, Both) and e.code == 2"), CATCH.format(12, "(TypeError, ValueError)", "'invalid literal' in str(e)"), CATCH.format(13, "LookupError", "type(e).__name__ == 'IndexError'"),
        CATCH.format(14, "ArithmeticError", "e"), "import unittest\nunittest.TestCase().assertRaises(Mine, f, 1)\nwith unittest.TestCase().assertRaisesRegex(ValueError, 'zero'):\n    f(0)\nassert True",
        "assert issubclass(Sub, Mine) and issubclass(Mine, ValueError)", "try:\n    raise Mine('a', 1)\nexcept Mine as e:\n    assert e.code == 1", "assert str(Mine('m', 3)) == 'm'",
    ]),
    "with": (WITH, {}, [
        "d = Db()\nwith d as e:\n    assert e is d\nassert d.log == ['in', 'out']", "d = Db()\nwith d:\n    d.boom()\nassert d.log == ['in', 'ValueError']", "with manager(3) as v:\n    assert v == 4",
        "d = Db()\ntry:\n    with d:\n        d.bang()\n    assert False\nexcept KeyError:\n    assert d.log == ['in', 'KeyError']",
    ]),
    "library": (LIBRARY, {}, [
        "from fractions import Fraction as F\nassert f('Fraction(1, 3)') == F(1, 3) and f('Fraction(1, 3)') + 1 == F(4, 3)", "from decimal import Decimal as D\nassert f('Decimal(\"1.10\")') == D('1.1') and str(f('Decimal(\"1.10\")')) == '1.10'",
        "import datetime as d\nassert f('date(2020, 2, 29)') == d.date(2020, 2, 29)", "import datetime as d\nassert f('datetime(2020, 1, 1, tzinfo=timezone.utc)').isoformat() == '2020-01-01T00:00:00+00:00'",
        "assert f('timedelta(days=1)').total_seconds() == 86400", "import collections as c\nassert f('deque([1, 2], maxlen=2)') == c.deque([1, 2])", "assert f('Counter(\"aab\")').most_common(1) == [('a', 2)] and f('Counter(\"aab\")') == {'a': 2, 'b': 1}",
        "assert f('bytearray(b\"ab\")') == bytearray(b'ab')", "import uuid\nassert f('uuid.UUID(int=5)') == uuid.UUID(int=5)", "assert f('slice(1, 2)') == slice(1, 2) and f('...') is ...", "assert f('{1: 2}.keys()') == {1} and list(f('{1: 2}.values()')) == [2]",
        "import array\nassert f('array.array(\"i\", [1, 2])') == array.array('i', [1, 2])", "assert f('re.match(\"(a)(b)\", \"ab\")').group(2) == 'b'", "assert f('types.SimpleNamespace(a=1)').a == 1", "import datetime as d\nassert f('date') is d.date",
        "assert f('pathlib.PurePosixPath(\"/a/b\")').name == 'b'", "assert f('memoryview(b\"abc\")')[1] == 98", "assert f('defaultdict(list, {1: [2]})') == {1: [2]}", "assert f('ChainMap({1: 2})')[1] == 2", "assert list(f('UserList([1])')) == [1]",
        "assert f('OrderedDict(a=1, b=2)') == {'b': 2, 'a': 1} and list(f('OrderedDict(a=1, b=2)')) == ['a', 'b']", "assert f('time(1, 2)').hour == 1", "assert f('string.Template(\"$a\")').substitute(a=1) == '1'", "assert f('random.Random(1)').random() == __import__('random').Random(1).random()",
        "assert f('math.nan') != f('math.nan') and f('math.inf') > 10**308", "assert f('itertools.count(3)').__next__() == 3", "assert f('complex(1, 2)') == 1 + 2j and f('range(3)') == range(3)", "assert f('frozenset({1})') == {1} and f('b\"x\"') == b'x' and f('None') is None",
    ]),
    "enums": (ENUMS, {}, [
        "assert f(1) == Color.RED and f(1) is Color.RED and f(2) != Color.RED", "assert f(1).name == 'RED' and f(1).value == 1", "assert [c.name for c in Color] == ['RED', 'BLUE'] and len(Color) == 2 and Color['RED'] is f(1)",
        "assert g(2) == 2 and g(2) == Number.B and g(2) > 1 and g(2) + 1 == 3 and Number.A < Number.B", "assert (Bits.X | Bits.Y).value == 3", "assert Text.Q == 'q' and Text.Q.value == 'q'", "assert {f(1): 'a'}[Color.RED] == 'a'",
        "assert sorted([g(2), g(1)]) == [1, 2]", "assert isinstance(f(1), Color) and Color(1) is f(1) and Color.RED in Color", "assert repr(f(1)) == '<Color.RED: 1>'", "try:\n    Color(9)\n    assert False\nexcept ValueError:\n    assert True",
    ]),
    "changed arguments": (IN_PLACE, {}, [
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]", "d = {}\nassert put(d) is None and d == {'k': [1]}", "m = [[1], [2]]\nrow = m[0]\ncorner(m)\nassert row == [9] and m == [[9], [2]]", "s = {1}\nadd(s)\nassert s == {1, 3}",
        "import collections\nq = collections.deque()\npush(q)\nassert len(q) == 1", "b = bytearray(b'xyz')\nfirst(b)\nassert b == b'Ayz'", "x = [1]\nempty(x)\nassert x == []", "a, b = [1], [2]\nmove(a, b)\nassert (a, b) == ([1, 2], [])",
    ]),
    "changed arguments and a result": (IN_PLACE, {"in_place": True}, ["n = [3, 2, 2, 3]\nk = remove(n, 3)\nassert k == 2 and n[:k] == [2, 2]"]),
    "threads": (THREADS, {}, [
        "assert pool(5) == [0, 1, 4, 9, 16]", "assert worker(3) == [0, 1, 2]", "assert locked(20) == 2000", "assert gathered(3) == [0, 2, 4]", "assert in_thread(3) == 4", "import asyncio\nassert asyncio.run(double(4)) == 8",
        "import asyncio\nassert asyncio.run(late()) == 'late'", "assert queued() == [0, 1, 2, 0, 1]", "assert timer() is True",
    ]),
    "other kinds": (KINDS, {}, [
        "assert fib(50) == 12586269025 and fib.cache_info().misses == 51 and fib.__name__ == 'fib'", "s = Stack()\ns.push(1)\nassert s == [1] and len(s) == 1 and s[0] == 1 and 1 in s", "assert Pair(1, 2) == (1, 2) and Pair(1, 2).a == 1 and Pair(1, 2)._asdict() == {'a': 1, 'b': 2}",
        "a, b = Pair(1, 2)\nassert b == 2", "assert Typed(1) == (1, 2) and Typed(1).total() == 3 and Typed(1) == Typed(1, 2)", "assert compose(inc, inc)(1) == 3 and curry(1)(2)(3) == 6", "assert Single() is Single()",
        "p = Prop()\np.v = 5\nassert p.v == 5\ntry:\n    p.v = -1\n    assert False\nexcept ValueError:\n    assert p.v == 5", "assert Prop.same(3) == 3 and isinstance(Prop.make(), Prop) and Prop.__doc__ == 'A class with a property.'",
        "m = Matrix([[1, 0], [0, 1]]) @ Matrix([[1, 2], [3, 4]])\nassert m.rows == [[1, 2], [3, 4]]\nm[0, 0] = 7\nassert m[0, 0] == 7\ndel m[0]\nassert m.rows == [[3, 4]]", "import copy\nm = Matrix([[1]])\nc = copy.deepcopy(m)\nc[0, 0] = 5\nassert m[0, 0] == 1",
        "assert Child().name() == 'base child' and issubclass(Child, Base) and isinstance(Child(), Base)", "assert Default()[4] == 8 and Default(a=1) == {'a': 1}", "assert tree(2) == ((None, 1), 2)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out:\n    say(3)\nassert out.getvalue() == '0 1 2!'", "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nsay(1)\ntext = sys.stdout.getvalue()\nsys.stdout = old\nassert text == '0!'",
        "p = primes(1_000_000)\nassert len(p) == 78_498 and p[-1] == 999_983",
    ]),
    "fields": (FIELDS, {}, [
        "assert node(2) == Node(2) and node(2) != Node(3) and node(2).number == 3", "assert rect(3) == Rect(3, 2) == Rect(a=3) and rect(3) != Rect(3, 3) and Rect(3).area == 6", "assert Named(name='a') == Named(name='a')",
        "assert Line(rect(1), rect(2)) == Line(Rect(1), Rect(2)) and Line(rect(1), rect(2)) != Line(Rect(1), Rect(1))", "b = Bank()\na = b.get()\nassert a == Account(0)\nb.pay(5)\nassert a == Account(5) and a.total == 5",
        "d = Deck()\nd.push(1)\nassert d == [1]\nd.push(2)\nassert d == [1, 2] and list(reversed(d)) == [2, 1]", "d = Doubles()\nassert d[2] == 4 and d == {2: 4}", "assert One() is One() and One() == One()",
        "assert Color('a') is Color('a') and Color('a') == Color('a') and Color('a') != Color('b')", "x, n = chain(500), 0\nwhile x: x, n = x.kids, n + 1\nassert n == 500", "n = Node(1)\nn.add(n)\nassert n.kids[0] is n and n.kids[0].value == 1",
        "nodes = [Node(i) for i in range(200)]\nfor a, b in zip(nodes, nodes[1:]): a.add(b)\nassert nodes[0].kids[0] == Node(1)",
    ]),
    "other ways": (OTHERS, {}, [
        CATCH.format(0, "ValueError", "type(e) is ValueError and str(e) == 'zero'"), CATCH.format(1, "ValueError", "type(e) is Mine and e.args == ('one',)"), CATCH.format(2, "ValueError", "e.code == 5"), "try:\n    f(0)\n    assert False\nexcept ValueError:\n    pass",
        "import json\ntry:\n    parse('{')\n    assert False\nexcept json.JSONDecodeError as e:\n    assert type(e) is json.JSONDecodeError and e.pos == 1",
        "assert made().args == ('a', 1) and isinstance(made(), ValueError) and str(made()) == \"('a', 1)\"", "assert kind() is KeyError and issubclass(kind(), LookupError)", "i = ends()\nnext(i)\ntry:\n    i.send(None)\n    assert False\nexcept StopIteration as e:\n    assert e.value == 'end'",
        "import asyncio\nasync def main(): return await late(1) + sum(await asyncio.gather(late(1), late(2)))\nassert asyncio.run(main()) == 7", "import asyncio\nasync def main():\n    try: await late(-1)\n    except KeyError: return 1\nassert asyncio.run(main()) == 1",
        "import math\nassert math.floor(Number()) == 3 and math.ceil(Number()) == 4 and math.trunc(Number()) == 3", "assert bytes(Number()) == b'x' and list(reversed(Number())) == [2, 1] and list(reversed(Pair())) == [2, 1]",
        "x, n = deep(150), 0\nwhile x: x, n = x[0], n + 1\nassert n == 150", "for _ in range(8): assert len(big()) == 12 << 20", "for i in range(40_000): assert same(i) == i",
    ]),
    "a byte order mark": ("\ufeff" + IN_PLACE, {}, ["x = [2, 1]\nsort(x)\nassert x == [1, 2]"]),
}  # fmt: skip
# What honest programs still cannot do; rewards/sandbox/README.md says so.
LIMITS = {
    "a temporary file": ("import tempfile\ndef f():\n    with tempfile.TemporaryFile() as file: return file.write(b'x')", "assert f() == 1"),
    "a subprocess": ("import subprocess\ndef f(): return subprocess.run(['true']).returncode", "assert f() == 0"),
    "a function of the test's as an argument": ("def f(g): return g(1)", "assert f(len) == 1"),
    "== of an object that does not keep what it is given": ("class P:\n    __init__ = lambda s, x: setattr(s, 'y', x + 1)\n    __eq__ = lambda s, o: s.y == o.y", "assert P(1) == P(1)"),
    "== that looks at a part of the attributes": ("class P:\n    ids = iter(range(9))\n    __init__ = lambda s, x: vars(s).update(x=x, id=next(P.ids))\n    __eq__ = lambda s, o: s.x == o.x", "assert P(1) == P(1)"),
    "a subclass of the candidate's class": ("class A: f = lambda s: 1", "class B(A): pass\nassert B().f() == 1"),
    "a change of a list that an attribute holds": ("class A:\n    def __init__(s): s.x = []", "a = A()\na.x.append(1)\nassert a.x == [1]"),
    "a dataclass that does not keep what it is given": ("from dataclasses import *\n@dataclass\nclass A:\n    x: InitVar[int]\n    y: int = 0\n    def __post_init__(s, x): s.y = x + 1", "assert A(1) == A(1)"),
    "a number compared with a returned object": ("class A: __lt__ = lambda s, o: True\ndef f(): return A()", "assert f() < 3"),
    "a returned object times a number": ("class V:\n    def __init__(s, x): s.x = x\n    __add__ = lambda s, o: V(s.x + o.x)\n    __mul__ = lambda s, k: V(s.x * k)", "assert ((V(1) + V(2)) * 2).x == 6"),
    "a patch of what the candidate calls": ("import time\ndef f(): return time.time()", "from unittest.mock import patch\nwith patch('time.time', return_value=5): assert f() == 5"),
    "an async with in a test's coroutine": ("class A:\n    async def __aenter__(s): return 1\n    async def __aexit__(s, *a): pass", "import asyncio\nasync def main():\n    async with A() as x: return x\nassert asyncio.run(main()) == 1"),
    "nesting above 200": ("def f():\n    x = []\n    for _ in range(300): x = [x]\n    return x", "assert f()"),
    "the signature of a function": ("def f(a): return a", "import inspect\nassert len(inspect.signature(f).parameters) == 1"),
}  # fmt: skip


def test_honest_programs_pass():
    tests = [(name, code, options, test) for name, (code, options, tests) in GROUPS.items() for test in tests]
    assert len(tests) >= 130
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(lambda each: run_tests(each[1], [each[3]], **each[2]), tests))
    failed = {f"{name}: {test}": v for (name, _, _, test), v in zip(tests, verdicts, strict=True) if v.status != "pass"}
    assert failed == {}


def test_together_they_pass_too():
    for code, options, tests in GROUPS.values():
        verdict = run_tests(code, tests, **options)
        assert (verdict.status, verdict.passed) == ("pass", len(tests)), verdict


@pytest.mark.parametrize("kind", TABLES)
def test_right_answers_pass_and_wrong_ones_do_not(kind):
    """Each test on its own; in a wrong answer's row none may hold, whatever the object claims."""
    rows = [(row, test, holds) for row in TABLES[kind] for holds in (True, False) for test in row[3 if holds else 4]]
    assert min(sum(holds for _, _, holds in rows), sum(not holds for _, _, holds in rows)) >= 5

    def judge(row):
        (code, options, setup, _, _), test, _ = row
        return run_tests(code, [test], setup=setup, timeout_s=1.0, **options)

    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(judge, rows))
    pairs = zip(rows, verdicts, strict=True)
    wrong = {f"{row[0][-80:]}: {test}": v for (row, test, holds), v in pairs if (v.status == "pass") is not holds}
    assert wrong == {}


@pytest.mark.parametrize("row", FRESH, ids=range(len(FRESH)))
def test_setup_data_is_fresh_for_each_test(row):
    code, options, setup, holds, fails = row
    verdicts = [run_tests(code, tests, setup=setup, **options) for tests in (holds + fails, (holds + fails)[::-1])]
    assert [verdict.passed for verdict in verdicts] == [len(holds)] * 2, verdicts


def test_threads_of_tests_wait_for_no_one_for_ever():
    """Two calls that wait for each other end the evaluation as any that sleeps; the other tests are not lost."""
    code = "import threading\ne = threading.Event()\ndef wait(): return e.wait()\ndef f(): return 1"
    hangs = "import threading\nts = [threading.Thread(target=wait) for _ in range(2)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert f() == 1"
    verdict = run_tests(code, ["assert f() == 1", hangs], timeout_s=0.2)
    assert (verdict.status, verdict.passed) == ("timeout", 1), verdict


@pytest.mark.parametrize("name", LIMITS)
def test_what_fails_though_it_is_right(name):
    code, test = LIMITS[name]
    try:
        assert run_tests(code, [test]).status == "fail"
    except ValueError as error:
        assert "only plain data can cross" in str(error)


def test_time_zones():
    code = "import datetime, zoneinfo\ndef f(): return datetime.datetime(2020, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin'))"
    if run_tests(code, ["assert f() or True"]).status != "pass":
        pytest.skip("this machine has no time zones under /usr/share/zoneinfo")
    test = "import datetime\nassert f().utcoffset() == datetime.timedelta(hours=2) and f().tzname() == 'CEST'"
    assert run_tests(code, [test]).status == "pass"
