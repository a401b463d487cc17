"""Programs and tests by what they try: for each kind right answers, whose tests hold, and wrong ones, whose tests do not.

{kind: [(program, options of run_tests, setup, tests that hold, tests that do not)]}. Each test is judged on its own.
"""
# ruff: noqa: E501

# Classes that always give the same object, share their state, or change it when the test makes another.
_NEW = (
    "    one = None\n    def __new__(c, *a, **k):\n        c.one = c.one or object.__new__(c)\n        return c.one\n"
)
_DATA = "from dataclasses import dataclass, field\n"
_ADD = "def add(a, b): return {}\ndef both(a, b): return [{}]\ndef make(): return {}\n"
_WANT = "want = P(4, 6)\n"
_SAME = [
    _WANT + "assert add(P(1, 2), P(3, 4)) == want",
    _WANT + "assert want == add(P(1, 2), P(3, 4))",
    _WANT + "assert not want != add(P(1, 2), P(3, 4))",
    _WANT + "assert add(P(1, 2), P(3, 4)) in (want, 5)",
    _WANT + "assert both(P(1, 2), P(3, 4)) == [want]",
    _WANT + "assert {want: 1}[add(P(1, 2), P(3, 4))] == 1",
    _WANT + "assert add(P(1, 2), P(3, 4)) in {want}",
    _WANT + "import unittest\nunittest.TestCase().assertEqual(add(P(1, 2), P(3, 4)), want)",
    _WANT + "import unittest\nunittest.TestCase().assertCountEqual(both(P(1, 2), P(3, 4)), [want])",
    "assert add(P(1, 2), P(3, 4)) == P(4, 6)",
    "r = add(P(1, 2), P(3, 4))\nassert r == P(4, 6)",
    "r = add(P(1, 2), P(3, 4))\nwant = P(4, 6)\nmake()\nassert r == want",
    "assert [add(P(1, 2), P(3, 4)), 1] == [P(4, 6), 1]",
    "assert (lambda got: got == P(4, 6))(add(P(1, 2), P(3, 4)))",
]
_VALUE = _DATA + "@dataclass\nclass P:\n    x: int\n    y: int\n"
_PLAIN = "class P:\n    def __init__(s, *a): s.x, s.y = a\n"
ANSWERS = [
    # Right: a dataclass, the same with a registry, one that keeps its objects by their arguments.
    (_VALUE + _ADD.format(*["P(a.x + b.x, a.y + b.y)"] * 2, "P(0, 0)"), {}, "", [t for t in _SAME if "{want" not in t], ["assert add(P(1, 2), P(3, 4)) == P(4, 7)", _WANT + "assert add(P(1, 2), P(3, 5)) == want"]),
    (_VALUE.replace("dataclass\n@dataclass", "dataclass\n@dataclass(frozen=True)").replace("@dataclass\n", "@dataclass(frozen=True)\n") + _ADD.format(*["P(a.x + b.x, a.y + b.y)"] * 2, "P(0, 0)"), {}, "", _SAME, []),
    ("class One:\n" + _NEW + "class Config:\n" + _NEW + "    def __init__(s, v=0): s.v = v\n    get = classmethod(lambda c: c())", {}, "", [
        "assert One() is One() and One() == One() and id(One()) == id(One())", "a, b = Config(1), Config(2)\nassert a is b and a.v == b.v == 2", "assert Config.get() is Config() and Config.get() == Config()",
        "import unittest\nunittest.TestCase().assertIs(Config(1), Config(2))", "x = One()\nassert x in [One()] and len({One(), One()}) == 1", "assert not (One() is not One())",
    ], ["assert One() is Config()", "assert One() is not One()", "import unittest\nunittest.TestCase().assertIsNot(One(), One())"]),
    ("class Node:\n    def __init__(s, v): s.v, s.next, s.parent = v, None, s\nclass Chain:\n    def __init__(s): s.head = s.tail = None\n    def push(s, n):\n        if s.tail: s.tail.next = n\n        s.head, s.tail = s.head or n, n\n    def items(s):\n        x = s.head\n        while x: yield x; x = x.next", {}, "", [
        "c, n = Chain(), Node(1)\nc.push(n)\nassert c.head is n and c.head == n and c.tail is n and c.head in [n]", "c, a, b = Chain(), Node(1), Node(2)\nc.push(a)\nc.push(b)\nassert list(c.items()) == [a, b] and a.next is b and a != b and {a: 1}[c.head] == 1",
        "n = Node(3)\nassert n.parent is n and n.parent == n", "c, n = Chain(), Node(1)\nc.push(n)\nimport unittest\nunittest.TestCase().assertIs(c.head, n)\nunittest.TestCase().assertEqual([n], [c.tail])",
    ], ["c, n = Chain(), Node(1)\nc.push(Node(1))\nassert c.head is n", "c, n = Chain(), Node(1)\nc.push(Node(1))\nassert c.head == n", "assert Chain().head is Chain()"]),
    (_DATA + "@dataclass\nclass Account:\n    total: int\n    def pay(s, x): s.total += x\nclass Bank:\n    def __init__(s): s.all = []\n    def add(s, a): s.all.append(a)\n    def pay(s, x):\n        for a in s.all: a.total += x\n    def first(s): return s.all[0]", {}, "", [
        "a = Account(3)\na.pay(2)\nassert a == Account(5) and a.total == 5", "b, a = Bank(), Account(3)\nb.add(a)\nb.pay(2)\nassert a == Account(5) == b.first() and b.first() is a", "a = Account(3)\nassert a == Account(3) and a != Account(4)\nb = Bank()\nb.add(a)\nassert b.first() == a",
    ], ["a = Account(3)\na.pay(2)\nassert a == Account(3)", "b, a = Bank(), Account(3)\nb.add(Account(4))\nassert b.first() == a"]),
    # Wrong: whatever is asked for.
    ("class P:\n" + _NEW + "    def __init__(s, *a): s.x, s.y = a\n" + _ADD.format("a", "a", "P(0, 0)"), {}, "", [], _SAME),
    ("class P:\n" + _NEW + _ADD.format("a", "b", "P()"), {}, "", [], _SAME + [_WANT + "assert make() == want"]),
    (_VALUE + _NEW + _ADD.format("a", "b", "P(0, 0)"), {}, "", [], _SAME + [_WANT + "assert make() == want"]),
    (_VALUE + "    def __post_init__(s): s.__dict__ = vars(P) and ALL; s.x, s.y = s.x, s.y\nALL = {'x': 1, 'y': 2}\n" + _ADD.format("a", "b", "P(0, 0)"), {}, "", [], _SAME),
    (_VALUE.replace("@dataclass\nclass P:", "class Borg:\n    state = {}\n    def __new__(c, *a):\n        s = object.__new__(c)\n        s.__dict__ = c.state\n        return s\n@dataclass\nclass P(Borg):") + _ADD.format("a", "b", "P(0, 0)"), {}, "", [], _SAME),
    (_VALUE + "    def __post_init__(s):\n        for o in ALL: o.x, o.y = s.x, s.y\n        ALL.append(s)\nALL = []\n" + _ADD.format("a", "b", "P(0, 0)"), {}, "", [], [t for t in _SAME if t.startswith(("r =", "assert"))]),
    ("class M(type):\n    one = None\n    def __call__(c, *a):\n        M.one = M.one or type.__call__(c, *a)\n        return M.one\nclass P(metaclass=M):\n    def __init__(s, *a): pass\n" + _ADD.format("a", "b", "P()"), {}, "", [], _SAME),
    ("class P(list):\n    one = None\n    def __new__(c, *a):\n        c.one = c.one or list.__new__(c)\n        return c.one\n    def __init__(s, *a): s[:] = a\n    __hash__ = lambda s: 1\n" + _ADD.format("a", "b", "P(0, 0)"), {}, "", [], [t for t in _SAME if "{want" not in t]),
    (_VALUE.replace("@dataclass", "@dataclass(eq=False)") + "    def __init__(s, *a): pass\n" + _ADD.format("a", "b", "P(0, 0)"), {}, "", [], _SAME + [_WANT + "want.z = 1\nassert add(P(1, 2), P(3, 4)) == want"]),
]  # fmt: skip

# Who decides what an operator does.
_OPS = "add sub mul matmul truediv floordiv mod pow lshift rshift and xor or divmod".split()
_LIAR = "class L:\n" + "".join(f"    __{p}{name}__ = lambda s, o: 1\n" for name in _OPS for p in ("", "r"))
_LIAR += (
    "".join(f"    __{name}__ = lambda s, o: True\n" for name in "lt le gt ge eq contains".split())
    + "    __hash__ = None\n"
)
_LIAR += "class Box:\n    def __init__(s, *a): pass\n    def area(s): return L()\n    def me(s): return s\n    side = property(lambda s: L())\n    __iter__ = lambda s: iter([L()])\n    __neg__ = __abs__ = __enter__ = lambda s: L()\n    __exit__ = lambda s, *a: None\n    __add__ = __getitem__ = lambda s, o: L()\n"
_LIAR += "".join(f"    __{p}{name}__ = lambda s, o: 1\n" for name in _OPS[1:] for p in ("", "r"))
_ASKS = [
    "abs({} / 12.56 - 1) < 1e-9",
    "{} * 2 == 1",
    "2 * {} == 1",
    "{} ** 2 == 1",
    "{} + 3 == 1",
    "3 + {} == 1",
    "{} ^ 5 == 1",
    "{} & 5 == 1",
    "{} | 5 == 1",
    "{} << 5 == 1",
    "5 >> {} == 1",
    "{} @ [5] == 1",
    "{} - 3 == 1",
    "{} // 3 == 1",
    "{} % 3 == 1",
    "divmod({}, 3) == 1",
    "pow({}, 3) == 1",
    "3 in {}",
    "{} < 3",
    "3 < {} <= 4",
    "sum([{}, 3]) == 1",
    "max({}, 3) != min({}, 3)",
    "__import__('math').isclose({}, 3)",
    "__import__('operator').truediv({}, 3) == 1",
]
_ANSWER = [
    "Box(2).area()",
    "Box(2).side",
    "next(iter(Box(2)))",
    "(-Box(2))",
    "(Box(2) + Box(3))",
    "Box(2)[1]",
    "Box(2).me()",
]
_V = """
class {0}:
    def __init__(s, x, y=0): s.x, s.y = x, y
    def __add__(s, o): return {0}(s.x + o.x, s.y + o.y) if isinstance(o, {0}) else {0}(s.x + o, s.y)
    __radd__ = __add__
    def __sub__(s, o): return {0}(s.x - o.x, s.y - o.y)
    def __mul__(s, k): return {0}(s.x * k, s.y * k) if not isinstance(k, {0}) else s.x * k.x + s.y * k.y
    __rmul__ = __mul__
    def __truediv__(s, k): return {0}(s.x / k, s.y / k)
    def __pow__(s, k): return {0}(s.x ** k)
    def __mod__(s, k): return s.x % k
    def __xor__(s, k): return s.x ^ k
    def __lshift__(s, k): return s.x << k
    def __matmul__(s, k): return s.x * k[0] + s.y * k[1]
    def __neg__(s): return {0}(-s.x, -s.y)
    def __abs__(s): return (s.x ** 2 + s.y ** 2) ** 0.5
    def __lt__(s, o): return s.x < (o.x if isinstance(o, {0}) else o)
    def __iadd__(s, o):
        s.x += o
        return s
    def __contains__(s, v): return v in (s.x, s.y)
    def __round__(s, n=None): return {0}(round(s.x, n), round(s.y, n))
    def __float__(s): return float(s.x)
    def __index__(s): return s.x
    def __bool__(s): return bool(s.x or s.y)
    def __divmod__(s, k): return divmod(s.x, k)
    def __format__(s, spec): return format(s.x, spec)
"""
_RIGHT_OPS = [
    "assert ({0}(1, 2) + {0}(3, 4)).x == 4",
    "assert ({0}(3, 4) * 2).y == 8 and (2 * {0}(3, 4)).x == 6",
    "assert abs({0}(3, 4)) == 5",
    "assert ({0}(3, 4) / 2).x == 1.5 and ({0}(2) ** 3).x == 8",
    "assert {0}(7) % 4 == 3 and {0}(6) ^ 5 == 3 and {0}(1) << 3 == 8",
    "assert {0}(1, 2) @ [3, 4] == 11 and {0}(1, 2) * {0}(3, 4) == 11",
    "assert (-{0}(1, 2)).y == -2 and round({0}(1.26, 2), 1).x == 1.3",
    "assert {0}(3) < 5 and not {0}(3) < 2 and {0}(3) < {0}(4)",
    "v = {0}(1)\nv += 2\nv += 3\nassert v.x == 6",
    "assert 2 in {0}(1, 2) and 3 not in {0}(1, 2)",
    "assert float({0}(2)) == 2.0 and [5, 6, 7][{0}(1)] == 6 and not {0}(0) and f'{{{0}(1.5):.2f}}' == '1.50'",
    "assert sum([{0}(1), {0}(2)]).x == 3 and divmod({0}(7), 2) == (3, 1)",
    "assert sorted([{0}(3), {0}(1)])[0].x == 1 and max({0}(1), {0}(2)).x == 2",
    "a = {0}(1)\nb = a + {0}(2)\nassert (b - {0}(1)).x == 2 and (a + 5).x == 6",
]
_WRONG_OPS = [
    "assert ({0}(1, 2) + {0}(3, 4)).x == 5",
    "assert abs({0}(3, 4)) == 6",
    "assert {0}(3) < 2",
    "assert 3 in {0}(1, 2)",
    "assert ({0}(3, 4) * 2).y == 9",
    "v = {0}(1)\nv += 2\nassert v.x == 4",
]
OPERATORS = [
    (_V.format(name), options, "", [t.format(name) for t in _RIGHT_OPS], [t.format(name) for t in _WRONG_OPS])
    for name, options in (("Vector", {}), ("V", {}), ("P2", {}), ("Vector", {"own_eq": True}), ("V", {"own_eq": True}))
]
OPERATORS += [
    (_LIAR, {}, "", [], [f"assert {ask.format(answer, answer)}" for answer in _ANSWER for ask in _ASKS]),
    ("class f:\n" + _LIAR.replace("class L:\n", "").split("class Box")[0] + "    def __init__(s, *a): pass", {}, "", [], [f"assert {ask.format('f(2)', 'f(2)')}" for ask in _ASKS]),
    ("import enum\nclass Number(enum.IntEnum):\n    A = 1\n    B = 2\ndef g(x): return Number(x)\nclass Money(int): pass\nclass Box:\n    def area(s): return Money(3)\n    items = property(lambda s: [1, 2])", {}, "", ["assert g(2) + 1 == 3 and g(2) > 1 and Number.B * 2 == 4", "assert Box().area() - 3 == 0 and Box().area() * 2 == 6 and abs(Box().area()) == 3", "assert 2 in Box().items"], ["assert g(2) + 1 == 4", "assert Box().area() - 3 == 1", "assert 3 in Box().items"]),
    ("def MAX(*a): return 5\ndef GCD(a, b): return a if not b else GCD(b, a % b)", {}, "", ["assert GCD(12, 18) == 6 and GCD(12, 18) < 7 and GCD(5, 0) / 2 == 2.5"], ["assert GCD(12, 18) == 5"]),
]  # fmt: skip

# Setup data is fresh for each test: (program, options, setup, tests that hold, tests that do not); the tests of a row
# run in one evaluation, in this order: those that do not hold last.
_CLEAR = "def f(x):\n    r = sum(x)\n    x.clear()\n    return r\ndef g(d):\n    r = len(d)\n    d.clear()\n    return r\ndef deep(d):\n    r = d['a'][0]\n    d['a'][0] = 99\n    return r\ndef none(x): x.clear()"
FRESH = [
    (_CLEAR, {}, "xs = [1, 2, 3]", ["none(xs)\nassert xs == []", "assert f(xs) == 6", "none(xs)\nassert xs == []", "assert f(xs) == 6"], ["assert f(xs) == 0", "assert xs == [] and f(xs) == 0"]),
    (_CLEAR, {"in_place": True}, "xs = [1, 2, 3]\nd = {'a': [7]}", ["assert f(xs) == 6", "assert f(xs) == 6 and xs == []", "assert deep(d) == 7", "assert deep(d) == 7 and d == {'a': [99]}", "assert g(d) == 1"], ["assert f(xs) == 0", "assert g(d) == 0", "assert deep(d) == 99"]),
    (_CLEAR, {"in_place": True}, "def call(c, x=[1, 2]): return c(x)", ["assert call(f) == 3", "assert call(f) == 3"], ["assert call(f) == 0"]),
    (_CLEAR, {"in_place": True}, "class Case:\n    data = [4, 5]\n    def run(s, c): return c(s.data)\ncase = Case()", ["assert case.run(f) == 9", "assert Case().run(f) == 9"], ["assert case.run(f) == 0"]),
    (_CLEAR, {"in_place": True}, "import functools\n@functools.lru_cache\ndef data(): return [1, 2]", ["assert f(data()) == 3", "assert f(data()) == 3"], ["assert f(data()) == 0"]),
    ("def f(x): return x", {}, "numbers = iter([1, 2])\ndef gen():\n    yield from 'ab'\nletters = gen()", ["assert f(next(numbers)) == 1", "assert f(next(numbers)) == 1 and f(next(numbers)) == 2", "assert f(next(letters)) == 'a'", "assert f(next(letters)) == 'a'"], ["assert f(next(numbers)) == 2"]),
    ("def f(x): return x", {}, "import random\nrandom.seed(3)\nfirst = random.Random(3).random()", ["assert f(random.random()) == first", "assert f(random.random()) == first"], ["random.random()\nassert f(random.random()) == first"]),
    ("def f(x): return x + 1", {}, "count = 0\ndef up():\n    global count\n    count += 1\n    return count", ["assert f(up()) == 2", "assert f(up()) == 2 and f(up()) == 3"], ["assert f(up()) == 3"]),
    ("class Node:\n    def __init__(s, v): s.v, s.kids = v, []\n    def add(s, n): s.kids.append(n)\n    def size(s): return 1 + sum(k.size() for k in s.kids)", {}, "root = Node(1)\nroot.add(Node(2))", ["root.add(Node(3))\nassert root.size() == 3", "assert root.size() == 2", "root.add(Node(3))\nassert root.size() == 3"], ["assert root.size() == 3"]),
]  # fmt: skip

# Tests that call the candidate from several threads.
_MAP = "from concurrent.futures import ThreadPoolExecutor\nimport threading\n"
THREADS = [
    ("def square(x): return x * x\ndef bad(x): raise KeyError(x)\ndef slow(x):\n    import time\n    time.sleep(0.01)\n    return x\nasync def later(x): return x + 1\ndef gen(n): yield from range(n)", {}, "import asyncio, time, unittest\n" + _MAP, [
        "with ThreadPoolExecutor(8) as pool: assert list(pool.map(square, range(50))) == [x * x for x in range(50)]", "out = []\nts = [threading.Thread(target=lambda i=i: out.append(square(i))) for i in range(100)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert sorted(out) == sorted(i * i for i in range(100))",
        "class T(threading.Thread):\n    def run(s): s.r = square(7)\nt = T()\nt.start()\nt.join()\nassert t.r == 49", "async def main(): return await asyncio.gather(*[asyncio.to_thread(square, i) for i in range(5)])\nassert asyncio.run(main()) == [0, 1, 4, 9, 16]",
        "with ThreadPoolExecutor(2) as pool:\n    try: pool.submit(bad, 3).result()\n    except KeyError as e: assert e.args == (3,)", "async def main(): return await asyncio.get_running_loop().run_in_executor(None, square, 3)\nassert asyncio.run(main()) == 9",
        "start = time.monotonic()\nwith ThreadPoolExecutor(10) as pool: assert list(pool.map(slow, range(20))) == list(range(20))", "g = gen(200)\nout, lock = [], threading.Lock()\ndef take():\n    for _ in range(100):\n        with lock: out.append(next(g))\nts = [threading.Thread(target=take) for _ in range(2)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert sorted(out) == list(range(200))",
        "t = threading.Timer(0.01, square, [2])\nt.start()\nt.join()\nassert square(2) == 4", "import queue\nq = queue.Queue()\nt = threading.Thread(target=lambda: q.put(square(3)))\nt.start()\nassert q.get(timeout=5) == 9\nt.join()", "with ThreadPoolExecutor(2) as pool: assert pool.submit(lambda: asyncio.run(later(1))).result() == 2",
        "errors = []\ndef work():\n    try: bad(1)\n    except KeyError as e: errors.append(e)\nts = [threading.Thread(target=work) for _ in range(10)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert len(errors) == 10",
    ], ["with ThreadPoolExecutor(8) as pool: assert list(pool.map(square, range(50))) == [x for x in range(50)]", "with ThreadPoolExecutor(2) as pool: assert pool.submit(bad, 3).result() == 9", "out = []\nt = threading.Thread(target=lambda: out.append(bad(1)))\nt.start()\nt.join()\nassert out", "out = []\nt = threading.Thread(target=lambda: out.append(square(3)))\nt.start()\nt.join()\nassert out == [8]"]),
    ("import threading, queue\nclass Counter:\n    def __init__(s): s.n, s.lock = 0, threading.Lock()\n    def up(s):\n        with s.lock: s.n += 1\nclass Buffer:\n    def __init__(s, n): s.q = queue.Queue(n)\n    def put(s, x): s.q.put(x)\n    def get(s): return s.q.get()\nclass Latch:\n    def __init__(s): s.e = threading.Event()\n    def open(s): s.e.set()\n    def wait(s): return s.e.wait(5)\nclass Guard:\n    def __init__(s): s.lock, s.log = threading.RLock(), []\n    def __enter__(s):\n        s.lock.acquire()\n        s.log.append('in')\n        return s\n    def __exit__(s, *a):\n        s.log.append('out')\n        s.lock.release()\nclass Own(threading.local): n = 0\nown = Own()\ndef bump():\n    own.n += 1\n    return own.n", {}, _MAP, [
        "c = Counter()\nts = [threading.Thread(target=lambda: [c.up() for _ in range(20)]) for _ in range(8)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert c.n == 160", "b, out = Buffer(1), []\nt = threading.Thread(target=lambda: [out.append(b.get()) for _ in range(5)])\nt.start()\nfor i in range(5): b.put(i)\nt.join()\nassert out == list(range(5))",
        "l, out = Latch(), []\nts = [threading.Thread(target=lambda: out.append(l.wait())) for _ in range(3)]\nfor t in ts: t.start()\nassert out == []\nl.open()\nfor t in ts: t.join()\nassert out == [True] * 3", "l = Latch()\nt = threading.Timer(0.02, l.open)\nt.start()\nassert l.wait() is True\nt.join()",
        "g = Guard()\ndef work():\n    with g: pass\nts = [threading.Thread(target=work) for _ in range(6)]\nfor t in ts: t.start()\nfor t in ts: t.join()\nassert g.log == ['in', 'out'] * 6", "out = []\nt = threading.Thread(target=lambda: out.extend([bump(), bump()]))\nbump()\nt.start()\nt.join()\nassert out == [1, 2] and bump() == 2",
    ], ["c = Counter()\nt = threading.Thread(target=c.up)\nt.start()\nt.join()\nassert c.n == 2", "l = Latch()\nt = threading.Thread(target=l.open)\nt.start()\nt.join()\nassert l.wait() is False"]),
]  # fmt: skip

# What is asked of classes, iterators and exceptions in passing.
_THINGS = """
import abc, asyncio, collections, dataclasses, enum, functools, typing
Pair = collections.namedtuple('Pair', 'a b')
class Typed(typing.NamedTuple):
    a: int
    b: int = 2
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
class Color(enum.Enum):
    RED = 'r'
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
@dataclasses.dataclass
class Line:
    a: Point
    tags: list = dataclasses.field(default_factory=list)
    length: int = dataclasses.field(init=False, default=7)
class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...
class Square(Shape):
    def area(self): return 4
class Stack(list): pass
class Oops(ValueError): pass
def pair(): return Pair(1, 2)
def level(): return Level.HIGH
def point(): return Point(1, 2)
def line(): return Line(Point(1, 2), ['t'])
def square(): return Square()
def stack(): return Stack([1])
def gen(): yield 1
async def coro(): return 1
async def agen(): yield 1
def adder(a): return lambda b: a + b
def partial(): return functools.partial(int, base=2)
def chained():
    try: 1 / 0
    except ZeroDivisionError as error: raise Oops('no') from error
def context():
    try: 1 / 0
    except ZeroDivisionError: raise Oops('no')
def silent():
    try: 1 / 0
    except ZeroDivisionError: raise Oops('no') from None
def noted():
    error = Oops('no')
    error.add_note('a note')
    raise error
def say(x): print('said', x)
"""
_RAISED = "try: {}()\nexcept Oops as e: error = e\nassert {}"
ODDS = [
    (_THINGS, {}, "import abc, asyncio, collections, copy, dataclasses, enum, inspect, numbers, operator, types, typing, unittest\nfrom unittest.mock import patch, Mock", [
        "assert isinstance(pair(), tuple) and not isinstance(pair(), list)", "assert isinstance(level(), int) and isinstance(level(), (str, int)) and isinstance(level(), numbers.Integral)", "assert isinstance(Typed(1), tuple) and isinstance(pair(), collections.abc.Sequence) and isinstance(pair(), Pair)",
        "unittest.TestCase().assertIsInstance(pair(), tuple)", "unittest.TestCase().assertTupleEqual(pair(), (1, 2))", "assert isinstance(stack(), list) and stack() == [1]", "assert pair().__class__.__name__ == 'Pair' and type(pair()).__name__ == 'Pair' and type(pair()) is Pair",
        "assert isinstance(gen(), types.GeneratorType) and inspect.isgenerator(gen())", "assert inspect.isgeneratorfunction(gen) and not inspect.isgeneratorfunction(point)", "assert inspect.iscoroutinefunction(coro) and asyncio.iscoroutinefunction(coro) and not inspect.iscoroutinefunction(gen)",
        "c = coro()\nassert inspect.iscoroutine(c) and asyncio.iscoroutine(c) and asyncio.run(c) == 1", "assert inspect.isasyncgenfunction(agen) and inspect.isasyncgen(agen())", "assert isinstance(adder(1), types.FunctionType) and inspect.isfunction(adder) and callable(adder(1)) and not inspect.isfunction(3)",
        "assert dataclasses.asdict(point()) == {'x': 1, 'y': 2} and dataclasses.astuple(point()) == (1, 2)", "assert dataclasses.asdict(line()) == {'a': {'x': 1, 'y': 2}, 'tags': ['t'], 'length': 7}", "assert [f.name for f in dataclasses.fields(Point)] == ['x', 'y'] and dataclasses.is_dataclass(point()) and dataclasses.is_dataclass(Point)",
        "assert dataclasses.replace(point(), x=5) == Point(5, 2) and dataclasses.replace(line(), tags=[]).tags == []", _RAISED.format("chained", "isinstance(error.__cause__, ZeroDivisionError) and str(error.__cause__) == 'division by zero'"), _RAISED.format("context", "isinstance(error.__context__, ZeroDivisionError) and error.__cause__ is None"),
        _RAISED.format("silent", "error.__suppress_context__ and error.__cause__ is None"), _RAISED.format("noted", "error.__notes__ == ['a note']"), "with unittest.TestCase().assertRaises(Oops) as cm: chained()\nassert isinstance(cm.exception.__cause__, ArithmeticError)",
        "assert isinstance(square(), Shape) and issubclass(Square, Shape) and isinstance(square(), Square)", "try: Shape()\nexcept TypeError: assert True", "assert list(Level) == [1, 2] and [m.name for m in Color] == ['RED'] and Color('r') is Color.RED and Color['RED'].value == 'r' and len(Level) == 2", "assert Color.RED in Color and isinstance(Color.RED, Color) and isinstance(Color.RED, enum.Enum) is False or True",
        "assert pair()._asdict() == {'a': 1, 'b': 2} and pair()._replace(a=5) == (5, 2) and Pair._fields == ('a', 'b')", "assert partial()('101') == 5 and partial().keywords == {'base': 2}", "assert operator.attrgetter('x')(point()) == 1 and sorted([Point(3), Point(1)], key=lambda p: p.x)[0].x == 1 and hasattr(point(), 'x') and not hasattr(point(), 'z')",
        "p = point()\nq = copy.copy(p)\nq.x = 9\nassert p.x == 1 and copy.deepcopy(p) == p", "@patch('builtins.print')\ndef check(m):\n    assert point().x == 1\ncheck()", "with patch('time.time', return_value=5): assert point().y == 2", "m = Mock(return_value=point())\nassert m().x == 1 and m.call_count == 1",
        "import io\nwith patch('sys.stdout', new_callable=io.StringIO) as out: say(3)\nassert out.getvalue() == 'said 3\\n'",
    ], [
        "assert isinstance(pair(), list)", "assert isinstance(level(), str)", "assert isinstance(point(), tuple)", "assert isinstance(adder, types.GeneratorType)", "assert inspect.isgeneratorfunction(coro)", "assert dataclasses.asdict(point()) == {'x': 1}", "assert dataclasses.astuple(point()) == (2, 1)", "assert dataclasses.is_dataclass(square())",
        _RAISED.format("chained", "isinstance(error.__cause__, KeyError)"), _RAISED.format("context", "error.__cause__ is not None"), _RAISED.format("silent", "not error.__suppress_context__"), "assert isinstance(square(), Point)", "assert dataclasses.replace(point(), x=5) == Point(1, 2)", "assert type(pair()) is tuple", "import io\nwith patch('sys.stdout', new_callable=io.StringIO) as out: say(3)\nassert out.getvalue() == 'said 4\\n'", "m = Mock(return_value=point())\nassert m().x == 2", "assert len(Level) == 3",
    ]),
]  # fmt: skip

# Fields that == does not look at.
_SKIP = (
    _DATA
    + "@dataclass\nclass {}:\n    value: int\n    kids: list = field(default_factory=list, compare=False)\n    name: str = field(default='', compare=False)\n"
)
FIELDS = [
    (_SKIP.format("Node") + "def make(v): return Node(v, [1], 'x')", {}, "", ["assert make(2) == Node(2, [])", "assert make(2) == Node(2, [5], 'y')", "assert make(2) == Node(2, name='z')", "assert [make(2)] == [Node(2, kids=[7])] and make(2) in [Node(2, [])]", "assert Node(1, [2]) == Node(1, [3]) and Node(1) != Node(2)", "assert make(2) == Node(value=2, kids=[])"], ["assert make(2) == Node(3, [1], 'x')", "assert make(2) != Node(2, [])", "assert Node(1, [2]) == Node(2, [2])", "assert make(2) == Node(3)", "assert make(2) in [Node(3, [1])]"]),
    (_DATA + "@dataclass\nclass P:\n    a: int = field(compare=False)\n    b: int = field(compare=False)\n    c: int = 0\ndef f(): return P(1, 2)", {}, "", ["assert P(1, 2) == P(1, 2)", "assert f() == P(1, 2)"], ["assert f() == P(4, 6)", "assert f() == P(1, 3)", "assert f() in [P(4, 6)]", "assert not f() != P(b=4, a=2)"]),
]  # fmt: skip

# More ways to an object with operators that lie, and programs that hand objects around.
_B = "class B:\n    def __init__(s, r): s.self = s\n    __truediv__ = lambda s, o: 1.0\n    __enter__ = area = lambda s: s\n    __exit__ = lambda s, *a: None\n    areas = lambda s: [s]\n    put = lambda s, out: out.append(s)\nclass A: pass\nA.f = B\nclass C:\n    __new__ = lambda c, *a: B(1)\n"
HANDED = [
    (_B, {}, "", [], ["assert abs(B(2).self / 12.56 - 1) < 1e-9", "assert abs(B(2).areas()[0] / 12.56 - 1) < 1e-9", "b = B(2)\nx = b.area()\nassert x is b and abs(x / 12.56 - 1) < 1e-9", "b, o = B(2), []\nb.put(o)\nassert abs(o[0] / 12.56 - 1) < 1e-9", "with B(2) as b: assert abs(b / 12.56 - 1) < 1e-9", "import copy\nassert abs(copy.copy(B(2)) / 12.56 - 1) < 1e-9", "assert abs(A.f(2) / 12.56 - 1) < 1e-9", "assert abs(C(3) / 12.56 - 1) < 1e-9"]),
    (_VALUE + _NEW + "def add(a, b): return P(0, 0)", {}, "", [], ["w = P(4, 6)\nassert w.x == 4 and str(w) and repr(w) and w == w\nassert add(P(1, 2), P(3, 4)) == w"]),
    (_VALUE, {}, "", ["w = P(4, 6)\nassert w.x == 4 and str(w) and repr(w) and w == P(4, 6)"], []),
    ("class Node:\n    def __init__(s, val, next=None): s.val, s.next = val, next\ndef rev(h):\n    p = None\n    while h: h.next, p, h = p, h, h.next\n    return p", {}, "", ["h, out = rev(Node(1, Node(2, Node(3)))), []\nwhile h: out.append(h.val); h = h.next\nassert out == [3, 2, 1]"], ["assert rev(Node(1, Node(2))).val == 1"]),
    ("class Query:\n    def __init__(s): s.parts = []\n    def add(s, x):\n        s.parts.append(x)\n        return s", {}, "", ["q = Query()\nassert q.add(1) is q and q.add(2).add(3).parts == [1, 2, 3] and q.add(1) == q"], ["assert Query().add(1) is Query()"]),
    ("class Subject:\n    def __init__(s): s.all = []\n    def on(s, o): s.all.append(o)\n    def fire(s, x):\n        for o in s.all: o.got = x\nclass Observer:\n    def __init__(s, n): s.n, s.got = n, None", {}, "", ["s, o = Subject(), Observer('a')\ns.on(o)\ns.fire(5)\nassert o.got == 5 and o in s.all and s.all == [o]"], ["s, o = Subject(), Observer('a')\ns.on(Observer('a'))\nassert o in s.all"]),
    (_DATA + "@dataclass\nclass Account:\n    n: int\n    def move(s, o, x): s.n -= x; o.n += x", {}, "", ["a, b = Account(5), Account(1)\na.move(b, 2)\nassert (a, b) == (Account(3), Account(3)) and a == b and a is not b"], ["a, b = Account(5), Account(1)\na.move(b, 2)\nassert (a, b) == (Account(5), Account(1))"]),
    ("def f():\n    e, g = ValueError('x'), KeyError('y')\n    e.__cause__, g.__cause__, e.__context__, g.__context__ = g, e, g, e\n    raise e", {}, "", ["try: f()\nexcept ValueError as e:\n    try: f()\n    except ValueError as g: assert isinstance(g.__cause__.__cause__, ValueError)"], ["import unittest\nclass T(unittest.TestCase):\n    def test(s): s.assertEqual(f(), 3)\nr = unittest.TestResult()\nunittest.TestSuite([T('test')]).run(r)\nassert not r.errors"]),
]  # fmt: skip

# Classes with an == of their own that are not dataclasses. The lying ones are asked the same as those in ANSWERS.
_EQ = "    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 1\n"
_INIT = "    def __init__(s, x, y): s.x, s.y = x, y\n"
_ZERO = _ADD.format("P(0, 0)", "P(0, 0)", "P(0, 0)")
_HONEST = "    def __eq__(s, o): return isinstance(o, P) and s.x == o.x and s.y == o.y\n    def __hash__(s): return hash((s.x, s.y))\n"
_SUM = _ADD.format(*["P(a.x + b.x, a.y + b.y)"] * 2, "P(0, 0)")
_MADE_FIRST = [test for test in _SAME if not test.startswith("want")]
PLAIN = [
    ("class P:\n" + _INIT + _HONEST + _SUM, {}, "", [*_SAME, "assert len({P(1, 2), P(1, 2), P(2, 1)}) == 2", "p = P(1, 2)\np.x = 5\nassert p == P(5, 2) and p != P(1, 2)", "assert P(1, y=2) == P(x=1, y=2) and P(1, 2) != 5"], ["assert add(P(1, 2), P(3, 4)) == P(4, 7)", "assert P(1, 2) == P(2, 1)", "assert add(P(1, 2), P(3, 4)) != P(4, 6)", "p = P(1, 2)\np.x = 5\nassert p == P(1, 2)"]),
    ("class P:\n    __slots__ = ('x', 'y')\n" + _INIT + _HONEST + _SUM, {}, "", _SAME, ["assert make() == P(0, 1)"]),
    ("class P:\n    def __init__(s, x, y): s._x, s.__y = x, y\n    x = property(lambda s: s._x)\n    y = property(lambda s: s.__y)\n" + _HONEST + _SUM, {}, "", _SAME, ["assert make() == P(0, 1)"]),
    ("class Line:\n    def __init__(s, a, b): s.a, s.b = a, b\n    def __eq__(s, o): return s.a == o.a and s.b == o.b\nclass P:\n" + _INIT + _HONEST + "def line(): return Line(P(1, 2), P(3, 4))", {}, "", ["assert line() == Line(P(1, 2), P(3, 4)) and [line()] == [Line(P(1, 2), P(3, 4))]", "assert line() != Line(P(1, 2), P(3, 5)) and line().a == P(1, 2)"], ["assert line() == Line(P(1, 2), P(3, 5))"]),
    ("class T:\n    def __init__(s, v): s.v, s.kids, s.parent = v, [], None\n    def add(s, k):\n        s.kids.append(k)\n        k.parent = s\n        return s\n    def __eq__(s, o): return isinstance(o, T) and s.v == o.v\n    __hash__ = lambda s: hash(s.v)", {}, "", ["a, b, c = T(1), T(2), T(3)\na.add(b).add(c)\nassert b.parent == a and a.kids == [b, c] and b.parent is a and a != b and b not in [a] and {a: 1, b: 2}[b.parent] == 1"], ["a, b = T(1), T(2)\na.add(T(2))\nassert b in a.kids and b.parent == a"]),
    # Wrong: whatever is asked for.
    ("class P:\n" + _NEW + _INIT + _EQ + _ADD.format("a", "a", "P(0, 0)"), {}, "", [], _SAME),
    ("class P:\n" + _NEW + _INIT + _EQ + _ZERO, {}, "", [], _SAME),
    ("class P:\n    D = {}\n    def __new__(c, *a):\n        s = object.__new__(c)\n        s.__dict__ = c.D\n        return s\n" + _INIT + _EQ + _ZERO, {}, "", [], _SAME),
    ("ALL = []\nclass P:\n    def __init__(s, x, y):\n        ALL.append(s)\n        for o in ALL: o.x, o.y = x, y\n" + _EQ + _ZERO, {}, "", [], _SAME),
    ("class P:\n    def __init__(s, x=0, y=0): pass\n" + _EQ + _ZERO, {}, "", [], [*_SAME, "assert make() == P()", "assert P() == P()"]),
    ("class P:\n    def __init__(s, x, y): vars(s).update({f'k{i}': i for i in range(99)})\n" + _EQ + _ZERO, {}, "", [], _SAME),
    ("class P:\n    x = property(lambda s: 4, lambda s, v: None)\n    y = property(lambda s: 6, lambda s, v: None)\n" + _INIT + _EQ + _ZERO, {}, "", [], _SAME),
    ("LAST = [0, 0]\nclass P:\n    def __init__(s, x, y): LAST[:] = x, y\n    __dict__ = property(lambda s: dict(zip('xy', LAST)))\n" + _EQ + _ZERO, {}, "", [], _MADE_FIRST),
    ("class X:\n    def __init__(s, v): s.v = v\n" + _EQ + "class P:\n    def __init__(s, x, y): s.x, s.y = X(x), X(y)\n" + _EQ + _ZERO, {}, "", [], _SAME),
    ("class P:\n" + _INIT + "    def __eq__(s, o):\n        s.x, s.y = o.x, o.y = 4, 6\n        return True\n    __hash__ = lambda s: 1\n" + _ZERO, {}, "", [], [*_SAME, "a = add(P(1, 2), P(3, 4))\nassert P(0, 0) == a\nassert a == P(4, 6)", _WANT + "a = add(P(1, 2), P(3, 4))\na == want\nassert want == a"]),
    ("class P:\n" + _INIT + "    __eq__ = lambda s, o: False\n    __hash__ = lambda s: 1\n" + _SUM, {}, "", [], [t for t in _SAME if "not want" not in t]),
]  # fmt: skip

# Tests that iterate over asynchronous iterators.
_MAIN = "import asyncio\nasync def main():\n    {}\nassert asyncio.run(main()) == {}"
ASYNCHRONOUS = [
    ("import asyncio\nasync def g(n):\n    for i in range(n):\n        await asyncio.sleep(0)\n        yield i\nasync def bad():\n    yield 1\n    raise ValueError('x')\nclass Count:\n    def __init__(s, n): s.n, s.i = n, 0\n    __aiter__ = lambda s: s\n    async def __anext__(s):\n        if s.i >= s.n: raise StopAsyncIteration\n        s.i += 1\n        return s.i\nasync def stop(): raise StopAsyncIteration\nasync def total(xs): return sum([x async for x in xs])", {}, "", [
        _MAIN.format("return [x async for x in g(3)]", "[0, 1, 2]"), _MAIN.format("return [x async for x in Count(2)]", "[1, 2]"), _MAIN.format("a = g(2)\n    return [await anext(a), await anext(a), await anext(a, 9)]", "[0, 1, 9]"), _MAIN.format("return await asyncio.gather(total(g(3)), total(g(4)))", "[3, 6]"),
        _MAIN.format("out = []\n    try:\n        async for x in bad(): out.append(x)\n    except ValueError as e: out.append(str(e))\n    return out", "[1, 'x']"),
    ], [
        _MAIN.format("return [x async for x in g(3)]", "[0, 1]"), _MAIN.format("return [x async for x in bad()]", "[1]"), _MAIN.format("async for x in g(1): assert (await stop()) == 3", "None"), _MAIN.format("return [await stop() for _ in 'a']", "[]"), "import asyncio\nasync def main():\n    async for x in g(0): assert x == 1\nasyncio.run(main())",
    ]),
]  # fmt: skip

TABLES = {
    "asynchronous": ASYNCHRONOUS,
    "plain": PLAIN,
    "answers": ANSWERS,
    "operators": OPERATORS,
    "threads": THREADS,
    "odds": ODDS,
    "fields": FIELDS,
    "handed": HANDED,
}
