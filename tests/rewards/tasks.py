"""Small tasks with a right and a wrong answer each: functions to complete, classes to write, programs that read."""
# ruff: noqa: E501

# name(arguments): (right body, wrong body, [asserts on c, the candidate]).
FUNCTIONS = {
    "double(x)": ("return 2 * x", "return x + 2", ["c(2) == 4", "c(5) == 10"]),
    "is_prime(n)": ("return n > 1 and all(n % i for i in range(2, int(n ** 0.5) + 1))", "return n % 2 == 1", ["c(7)", "not c(9)", "c(2)", "not c(1)"]),
    "evens(xs: List[int])": ("return [x for x in xs if x % 2 == 0]", "return xs[::2]", ["c([1, 2, 4]) == [2, 4]", "c([]) == []"]),
    "words(text)": ("return Counter(text.split())", "return {}", ["c('a b a') == {'a': 2, 'b': 1}"]),
    "mean(xs)": ("return sum(xs) / len(xs)", "return sum(xs) // len(xs)", ["abs(c([1, 2]) - 1.5) < 1e-9"]),
    "third(xs)": ("return Fraction(sum(xs), 3)", "return round(sum(xs) / 3, 3)", ["c([1, 0]) == Fraction(1, 3)"]),
    "leap(day)": ("return day.replace(year=day.year + 1) if (day.month, day.day) != (2, 29) else date(day.year + 1, 3, 1)", "return day", ["c(date(2020, 2, 29)) == date(2021, 3, 1)", "c(date(2021, 5, 6)) == date(2022, 5, 6)"]),
    "sort_in_place(xs)": ("xs.sort()", "return sorted(xs)", ["(lambda x: c(x) is None and x)([3, 1, 2]) == [1, 2, 3]"]),
    "compose(f, n)": ("return helper(n) + f", "return n + f", ["c(1, 2) == 5"]),
    "squares(n)": ("yield from (i * i for i in range(n))", "yield from range(n)", ["list(c(3)) == [0, 1, 4]", "next(c(1)) == 0"]),
    "adder(a)": ("return lambda b: a + b", "return lambda b: b", ["c(1)(2) == 3"]),
    "fails(x)": ("if x < 0: raise ValueError('negative')\n    return x", "return abs(x)", ["c(3) == 3", "raises(ValueError, c, -1)"]),
    "merge(a, b)": ("return {**a, **b}", "return {**b, **a}", ["c({1: 2}, {1: 3}) == {1: 3}"]),
    "matrix(n)": ("return [[int(i == j) for j in range(n)] for i in range(n)]", "return [[0] * n] * n", ["c(2) == [[1, 0], [0, 1]]"]),
    "reverse(s)": ("return s[::-1]", "return s", ["c('abc') == 'cba'", "c('') == ''"]),
    "pair(a, b)": ("return (min(a, b), max(a, b))", "return [min(a, b), max(a, b)]", ["c(2, 1) == (1, 2)"]),
    "last(xs)": ("return xs[-1] if xs else None", "return xs[-1]", ["c([1, 2]) == 2", "c([]) is None"]),
    "shout(s)": ("print(s.upper())", "return s.upper()", ["printed(c, 'a') == 'A\\n'"]),
    "threads(n)": ("with ThreadPoolExecutor(2) as pool: return sum(pool.map(abs, range(-n, n)))", "return 0", ["c(3) == 9"]),
    "primes_below(n)": ("return [i for i in range(2, n) if all(i % j for j in range(2, int(i ** 0.5) + 1))]", "return list(range(2, n))", ["len(c(10_000)) == 1229", "c(10) == [2, 3, 5, 7]"]),
}  # fmt: skip
HEAD = """from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from fractions import Fraction
from typing import List


def helper(n):
    return 2 * n


def {name}:
    \"\"\"One of the functions that tests judge.\"\"\"
"""
CHECK = """
import contextlib, io
from datetime import date
from fractions import Fraction

def raises(kind, function, *arguments):
    try:
        function(*arguments)
    except kind:
        return True

def printed(function, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        function(*arguments)
    return output.getvalue()

def check(c):
    {asserts}
"""

# class: (right methods, wrong methods, statements of unittest methods).
CLASSES = {
    "Counter": ("def __init__(s): s.n = 0\ndef up(s): s.n += 1", "def __init__(s): s.n = 0\ndef up(s): s.n = 1", ["x = Counter(); x.up(); x.up(); s.assertEqual(x.n, 2)"]),
    "Stack": ("def __init__(s): s.x = []\ndef push(s, v): s.x.append(v)\ndef pop(s): return s.x.pop()", "def __init__(s): s.x = []\ndef push(s, v): s.x.append(v)\ndef pop(s): return s.x.pop(0) if s.x else None", ["x = Stack(); x.push(1); x.push(2); s.assertEqual(x.pop(), 2)", "s.assertRaises(IndexError, Stack().pop)"]),
    "Vector": ("def __init__(s, a, b): s.a, s.b = a, b\ndef __add__(s, o): return Vector(s.a + o.a, s.b + o.b)\ndef __abs__(s): return (s.a ** 2 + s.b ** 2) ** 0.5", "def __init__(s, a, b): s.a, s.b = a, b\ndef __add__(s, o): return s\ndef __abs__(s): return 0", ["x = Vector(1, 2) + Vector(2, 2); s.assertEqual((x.a, x.b), (3, 4))", "s.assertAlmostEqual(abs(Vector(3, 4)), 5)"]),
    "Account": ("def __init__(s): s.total = 0\ndef pay(s, x):\n    if x <= 0: raise ValueError('no')\n    s.total += x", "def __init__(s): s.total = 0\ndef pay(s, x): s.total += x", ["x = Account(); x.pay(3); s.assertEqual(x.total, 3)", "with s.assertRaises(ValueError) as e: Account().pay(0)\ns.assertEqual(str(e.exception), 'no')"]),
    "Queue": ("def __init__(s): s.x = []\ndef __len__(s): return len(s.x)\ndef add(s, v): s.x.append(v)", "def __init__(s): s.x = []\ndef __len__(s): return 0\ndef add(s, v): pass", ["x = Queue(); x.add(1); s.assertEqual(len(x), 1)", "s.assertEqual(len(Queue()), 0)"]),
    "Table": ("def __init__(s): s.d = {}\ndef __setitem__(s, k, v): s.d[k] = v\ndef __getitem__(s, k): return s.d[k]\ndef __contains__(s, k): return k in s.d\ndef __delitem__(s, k): del s.d[k]", "def __init__(s): s.d = {}\ndef __setitem__(s, k, v): pass\ndef __getitem__(s, k): return k\ndef __contains__(s, k): return True", ["x = Table(); x['a'] = 1; s.assertEqual(x['a'], 1); del x['a']; s.assertNotIn('a', x)"]),
    "Timer": ("def __enter__(s): s.on = True; return s\ndef __exit__(s, *a): s.on = False", "def __enter__(s): s.on = True; return s\ndef __exit__(s, *a): return True", ["with Timer() as x: s.assertTrue(x.on)\ns.assertFalse(x.on)"]),
    "Countdown": ("def __init__(s, n): s.n = n\ndef __iter__(s): return iter(range(s.n, 0, -1))", "def __init__(s, n): s.n = n\ndef __iter__(s): return iter(range(s.n))", ["s.assertEqual(list(Countdown(3)), [3, 2, 1])"]),
    "Money": ("def __init__(s, x): s.x = x\ndef __lt__(s, o): return s.x < o.x\ndef __repr__(s): return f'Money({s.x})'", "def __init__(s, x): s.x = x\ndef __lt__(s, o): return False\ndef __repr__(s): return 'Money'", ["s.assertEqual(repr(min([Money(3), Money(1)])), 'Money(1)')", "s.assertTrue(Money(1) < Money(2))"]),
    "Circle": ("def __init__(s, r): s.r = r\n@property\ndef area(s): return 3 * s.r ** 2\n@classmethod\ndef unit(cls): return cls(1)", "def __init__(s, r): s.r = r\n@property\ndef area(s): return 3 * s.r\n@classmethod\ndef unit(cls): return cls(2)", ["s.assertEqual(Circle(2).area, 12)", "s.assertIsInstance(Circle.unit(), Circle); s.assertEqual(Circle.unit().r, 1)"]),
    "Cache": ("def __init__(s, n): s.n, s.d = n, {}\ndef put(s, k, v):\n    s.d.pop(k, None); s.d[k] = v\n    if len(s.d) > s.n: s.d.pop(next(iter(s.d)))\ndef get(s, k): return s.d.get(k, -1)", "def __init__(s, n): s.n, s.d = n, {}\ndef put(s, k, v): s.d[k] = v\ndef get(s, k): return s.d.get(k, -1)", ["x = Cache(1); x.put(1, 1); x.put(2, 2); s.assertEqual((x.get(1), x.get(2)), (-1, 2))"]),
    "Node": ("def __init__(s, v, *kids): s.v, s.kids = v, kids\ndef total(s): return s.v + sum(k.total() for k in s.kids)", "def __init__(s, v, *kids): s.v, s.kids = v, kids\ndef total(s): return s.v", ["s.assertEqual(Node(1, Node(2), Node(3, Node(4))).total(), 10)", "x = Node(1); s.assertIs(Node(2, x).kids[0], x)"]),
    "Poly": ("def __init__(s, *c): s.c = c\ndef __call__(s, x): return sum(k * x ** i for i, k in enumerate(s.c))", "def __init__(s, *c): s.c = c\ndef __call__(s, x): return s.c[0]", ["s.assertEqual(Poly(1, 2, 3)(2), 17)"]),
    "Log": ("def __init__(s): s.lines = []\ndef write(s, t): s.lines.append(t); print(t)", "def __init__(s): s.lines = []\ndef write(s, t): s.lines.append(t)", ["import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as o: Log().write('x')\ns.assertEqual(o.getvalue(), 'x\\n')"]),
    "Color": ("def __init__(s, name): s.name = name\ndef __eq__(s, o): return s.name == o.name\ndef __hash__(s): return hash(s.name)", "def __init__(s, name): s.name = name", ["s.assertEqual(Color('a'), Color('a'))", "s.assertNotEqual(Color('a'), Color('b'))", "s.assertEqual(len({Color('a'), Color('a')}), 1)"]),
    "Fifo": ("def __init__(s): from collections import deque; s.q = deque()\ndef add(s, x): s.q.append(x)\ndef all(s): return s.q", "def __init__(s): s.q = []\ndef add(s, x): s.q.insert(0, x)\ndef all(s): return s.q", ["from collections import deque\nx = Fifo(); x.add(1); x.add(2); s.assertEqual(x.all(), deque([1, 2]))"]),
    "Parser": ("def parse(s, t): return dict(p.split('=') for p in t.split('&') if p)", "def parse(s, t): return t.split('&')", ["s.assertDictEqual(Parser().parse('a=1&b=2'), {'a': '1', 'b': '2'})", "s.assertEqual(Parser().parse(''), {})"]),
    "Shape": ("def area(s): raise NotImplementedError\ndef describe(s): return type(s).__name__", "def area(s): return 0\ndef describe(s): return 'x'", ["s.assertRaises(NotImplementedError, Shape().area)", "s.assertEqual(Shape().describe(), 'Shape')"]),
    "Clock": ("def __init__(s, m): s.m = m % 1440\ndef __str__(s): return f'{s.m // 60:02}:{s.m % 60:02}'", "def __init__(s, m): s.m = m\ndef __str__(s): return f'{s.m // 60}:{s.m % 60}'", ["s.assertEqual(str(Clock(61)), '01:01')", "s.assertEqual(f'{Clock(1500)}', '01:00')"]),
    "Async": ("async def get(s, x):\n    import asyncio; await asyncio.sleep(0); return x + 1", "async def get(s, x): return x", ["import asyncio\ns.assertEqual(asyncio.run(Async().get(1)), 2)"]),
}  # fmt: skip

# (right program, wrong program, [(input, output)]).
PROGRAMS = {
    "sum": ("print(sum(map(int, input().split())))", "print(input())", [("1 2 3", "6"), ("5 5", "10")]),
    "echo": ("import sys\nsys.stdout.write(sys.stdin.read())", "input()", [("a\nb\n", "a\nb\n")]),
    "reverse": ("print(input()[::-1])", "print(input())", [("abc", "cba"), ("xy", "yx")]),
    "factorial": ("import math\nprint(math.factorial(int(input())))", "print(int(input()) ** 2)", [("5", "120"), ("20", "2432902008176640000")]),
    "lines": ("n = int(input())\nprint(*sorted(int(input()) for _ in range(n)), sep='\\n')", "n = int(input())\nfor _ in range(n): print(input())", [("3\n3\n1\n2", "1\n2\n3")]),
    "words": ("import sys\nfrom collections import Counter\nfor w, n in sorted(Counter(sys.stdin.read().split()).items()): print(w, n)", "print('a 2')", [("b a a", "a 2\nb 1")]),
    "mean": ("x = list(map(int, input().split()))\nprint(sum(x) / len(x))", "x = list(map(int, input().split()))\nprint(sum(x) // len(x))", [("1 2", "1.5"), ("1 1 2", "1.33333333")]),
    "yes": ("print('YES' if int(input()) % 2 == 0 else 'NO')", "print('YES')", [("2", "YES"), ("3", "NO")]),
    "grid": ("r, c = map(int, input().split())\nfor _ in range(r): print('#' * c)", "print('#')", [("2 3", "###\n###")]),
    "primes": ("n = int(input())\nprint(*[i for i in range(2, n + 1) if all(i % j for j in range(2, int(i ** .5) + 1))])", "print(2, 3, 5)", [("10", "2 3 5 7"), ("2", "2")]),
    "gcd": ("from math import gcd\nprint(gcd(*map(int, input().split())))", "print(min(map(int, input().split())))", [("12 18", "6")]),
    "until the end": ("try:\n    while True: print(int(input()) + 1)\nexcept EOFError: pass", "print(int(input()) + 1)", [("1\n2\n3", "2\n3\n4")]),
    "recursion": ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))", "print(0)", [("9000", "9000")]),
    "main": ("def main():\n    print(int(input()) * 2)\nif __name__ == '__main__': main()", "def main(): print(0)\nmain()", [("4", "8")]),
    "fast": ("import sys, os\ndata = os.read(0, 10**6).split()\nos.write(1, b' '.join(sorted(data)))", "print()", [("b a", "a b")]),
    "binary": ("print(bin(int(input()))[2:])", "print(input())", [("5", "101")]),
    "matrix": ("n = int(input())\nm = [list(map(int, input().split())) for _ in range(n)]\nfor r in zip(*m): print(*r)", "print('1 3')", [("2\n1 2\n3 4", "1 3\n2 4")]),
    "dates": ("from datetime import date, timedelta\nprint(date.fromisoformat(input()) + timedelta(days=1))", "print(input())", [("2020-02-28", "2020-02-29")]),
    "threads": ("import threading\nthreading.Thread(target=lambda: print(int(input()) + 1)).start()", "print(input())", [("1", "2")]),
    "brackets": ("d = 0\nok = True\nfor c in input():\n    d += 1 if c == '(' else -1\n    ok &= d >= 0\nprint('yes' if ok and d == 0 else 'no')", "s = input()\nprint('yes' if s.count('(') == s.count(')') else 'no')", [("(())", "yes"), (")(", "no")]),
}  # fmt: skip


def indented(text: str, by: int = 4) -> str:
    return text.replace("\n", "\n" + " " * by)


def function_task(name: str) -> tuple[dict, str, str]:
    """A row of HumanEval's form, and a right and a wrong answer: the body, and the whole function."""
    right, wrong, asserts = FUNCTIONS[name]
    test = CHECK.format(asserts="\n    ".join(f"assert {one}" for one in asserts))
    prompt = HEAD.format(name=name)
    row = {"task_id": name, "prompt": prompt, "entry_point": name.split("(")[0], "test": test}
    return row | {"canonical_solution": f"    {indented(right)}"}, f"    {right}", f"def {name}:\n    {wrong}"


def class_task(name: str) -> tuple[dict, str, str]:
    """A row with unittest methods, and a right and a wrong answer."""
    right, wrong, methods = CLASSES[name]
    cases = "".join(f"    def test_{i}(s):\n        {indented(body, 8)}\n" for i, body in enumerate(methods))
    row = {
        "task_id": name,
        "prompt": f"class {name}:\n    ...\n",
        "entry_point": name,
        "canonical_solution": f"class {name}:\n    {indented(right)}",
        "test": f"import unittest\nclass Test(unittest.TestCase):\n{cases}",
        "own_eq": "__eq__" in right,
    }
    return row, row["canonical_solution"], f"class {name}:\n    {indented(wrong)}"


def program_task(name: str) -> tuple[dict, str, str]:
    right, wrong, pairs = PROGRAMS[name]
    return {"inputs": [x for x, _ in pairs], "outputs": [y for _, y in pairs]}, right, wrong
