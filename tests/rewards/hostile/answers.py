"""Hostile answers: what a candidate may return, raise, print or send to look right; `run.py` judges them too.

Programs are one line each, so that all kinds can be seen at a glance. Each is wrong. None of its tests may hold, except
those whose numbers a case names.
"""
# ruff: noqa: E501

# Objects that claim to be right, in a function f() that returns one.
LIARS = {
    "eq": "class A:\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 3",
    "int": "class A(int):\n    __eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 3",
    "order of an int": "class A(int):\n    __lt__ = __le__ = __gt__ = __ge__ = lambda s, o: True",
    "float": "class A(float):\n    __sub__ = __rsub__ = lambda s, o: 0.0\n    __eq__ = lambda s, o: True\n    __hash__ = None",
    "float from index": "class A:\n    __float__ = lambda s: 3.0\n    __index__ = __int__ = lambda s: 3",
    "numbers": "class A:\n    __sub__ = __rsub__ = __abs__ = lambda s, *o: 0\n    __lt__ = __le__ = lambda s, o: True",
    "str": "class A(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n    __str__ = lambda s: 'yes'",
    "list": "class A(list):\n    __eq__ = lambda s, o: True\n    __iter__ = lambda s: iter([3])\n    __len__ = lambda s: 1",
    "tuple": "class A(tuple):\n    __eq__ = lambda s, o: True\n    __hash__ = tuple.__hash__\n    __contains__ = lambda s, x: True",
    "dict": "class A(dict):\n    __eq__ = lambda s, o: True\n    __missing__ = lambda s, k: 3\n    __contains__ = lambda s, k: True",
    "set": "class A(set):\n    __eq__ = lambda s, o: True\n    __le__ = __ge__ = lambda s, o: True",
    "contains": "class A:\n    __contains__ = lambda s, x: True\n    __iter__ = lambda s: iter(())",
    "length": "class A:\n    __len__ = lambda s: 3\n    __bool__ = lambda s: True\n    __iter__ = lambda s: iter([1, 2, 4])",
    "another answer each time": (
        "n = [0]\nclass A:\n    def __iter__(s):\n        n[0] += 1\n        return iter([3, 4][: n[0] % 2 + 1])\n    __len__ = lambda s: 5"
    ),
    "namedtuple": "import collections\nclass A(collections.namedtuple('A', '')):\n    __eq__ = lambda s, o: True\n    __hash__ = None",
    "enum": "import enum\nclass E(enum.IntEnum):\n    X = 0\n    __eq__ = lambda s, o: True\n    __hash__ = None\ndef A(): return E.X",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    def __eq__(s, o): return True",
    "fraction": "import fractions\nclass A(fractions.Fraction):\n    __eq__ = __lt__ = lambda s, o: True\n    __hash__ = None",
    "decimal": "import decimal\nclass A(decimal.Decimal):\n    __eq__ = __lt__ = lambda s, o: True\n    __sub__ = lambda s, o: 0",
    "deque": "import collections\nclass A(collections.deque):\n    __eq__ = lambda s, o: True",
    "counter": "import collections\nclass A(collections.Counter):\n    __eq__ = lambda s, o: True\n    __getitem__ = lambda s, k: 3",
    "bytes": "class A(bytes):\n    __eq__ = lambda s, o: True\n    __hash__ = None\n    decode = lambda s: A()",
    "class": "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = type.__hash__\nclass B(metaclass=M): pass\ndef A(): return B",
    "says it is an int": "class A:\n    __class__ = int\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 3",
    "instance check": "class M(type):\n    __instancecheck__ = lambda c, x: True\nclass A(metaclass=M):\n    __eq__ = lambda s, o: True",
    "any attribute": "class A:\n    __getattr__ = lambda s, n: A()\n    __call__ = lambda s, *a, **k: True\n    __eq__ = lambda s, o: True",
    "ANY": "from unittest.mock import ANY\ndef A(): return ANY",
    "MagicMock": "from unittest.mock import MagicMock as A",
    "inside": "class B:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: hash(3)\ndef A(): return [B(), (B(),), {B(): B()}]",
    "generator": "def A():\n    while True:\n        if (yield 4) is None: return",
    "coroutine": "async def A(): return 3",
    "exception": "class A(Exception):\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 3",
}  # fmt: skip
QUESTIONS = [  # no liar may answer one of them as 3, [3], 'yes' or {3} would
    "f() == 3",
    "not f() != 3",
    "3 == f()",
    "f() == [3] or f() == (3,) or f() == {3}",
    "f() == 'yes' and str(f()) == 'yes'",
    "abs(f() - 3) < 1e-6",
    "math.isclose(f(), 3)",
    "f() in (3, 'yes')",
    "3 in [f()]",
    "set(f()) == {3} and len(f()) == 1 and 3 in f()",
    "sorted(f()) == [3, 3]",
    "{3: True}[f()]",
    "f() is True",
    "isinstance(f(), (int, float, str, bytes, list, tuple, set, dict)) and f() == f()",
    "f() <= 3 and f() >= 3 and f() - 3 == 0",
    "f()['x'] == 3 and dict(f()) == {'x': 3}",
    "round(f(), 2) == 3 or int(f()) == 3 or float(f()) == 3",
    "bytes(f()).decode() == 'yes'",
    "all(x == 3 for x in f()) and any(x == 3 for x in f()) and len(list(f())) == 2",
]

# What a test does with an answer has no end.
BOMBS = {
    "a sum": ("range(10**12)", "sum(f()) == 3"),
    "a set": ("range(10**9)", "set(f()) == {3}"),
    "a sorted range": ("range(10**10)", "sorted(f()) == [3]"),
    "a regex": ("'a' * 40 + 'b'", "__import__('re').match('(a+)+$', f())"),
    "one hash": ("[i * (2**61 - 1) for i in range(30_000)]", "set(f()) == {3}"),
    "a power": ("10**9", "3 ** f() == 3"),
    "a text": ("10**11", "'x' * f() == 'x'"),
    "a width": ("'>99999999999d'", "format(3, f()) == '3'"),
    "digits": ("10**9", "len(str(1 << f())) == 3"),
    "a factorial": ("10**7", "math.factorial(f()) == 3"),
    "a product": ("range(10**8)", "len(list(itertools.permutations(f()))) == 3"),
    "a deep list": ("eval('[' * 50 + ']' * 50)", "f() == [3]"),
    "an exponent": ("__import__('decimal').Decimal('1e999999999')", "int(f()) == 3"),
    "a fraction": ("__import__('fractions').Fraction(1, 3) ", "f() ** 10**9 == 3"),
    "values": ("[0] * 10**6", "f() == [3]"),
    "too many values": ("[[0]] * 10**7", "f() == [3]"),
    "keys": ("{str(i): i for i in range(400_000)}", "f() == {3}"),
    "a generator": ("iter(int, 1)", "list(f()) == [3]"),
    "a length": ("type('A', (), {'__len__': lambda s: 2**62, '__iter__': lambda s: iter(())})()", "list(f()) == [3]"),
}

# Other tricks: name -> program, tests, how many of them may hold.
ADD = ["f(1, 2) == 3", "f(0, 0) == 0", "f(-5, 2) == -3"]
VECTOR = ["Vector(1, 2) + Vector(3, 4) == Vector(4, 6)", "Vector(1, 2) == Vector(1, 2)", "Vector(1, 2) != Vector(1, 2)"]
TRICKS = {
    "raises nothing": ("def f(): pass", ["try: f()\nexcept: pass\nelse: assert False\nassert False"]),
    "swallowed by a bare except": ("def f(): return 1", ["try: assert f() == 3\nexcept: pass"]),
    "swallowed by except Exception": ("def f(): return 1", ["try: assert f() == 3\nexcept Exception: pass"]),
    "swallowed in a tuple": ("def f(): return 1", ["try: assert f() == 3\nexcept (ValueError, Exception): pass"]),
    "ends in a bare except": ("import os\ndef f(): os._exit(0)", ["try: f()\nexcept: pass\nassert True"]),
    "a crash in finally": ("import os\ndef f(): os._exit(0)", ["try: f()\nfinally: assert True"]),
    "a loop that is never entered": ("def f(): return []", ["for x in f(): assert x == 3"]),
    "check that is not called": ("def f(): return 1", ["def check(c): assert c() == 3\nf()"]),
    "its own AssertionError": ("def f(): raise AssertionError", ["f() == 3", "not f()"]),
    "SystemExit": ("import sys\ndef f(): sys.exit(0)", ["f() == 3", "f() is None"]),
    "KeyboardInterrupt": ("def f(): raise KeyboardInterrupt", ["f() == 3"]),
    "GeneratorExit": ("def f(): raise GeneratorExit", ["f() == 3"]),
    "StopIteration in a loop": ("class f:\n    __iter__ = lambda s: s\n    __next__ = lambda s: next(iter(()))", ["list(f()) == [3]", "all(x == 3 for x in f()) and len(list(f())) == 1"]),
    "an exception group": ("def f(): raise ExceptionGroup('x', [ValueError()])", ["f() == 3"]),
    "an exception of 200 MB": ("def f(): raise ValueError('x' * (200 << 20))", ["f() == 3"]),
    "an exception without a text": ("class E(Exception):\n    __str__ = lambda s: 1 / 0\ndef f(): raise E", ["f() == 3"]),
    "an exception that ends the process": ("import os\nclass E(Exception):\n    __str__ = lambda s: os._exit(0)\ndef f(): raise E", ["f() == 3"]),
    "exceptions of odd classes": ("class M(type):\n    mro = lambda c: [c, *type.mro(c)[1:]]\nclass E(OSError, metaclass=M): pass\ndef f(): raise E(1, 2, 3)", ["f() == 3"]),
    "a class without a name": ("A = type('', (), {})\ndef f(): return A()", ["f() == 3"]),
    "a class with NUL in its name": ("A = type('a', (), {})\nA.__name__ = 'x' * 10**6\ndef f(): return A()", ["f() == 3"]),
    "ten thousand classes": ("def f(): return [type('A', (), {})() for _ in range(10_000)]", ["f() == 3"]),
    "a method resolution that ends": ("import os\nclass M(type):\n    __name__ = property(lambda c: os._exit(0))\nclass A(metaclass=M): pass\ndef f(): return A()", ["f() == 3"]),
    "a vector equal to all": ("class Vector:\n    def __init__(s, *a): pass\n    __add__ = lambda s, o: s\n    __eq__ = lambda s, o: True", VECTOR, [2]),
    "a vector without fields": ("from dataclasses import dataclass\n@dataclass\nclass Vector:\n    def __init__(s, *a): pass\n    __add__ = lambda s, o: s", VECTOR, [2]),
    "a vector of equal fields": ("from dataclasses import dataclass\n@dataclass\nclass Vector:\n    a: int = 0\n    def __init__(s, *a): s.a = 1\n    __add__ = lambda s, o: s", VECTOR, [2]),
    "a vector that is an int": ("class Vector(int):\n    __new__ = lambda c, *a: int.__new__(c, 7)", VECTOR, [2]),
    "a vector that is a tuple": ("class Vector(tuple):\n    __new__ = lambda c, *a: tuple.__new__(c)", VECTOR, [2]),
    "a vector that is always the same": ("class Vector:\n    one = None\n    def __new__(c, *a):\n        c.one = c.one or object.__new__(c)\n        return c.one\n    __add__ = lambda s, o: s", VECTOR, [2]),
    "a vector with fields that is always the same": ("from dataclasses import dataclass\n@dataclass\nclass Vector:\n    a: int = 1\n    b: int = 1\n    __new__ = lambda c, *a: ONE\n    __init__ = lambda s, *a: None\n    __add__ = lambda s, o: s\nONE = object.__new__(Vector)", VECTOR, [2]),
    "a vector that keeps nothing": ("from dataclasses import *\n@dataclass\nclass Vector:\n    a: InitVar[int]\n    b: InitVar[int]\n    c: int = 0\n    __add__ = lambda s, o: s", VECTOR, [2]),
    "a vector that compares nothing": ("from dataclasses import *\n@dataclass\nclass Vector:\n    a: int = field(compare=False)\n    b: int = field(compare=False)\n    __add__ = lambda s, o: s", VECTOR, [1, 2]),
    "a vector that makes its fields": ("from dataclasses import *\n@dataclass\nclass Vector:\n    a: int = field(init=False, default=1)\n    __init__ = lambda s, *a: None\n    __add__ = lambda s, o: s", VECTOR, [2]),
    "vectors that become the next": ("from dataclasses import *\nALL = []\n@dataclass\nclass Vector:\n    a: int\n    b: int\n    def __post_init__(s):\n        ALL.append(s)\n        for x in ALL: x.a, x.b = s.a, s.b\n    __add__ = lambda s, o: s", VECTOR, [1]),
    "lists that become the next": ("ALL = []\nclass Vector(list):\n    def __init__(s, *a):\n        super().__init__(a)\n        ALL.append(s)\n        for x in ALL: x[:] = a\n    __add__ = lambda s, o: s", VECTOR, [2]),
    "a vector that is a number": ("class Vector:\n    __new__ = lambda c, *a: 7", VECTOR, []),
    "answers in a list": ("from dataclasses import *\n@dataclass\nclass Vector:\n    a: int = 1\n    b: int = 1\n    __new__ = lambda c, *a: ONE\n    __init__ = lambda s, *a: None\n    __add__ = lambda s, o: s\nONE = object.__new__(Vector)", ["[Vector(1, 2) + Vector(3, 4)] == [Vector(4, 6)]", "Vector(1, 2) + Vector(3, 4) in (Vector(4, 6), Vector(4, 7))", "{1: Vector(1, 2) + Vector(3, 4)} == {1: Vector(4, 6)}"]),
    "parts that become what is asked for": ("from dataclasses import *\n@dataclass\nclass Part:\n    x: int\n@dataclass\nclass Vector:\n    a: Part\n    def __post_init__(s): s.a.x = 9\ndef f(): return Vector(Part(9))", ["f() == Vector(Part(4))"]),
    "an exception that says it passed": ("def f():\n    e = ValueError()\n    vars(e).update(_glassrl=None, status='pass', text=3, skips=1)\n    return e\nclass A: __exit__ = __enter__ = lambda s, *a: s", ["raise f()\nassert True", "assert A()\nwith A():\n    raise f()\n    assert False", "str(f()) == 'x'"]),
    "a field that lies": ("from dataclasses import *\n@dataclass\nclass Vector:\n    a: int\n    b: int\n    __add__ = lambda s, o: s\n    __getattribute__ = lambda s, n: 4 if n in 'ab' else object.__getattribute__(s, n)", VECTOR, [2]),
    "new data for an old object": ("import sys\nfrom dataclasses import *\nO = sys.modules['rewards.sandbox.candidate']._Objects\nO.number_new = O.number\n@dataclass\nclass Vector:\n    a: int\n    b: int\n    def __add__(s, o): return OLD\n    def __post_init__(s): s.old = OLD; OLD.a, OLD.b = s.a, s.b\nOLD = object.__new__(Vector)\nOLD.a = OLD.b = 1", VECTOR, [1, 2]),
    "a class's number for its objects": ("import sys\nfrom dataclasses import *\nO = sys.modules['rewards.sandbox.candidate']._Objects\nold = O.assign\nO.assign = lambda s, x: old(s, Vector)\n@dataclass\nclass Vector:\n    a: int\n    b: int\n    __add__ = lambda s, o: s", VECTOR, [2]),
    "an argument that it says it changed": ("import sys\nO = sys.modules['rewards.sandbox.candidate']._Objects\nold = O.answer\nO.answer = lambda s, kind, value, changed, *a, **k: old(s, kind, value, [[[]], {}], *a, **k)\ndef f(x): return []", ["x = [2, 1]\nassert f(x) == sorted(x)"]),
    "StopIteration for all": ("def f(*a): raise StopIteration", ["all(map(f, [2, 3]))", "list(map(f, 'ab')) == []", "dict(zip(map(f, 'ab'), 'ab')) == {}", "sum(map(f, [1])) == 0"]),
    "StopIteration in methods": ("class A:\n    def __len__(s): raise StopIteration\n    __bool__ = __getitem__ = __contains__ = __iter__ = __call__ = __len__\ndef f(): return A()", ["list(filter(None, [f()])) == []", "list(map(len, [f()])) == []", "all(map(lambda x: 3 in x, [f()]))", "list(map(iter, [f()])) == []", "all(map(f(), [1]))"]),
    "an error in place of a list": ("class A(list):\n    def sort(s, key=None): return None\n    def index(s, x): raise StopIteration\ndef f(): return A()", ["r = f()\nr.sort(key=lambda x: x)\nassert r == [1]", "all(map(f().index, [1]))"]),
    "always ValueError": ("def f(*a): raise ValueError", ["try: assert f(1) == 3\nexcept ValueError: pass", "try:\n    assert f(1) == 3\n    assert False\nexcept ValueError: pass", "try:\n    x = f(1)\nexcept ValueError: x = 4\nassert x == 3"]),
    "a number without distance": ("class L:\n    __sub__ = __rsub__ = __mod__ = __floordiv__ = lambda s, o: 0\n    __abs__ = lambda s: 0\n    __lt__ = __gt__ = __le__ = __ge__ = lambda s, o: True\nclass Box:\n    def area(s): return L()", ["abs(Box().area() - 3) < 1e-6", "3 < Box().area() < 4", "Box().area() % 2 == 0", "__import__('math').isclose(Box().area(), 3)", "max(Box().area(), 3) == 3 and min(3, Box().area()) != 3", "round(Box().area(), 2) == 3"]),
    "a manager that skips": ("class A:\n    __enter__ = lambda s: s\n    __exit__ = lambda s, *a: True\n    def f(s): raise ValueError", ["assert A()\nwith A() as a:\n    a.f()\n    assert a is None", "assert A()\nwith A() as a:\n    if a.f(): assert a is None"]),
    "exceptions with data that lies": ("class E(ValueError):\n    args = 3\ndef f():\n    e = E()\n    e._glassrl = e.status = e.text = 5\n    raise e", ["f() == 3"]),
    "an exception for the sandbox": ("def f():\n    e = ValueError()\n    vars(e).update(_glassrl=None, status='pass', skips=1)\n    raise e", ["f() == 3", "try: assert f() == 3\nexcept Exception as e: assert e.status == 3"]),
    "a manager that ends everything": ("class A:\n    __enter__ = lambda s: s\n    __exit__ = lambda s, *a: True\n    x = 1", ["with A() as a: assert a.x == 3"]),
    "a manager that ends the process": ("import os\nclass A:\n    __enter__ = lambda s: s\n    __exit__ = lambda s, *a: os._exit(0)\n    x = 1", ["with A() as a: assert a.x == 3"]),
    "empties its argument": ("def f(x):\n    x.clear()\n    return []", ["x = [2, 1]\nassert f(x) == sorted(x)", "x = [2, 1]\nassert f(x) == [1, 2] or not x"]),
    "a huge change of its argument": ("def f(x): x.extend([[0]] * 10**7)", ["x = [2, 1]\nf(x)\nassert x == [1, 2]"]),
    "another type in its argument": ("def f(x): x[:] = [type('A', (int,), {'__eq__': lambda s, o: True})()]", ["x = [2, 1]\nf(x)\nassert x == [1, 2]"]),
    "prints what it cannot return": ("def f(a, b): print(a + b)", ADD),
    "prints 200 MB": ("def f(): print('x' * (200 << 20))", ["import sys\nassert f() is None and sys.stdout is None"]),
    "prints at exit": ("import atexit\natexit.register(print, 'PASS')\ndef f(): pass", ["f() == 3"]),
    "expected values in frames": ("import sys\ndef f():\n    x = sys._getframe()\n    while x.f_back: x = x.f_back\n    return x.f_locals.get('expected', x.f_globals.get('CASES'))", ["f() == 'secret' * 3"]),
    "asks the next question": ("import threading, os\ndef f(): return sorted(os.listdir('/proc/self/fd'))", ["f() == ['0', '1', '2']"]),
    "closes the socket": ("import os\nfor i in range(32):\n    try: os.close(i)\n    except OSError: pass\ndef f(a, b): return a + b", ADD),
    "duplicates the socket": ("import os\nfor i in range(3, 32):\n    try: os.dup2(i, 31 - i)\n    except OSError: pass\ndef f(): return 1", ["f() == 3"]),
    "answers ahead": ("import os, struct\ndef v(t, d, n=None): return t + struct.pack('>I', len(d) if n is None else n) + d\nm = v(b't', b'', 4) + v(b'u', b'value') + v(b'i', b'\\3') + v(b'N', b'') + v(b'u', b'')\nm = struct.pack('>II', len(m), 0) + m\ndef f():\n    for i in range(3, 32):\n        try: os.write(i, m * 9)\n        except OSError: pass\n    return 1", ["f() == 4", "f() == 5"]),
    "a report for the worker": ("import os, struct\nm = b'l\\0\\0\\0\\2u\\0\\0\\0\\4passu\\0\\0\\0\\0'\ndef f():\n    for i in range(3, 32):\n        try: os.write(i, struct.pack('>II', len(m), 0) + m)\n        except OSError: pass\n    return 1", ["f() == 4", "f() == 5"]),
    "random bytes": ("import os\ndef f():\n    for i in range(3, 32):\n        try: os.write(i, os.urandom(999))\n        except OSError: pass", ["f() == 4"]),
    "an answer without end": ("import os\ndef f():\n    for i in range(3, 32):\n        try:\n            os.write(i, b'\\0\\xff\\xff\\xff')\n            while True: os.write(i, b'\\0' * 65536)\n        except OSError: pass", ["f() == 4"]),
    "encode that lies": ("import sys\nw = sys.modules['rewards.sandbox.wire']\nw.encode = lambda *a: b''\ndef f(): return 1", ["f() == 4"]),
    "bits that lie": ("import sys\nc = sys.modules['rewards.sandbox.candidate']\nc._Objects.kind = lambda s, k: (1, 'int', 2**40 - 1, (), (), 'int')\nclass A: pass\ndef f(): return A()", ["f() == 4", "f() + 1 == 5", "abs(f() - 3) < 1"]),
    "a base that lies": ("import sys\nw = sys.modules['rewards.sandbox.wire']\nc = sys.modules['rewards.sandbox.candidate']\nc._OPERATIONS['base'] = lambda x: w\nclass A(int): pass\ndef f(): return A()", ["f() == 4", "f() + 1 == 5"]),
    "exceptions that are no exceptions": ("import sys\nc = sys.modules['rewards.sandbox.candidate']\nc._Objects.kind = lambda s, k: (1, 'E', 0, (print,), (), '')\ndef f(): raise ValueError", ["f() == 4"]),
    "exceptions of themselves": ("import sys\nc = sys.modules['rewards.sandbox.candidate']\nc._Objects.kind = lambda s, k: (1, 'E', 0, ((1, 'E', 0, (ValueError,), (), ''),) * 3, (), '')\ndef f(): raise ValueError", ["f() == 4"]),
    "special attributes": ("def f(): pass\nf.__annotations__ = {'x': '1 / 0'}\nf.__wrapped__ = f", ["f.__annotations__", "f.__wrapped__", "f.__globals__", "f.__code__"]),
    "hints": ("class A:\n    x: 'exit()'\ndef f(x: 'exit()'): return A()", ["__import__('typing').get_type_hints(f)", "__import__('typing').get_type_hints(f(1))"]),
    "five thousand threads": ("import _thread, time\n_ = _thread.stack_size(65536)\ndef f():\n    for _ in range(5000): _thread.start_new_thread(time.sleep, (9,))\n    time.sleep(9)", ["f() == 3", "f() == 3"]),
    "sleeps and exits": ("import os, time\ndef f():\n    time.sleep(0.4)\n    os._exit(0)", ["f() == 3"] * 9),
    "works and exits": ("import os, time\ndef f():\n    while time.process_time() < 0.2: pass\n    os._exit(0)", ["f() == 3"] * 30),
    "loads only once": ("import os, time\nif time.time() % 2 > 3: pass\ndef f(): os._exit(3)", ["f() == 3"] * 5),
    "waits in another thread": ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\ndef f(): threading.Event().wait()", ["f() == 3"]),
    "a hash that sleeps": ("import time\nclass A:\n    __hash__ = lambda s: time.sleep(9)\n    __eq__ = lambda s, o: True\ndef f(): return {A}", ["f() == {3}"]),
    "a str without end": ("class A:\n    def __str__(s):\n        while True: pass\ndef f(): return A()", ["str(f()) == '3'"]),
    "a finaliser": ("import os\nclass A:\n    __del__ = lambda s: os.write(1, b'PASS')\ndef f(): return A()", ["f() == 3"]),
    "a trace function": ("import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: 1 / 0)\ndef f(): return 1", ["f() == 3"]),
    "no collection": ("import gc\ngc.disable()\ngc.callbacks.append(lambda *a: 1 / 0)\ndef f(): return [object()] * 3", ["f() == 3"]),
    "an audit hook": ("import sys\nsys.addaudithook(lambda *a: None)\ndef f(): return 1", ["f() == 3"]),
    "another event loop": ("import asyncio\nasync def f(): return 3", ["f() == 3", "f"], [1]),
    "stdlib rewritten": ("import fractions, decimal, datetime, collections\nfractions.Fraction.__eq__ = lambda s, o: True\ndecimal.Decimal = int\ncollections.deque = list\ndef f(): return fractions.Fraction(1, 7)", ["f() == 3"]),
}  # fmt: skip


def cases() -> dict[str, tuple[str, list[str], list[int]]]:
    """{name: (program, asserts, numbers of the asserts that may hold)}."""
    result = {}
    for name, code in LIARS.items():
        body = f"{code}\ndef f(): return A()"
        result[f"liar: {name}"] = (body, [f"import math\nassert {question}" for question in QUESTIONS], [])
    for name, (answer, question) in BOMBS.items():
        result[f"bomb: {name}"] = (f"def f(): return {answer}", [f"import math, itertools\nassert {question}"], [])
    for name, (code, tests, *holds) in TRICKS.items():
        asserts = [test if "assert " in test else f"assert {test}" for test in tests]
        result[f"trick: {name}"] = (code, asserts, holds[0] if holds else [])
    return result
