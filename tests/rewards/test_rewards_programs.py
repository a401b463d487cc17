"""rewards/programs.py: programs that read and print, and functions that are called, in the real sandbox. About 6 s."""
# ruff: noqa: E501

import importlib
import json
import math
import sys
import textwrap

import launch
import pytest

from rewards import programs_child
from rewards.sandbox import judge as sandbox

if not (sandbox._seccomp_available() and sandbox._landlock_abi()):  # rewards.programs refuses to be imported then
    pytest.skip("this kernel or container has no seccomp or no Landlock", allow_module_level=True)

from rewards import programs  # noqa: E402
from rewards.programs import MAX_TESTS, compute_score  # noqa: E402
from rewards.programs_compare import same_output, same_value  # noqa: E402

SUMS = {"inputs": ["3\n1 2 3\n", "2\n5 5"], "outputs": ["6\n", "10"]}
RIGHT = {"score": 1.0, "acc": 1.0, "loaded": 1.0, "timeout": 0.0}
TOTAL = "print(sum(map(int, input().split())))"


def score(program, truth=SUMS):
    return compute_score("apps", f"```python\n{textwrap.dedent(program)}\n```", truth)


# Ways to read numbers and print their sum, as people write them.
HONEST = {
    "input": f"n = int(input())\n{TOTAL}",
    "main": f"def main():\n    input()\n    {TOTAL}\nif __name__ == '__main__':\n    main()",
    "readline": f"import sys\ninput = sys.stdin.readline\nn = input()\n{TOTAL}\n",
    "iteration": "import sys\nfor i, line in enumerate(sys.stdin):\n    if i: print(sum(map(int, line.split())))",
    "bytes": "import sys\n_, *x = sys.stdin.buffer.read().split()\nsys.stdout.buffer.write(b'%d' % sum(map(int, x)))",
    "open(0)": "print(sum(map(int, open(0).read().split()[1:])))",
    "/dev/stdin": "import pathlib\nprint(sum(map(int, pathlib.Path('/dev/stdin').read_text().split()[1:])))",
    "fdopen": "import os\nx = os.fdopen(os.open('/dev/stdin', 0)).read()\nprint(sum(map(int, x.split()[1:])))",
    "sys.__stdin__": "import sys\nx = sys.__stdin__.read()\nprint(sum(map(int, x.split()[1:])), file=sys.__stdout__)",
    "_exit": f"import os, sys\ninput()\n{TOTAL}\nsys.stdout.flush()\nos._exit(0)",
    "__main__": f"import __main__\nclass A: pass\nassert __main__.A is A\ninput()\n{TOTAL}",
    "byte order mark": f"\ufeffinput()\n{TOTAL}",
    "descriptors": "import os\nos.write(1, str(sum(map(int, os.read(0, 99).split()[1:]))).encode())",
    "exit": f"input()\n{TOTAL}\nexit()",
    "sys.exit": f"import sys\ninput()\n{TOTAL}\nsys.exit(1)",
    "threads": f"import threading\ndef main():\n    input()\n    {TOTAL}\nthreading.Thread(target=main).start()",
    "atexit": f"import atexit\nn = input()\natexit.register(lambda: {TOTAL})",
    "forgotten imports": "f: Callable = max\nsys.stdin.readline()\nprint(reduce(add, map(int, input().split())))",
    "deep recursion": f"def f(n):\n    return n and 1 + f(n - 1)\nassert f(20000) == 20000\ninput()\n{TOTAL}",
    "closed output": f"import sys\ninput()\n{TOTAL}\nsys.stdout.close()",
    "buffered": """
        import io, os, sys
        class Reader(io.IOBase):
            def __init__(self, file):
                self.fd, self.mode, self.data = file.fileno(), file.mode, io.BytesIO()
            def readline(self):
                self.data = io.BytesIO(self.data.read() + os.read(self.fd, max(os.fstat(self.fd).st_size, 8192)))
                return self.data.readline().decode()
        class Writer(Reader):
            def write(self, text): self.data.write(text.encode())
            def flush(self):
                os.write(self.fd, self.data.getvalue())
                self.data = io.BytesIO()
        sys.stdin, sys.stdout = Reader(sys.stdin), Writer(sys.stdout)
        sys.stdin.readline()
        print(sum(map(int, sys.stdin.readline().split())))""",
}

READS = {  # expressions that are the whole input, as text or bytes
    "the size of the file": ("os", "os.read(0, os.fstat(0).st_size)"),
    "the size by name": ("os", "os.read(0, os.path.getsize('/dev/stdin'))"),
    "a stream in memory": ("io, os", "io.BytesIO(os.read(0, os.fstat(0).st_size)).read()"),
    "mmap": ("mmap", "mmap.mmap(0, 0, access=mmap.ACCESS_READ).read()"),
    "mmap by name": ("mmap", "mmap.mmap(fileno=0, length=0, prot=mmap.PROT_READ)[:]"),
    "fileinput": ("fileinput", "''.join(fileinput.input())"),
    "raw": ("sys", "sys.stdin.buffer.raw.readall()"),
    "FileIO": ("io", "io.BufferedReader(io.FileIO(0)).read()"),
    "detached": ("sys", "sys.stdin.detach().read()"),
    "fdopen": ("os", "os.fdopen(0, 'rb').read()"),
    "unbuffered": ("os", "open(0, 'rb', 0).read()"),
    "/dev/fd/0": ("os", "open('/dev/fd/0').read()"),
    "peek": ("sys", "sys.stdin.buffer.peek() and sys.stdin.read()"),
    "readinto": ("sys", "sys.stdin.buffer.readinto(b := bytearray(99)) and b.strip(bytes(1))"),
    "select": ("select, sys", "select.select([sys.stdin], [], [], 0)[0][0].read()"),
    "not a terminal": ("sys", "'' if sys.stdin.isatty() else ''.join(iter(sys.stdin.readline, ''))"),
}
HONEST |= {
    way: f"import {modules}\nprint(sum(map(int, ({read}).split()[1:])))" for way, (modules, read) in READS.items()
}
HONEST |= {
    "next of lines": "input = iter(open(0).read().splitlines()).__next__\ninput()\n" + TOTAL,
    "open(1)": "with open(1, 'wb') as f: f.write(b'%d' % sum(map(int, open(0).read().split()[1:])))",
    "raw output": "import sys\nsys.stdout.buffer.raw.write(b'%d' % sum(map(int, sys.stdin.read().split()[1:])))",
    "a large stack": f"""
        import sys, threading
        sys.setrecursionlimit(10**7)
        threading.stack_size(2**30)
        def f(n): return n and 1 + f(n - 1)
        def main():
            assert f(90_000) == 90_000
            input()
            {TOTAL}
        threading.Thread(target=main).start()""",
}


@pytest.mark.parametrize("way", HONEST)
def test_however_a_program_reads_and_prints(way):
    assert score(HONEST[way]) == RIGHT


def test_wrong_programs():
    wrong = RIGHT | {"score": 0.0, "acc": 0.0}
    assert score("print(6)") == wrong | {"score": 0.5}
    assert score("print(input())") == score("") == score("1 / 0") == score("sum(map(int, numbers))") == wrong
    assert score("print(6") == wrong | {"loaded": 0.0}
    assert score("import sys\nfor i in range(200_000): print(i)") == wrong  # 1.3 MB of output
    assert compute_score("apps", "I cannot do that.", SUMS)["score"] == 0


def test_a_program_that_never_ends(monkeypatch):
    monkeypatch.setattr(programs, "TIMEOUT_S", 0.2)
    program = "if input() == '2':\n    while True: pass\nprint(6)"
    assert score(program) == {"score": 0.5, "acc": 0.0, "loaded": 1.0, "timeout": 1.0}


def test_runs_do_not_see_each_other():
    count = "try:\n    seen += 1\nexcept NameError:\n    seen = 1\nprint(seen)"
    assert score(count, {"inputs": ["", "", ""], "outputs": ["1", "1", "1"]}) == RIGHT


def test_cheats_earn_nothing():
    for program in (
        "import sys\nsys.modules['solution'].run = lambda text: '6'\nprint(1)",  # one of two: it may print 6 as well
        "import sys\nclass T(str):\n    __eq__ = lambda a, b: True\nsys.modules['solution'].run = lambda text: T('6')",
        "import sys\nsys.modules['solution'].run = lambda text: type('A', (), {'splitlines': lambda s: []})()",
        "import os\nos._exit(0)",
        "import os\nprint(6)\nos._exit(0)",  # not flushed, so never printed
        "import os\nos._exit = print\nos.read = lambda *a: b''",
        "print(open('/proc/self/cmdline').read())",
    ):
        assert score(program)["acc"] == 0


def test_asserts_hold_in_an_optimized_interpreter():
    """python -O drops assert statements: every program would pass."""
    truth = {"inputs": ["1"], "outputs": ["1"]}
    program = f"from rewards import programs\nprint(programs.compute_score('', 'print(2)', {truth})['acc'])"
    assert launch.run("-c", program, PYTHONOPTIMIZE=1).splitlines()[-1] == "0.0"


def test_the_first_tests_count():
    truth = {"inputs": list(map(str, range(30))), "outputs": [str(i if i < MAX_TESTS else -1) for i in range(30)]}
    assert score("print(input())", json.dumps(truth)) == RIGHT
    assert score("print(int(input()) // 2 * 2)", truth)["score"] == 0.5


@pytest.mark.parametrize(
    "found, expected, same",
    [
        ("1 2\n3\n", "1 2 \n\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("2 1", "1 2", False),
        ("1\n2", "2\n1", False),
        ("0.3333", "0.333333", False),
        ("0.3333333", "0.333333", True),
        ("1e2", "100.0", True),
        ("100", "100.00", True),
        ("100.0", "100", False),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("x", "", False),
        (None, "", False),
    ],
)
def test_outputs_are_compared_by_line_and_word(found, expected, same):
    assert same_output(found, expected) is same


def test_functions_and_methods():
    truth = {"fn_name": "shift", "inputs": ["[1, 2]\n3", [[4], 5]], "outputs": ["[4, 5]", [[9]]]}
    assert score("def shift(a, b): return [x + b for x in a]", truth) == RIGHT
    assert score("def shift(a, b): return tuple(x + b for x in a)", json.dumps(truth)) == RIGHT
    method = "def shift(self, a: List[int], b: int) -> List[int]:\n        return [x + b for x in a]"
    assert score(f"class Solution:\n    {method}", truth) == RIGHT
    assert score("def shift(a, b): return [4, 5]", truth)["score"] == 0.5
    assert score("def other(a, b): return [4, 5]", truth) == RIGHT | {"score": 0.0, "acc": 0.0}
    assert same_value({1: (2, 3)}, {"1": [2, 3]}) and not same_value([4, 5], [4]) and same_value(4, [4])


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "returned, expected, same",
    [
        (0.1 + 0.2, 0.3, True),
        ([1, (0.1 + 0.2,)], [1, [0.3]], True),
        ({"a": 0.1 + 0.2, 1: "x"}, {"a": 0.3, "1": "x"}, True),
        (0.1 + 0.2, [0.3], True),  # in a list of its own
        (1.000001, 1.0, True),
        (3, 3.0, True),
        (3.0, 3, True),
        (NAN, NAN, True),
        ([-INF], [-INF], True),
        (-0.0, 0.0, True),
        (True, 1, True),  # as in the judges of these data sets
        (0.31, 0.3, False),
        ([1, [0.31]], [1, [0.3]], False),
        (3.0000001, 3, False),  # integers are exact
        (10**17 + 1, 10**17, False),
        ("0.30000000000000004", "0.3", False),
        ("0.3", 0.3, False),
        (NAN, 1.0, False),
        (INF, 1e308, False),
        (10**400, 1e308, False),
        (-1.0, 1.0, False),
        (None, 0.0, False),
        ([0.3, 0.3], [0.3], False),
        ({"a": 0.3}, {"b": 0.3}, False),
    ],
)
def test_floats_of_calls_have_the_tolerance_of_printed_ones(returned, expected, same):
    assert same_value(returned, expected) is same
    if expected in (0.3, 3, "0.3"):  # in the sandbox, too
        truth = {"fn_name": "f", "inputs": [[0]], "outputs": [expected]}
        assert score(f"def f(x): return {returned!r}", truth)["acc"] == same


@pytest.mark.parametrize(
    "program",
    ["print(10**int(input()))", "print(int('1' + '0' * int(input())))", "print(f'{10**int(input()):d}')", "import json\nprint(json.dumps(10**int(input())))", "print('%d' % 10**int(input()))"],
)  # fmt: skip
def test_integers_have_any_number_of_digits(program):
    truth = {"inputs": ["5000"], "outputs": ["1" + "0" * 5000]}
    assert score(program, truth) == RIGHT
    assert score(program.replace("10**int", "11**int").replace("'1' +", "'2' +"), truth)["acc"] == 0


def test_long_integers_of_calls():
    long = "7" * 5000
    truth = {"fn_name": "f", "inputs": [long, f"[{long}, 1]"], "outputs": [long, f"[{long}, 1]"]}
    assert score("def f(x): return x", truth) == RIGHT
    assert score("def f(x): return x + 1 if type(x) is int else [x[0] + 1, 1]", truth)["acc"] == 0
    assert score("def f(x): return int(str(x)) if type(x) is int else x", json.dumps(truth)) == RIGHT


def test_lines_may_be_lists():
    assert score(HONEST["input"], {"inputs": [["3", "1 2 3"]], "outputs": [["6"]]}) == RIGHT


@pytest.mark.parametrize(
    "truth",
    [
        "",
        "no json",
        None,
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"inputs": [1], "outputs": ["1"]},
        {"fn_name": "f", "inputs": ["x"], "outputs": ["1"]},
    ],
)
def test_a_bad_ground_truth_is_named(truth):
    with pytest.raises(ValueError, match="ground truth .*inputs"):
        score("print(1)", truth)


def test_what_runs_in_the_sandbox_changes_nothing_where_it_is_only_read():
    """With a higher limit, text such as "[" * 200,000 would end a reward process instead of raising."""
    before = sys.getrecursionlimit()
    importlib.reload(programs_child)
    assert sys.getrecursionlimit() == before
