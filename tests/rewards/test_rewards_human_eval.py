"""rewards/human_eval.py and its data script: functions with check(candidate), classes with unittest. About 6 s."""
# ruff: noqa: E501

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest
import tasks

from data import human_eval as data
from rewards.sandbox import judge as sandbox

if not (sandbox._seccomp_available() and sandbox._landlock_abi()):  # rewards.human_eval refuses to be imported then
    pytest.skip("this kernel or container has no seccomp or no Landlock", allow_module_level=True)

from rewards import human_eval, programs  # noqa: E402

FUNCTIONS = [tasks.function_task(name) for name in tasks.FUNCTIONS]
CLASSES = [tasks.class_task(name) for name in tasks.CLASSES]
PROGRAMS = [tasks.program_task(name) for name in tasks.PROGRAMS]
RIGHT = {"score": 1.0, "acc": 1.0, "loaded": 1.0, "timeout": 0.0}


def block(code):
    return f"```python\n{code}\n```"


def judged(rewards, responses) -> dict:
    """{name: result} of tasks and responses; two at a time, since the work is in the sandboxes."""
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda reward, response: reward(block(response)), rewards.values(), responses)
        return dict(zip(rewards, results, strict=True))


def rewards_of(rows):
    return {
        row["task_id"]: lambda response, row=row: human_eval.compute_score("", response, json.dumps(row))
        for row in rows
    }


@pytest.mark.parametrize("kind", [FUNCTIONS, CLASSES], ids=["functions", "classes"])
def test_right_answers_pass_and_wrong_ones_do_not(kind):
    assert len(kind) == 20
    rows, right, wrong = zip(*kind, strict=True)
    assert judged(rewards_of(rows), right) == dict.fromkeys((row["task_id"] for row in rows), RIGHT)
    results = judged(rewards_of(rows), wrong)
    assert {name: result for name, result in results.items() if result["acc"] or not result["loaded"]} == {}
    stubs = [f"class {row['entry_point']}: pass\ndef {row['entry_point']}(*a, **k): pass" for row in rows]
    assert {name for name, result in judged(rewards_of(rows), stubs).items() if result["acc"]} == set()


def test_programs_that_read_and_print():
    assert len(PROGRAMS) == 20
    truths, right, wrong = zip(*PROGRAMS, strict=True)
    rewards = {
        name: lambda response, truth=truth: programs.compute_score("apps", response, truth)
        for name, truth in zip(tasks.PROGRAMS, truths, strict=True)
    }
    assert judged(rewards, right) == dict.fromkeys(rewards, RIGHT)
    assert {name: result for name, result in judged(rewards, wrong).items() if result["acc"]} == {}


def test_the_share_of_the_methods_that_pass():
    row, _, _ = tasks.class_task("Account")
    lenient = "class Account:\n    total = 3\n    def pay(s, x): pass"
    assert human_eval.compute_score("", block(lenient), row)["score"] == 0.5


@pytest.mark.parametrize(
    "code, expected",
    [
        ("    return 2 * x", "import math\n\ndef f(x):\n    '''Doc.'''\n    return 2 * x"),
        ("def f(x): return 2", "import math\n\ndef f(x): return 2"),
        ("import re\ndef f(x): return 2", "import math\n\nimport re\ndef f(x): return 2"),
        ("def f(x) return 2", "import math\n\ndef f(x) return 2"),  # does not compile, and shall not
        ("", "import math\n\ndef f(x):\n    '''Doc.'''\n"),
    ],
)
def test_what_stands_before_an_answer(code, expected):
    assert human_eval.complete(code, "import math\n\ndef f(x):\n    '''Doc.'''\n", "f") == expected


# Three rows of HumanEval's form whose tests use a helper of the prompt: its name, its body, right code, the test.
HELPERS = {
    "poly": ("(xs, x): return sum(c * x**i for i, c in enumerate(xs))", "return -xs[0] / xs[1]", "abs(poly([3, 2], f([3, 2]))) < 1e-4"),
    "encode_cyclic": ("(s): return s[1:] + s[:1]", "return xs[-1:] + xs[:-1]", "f(encode_cyclic('abc')) == 'abc'"),
    "encode_shift": ("(s): return ''.join(chr(ord(c) + K) for c in s)", "return ''.join(chr(ord(c) - K) for c in xs)", "f(encode_shift('abc')) == 'abc'"),
}  # fmt: skip


@pytest.mark.parametrize("name", HELPERS)
def test_helpers_of_the_prompt_are_its_own_in_the_tests(name):
    helper, right, test = HELPERS[name]
    prompt = f"import math\nK = 5\n\ndef {name}{helper}\n\ndef f(xs):\n    'Doc.'\n"
    row = {"prompt": prompt, "entry_point": "f", "test": f"def check(f):\n    assert {test}"}
    for answer, score in {
        f"    {right}": 1.0,
        f"def {name}{helper}\ndef f(xs): {right}": 1.0,
        f"def {name}(*a): return 0\ndef f(xs): return 'abc'": 0.0 if name == "poly" else 1.0,
        f"def {name}(*a): return 0\ndef f(xs): return 0": 0.0,
        f"def {name}(*a): return 'abc'\nf = lambda xs: xs": 0.0,
    }.items():
        assert human_eval.compute_score("", block(answer), row)["score"] == score, answer


def test_classes_of_the_prompt_stay_with_the_answer():
    """Objects of them are handed to it; what does not use them is the prompt's all the same."""
    prompt = "class Node:\n    def __init__(s, v): s.v = v\n\ndef two(): return 2\ndef make(v): return Node(v)\n\ndef f(n):\n"
    row = {"prompt": prompt, "entry_point": "f", "test": "def check(c):\n    assert c(Node(1)) == c(make(1)) == two()"}
    assert human_eval._helpers(prompt.partition("def f")[0]) == "def two():\n    return 2"
    assert human_eval.compute_score("", block("    return n.v + 1"), row)["score"] == 1.0
    assert human_eval.compute_score("", block("def two(): return 0\ndef f(n): return 0"), row)["score"] == 0.0


CASE = "import asyncio, unittest\nclass A(unittest.TestCase):\n    "


@pytest.mark.parametrize(
    "test, right, wrong",
    [
        (CASE + "@classmethod\n    def setUpClass(c): c.k = 2\n    def test(s): s.assertEqual(f(1), s.k)", 1, 0),
        (CASE + "def test_a(s): s.assertEqual(f(1), 2)\nclass B(A):\n    def test_b(s): s.assertEqual(f(0), 1)", 1, 1 / 3),
        ("import unittest\nclass M:\n    def test(s): s.assertEqual(f(1), 2)\nclass A(M, unittest.TestCase): pass", 1, 0),
        ((CASE + "async def test(s):\n        await asyncio.sleep(0)\n        s.assertEqual(f(1), 2)").replace("Test", "IsolatedAsyncioTest"), 1, 0),
        (CASE + "def test(s):\n        for x in [f(1)] * (f(1) - 1): s.assertEqual(x, 2)", 1, 0),  # none is reached
        (CASE + "def test(s):\n        with s.subTest(): s.assertEqual(f(1), 2)", 1, 0),
        (CASE + "def test(s):\n        try: f('')\n        except TypeError: pass\n        else: s.fail()", 1, 0),
        (CASE + "async def test(s): s.assertEqual(f(1), 2)", "test must show", None),  # nobody would await it
        (CASE + "@unittest.skip('')\n    def test(s): s.assertEqual(f(1), 2)", "test must show", None),
        (CASE + "@unittest.skip('')\n    def test(s): s.assertEqual(f(1), 5)\n    def test_b(s): s.assertEqual(f(1), 2)", 1, 0),
        ("import unittest\n@unittest.skip('')\nclass B(unittest.TestCase):\n    def test(s): s.fail()\nclass A(unittest.TestCase):\n    def test_b(s): s.assertEqual(f(1), 2)", 1, 0),
        (CASE + "@unittest.skipIf(True, '')\n    def test(s): s.assertEqual(f(1), 2)", "test must show", None),
        (CASE + "@unittest.skipIf(False, '')\n    def test(s): s.assertEqual(f(1), 2)", 1, 0),
        (CASE + "@unittest.skipUnless(True, '')\n    def test(s): s.assertEqual(f(1), 2)", 1, 0),
        (CASE + "@unittest.expectedFailure\n    def test(s): s.assertEqual(f(1), 1)", 1, 0),
        (CASE + "@unittest.expectedFailure\n    def test(s): s.assertEqual(f(1), 1)\n    def test_b(s): s.assertEqual(f(1), 2)", 1, 0),
        (CASE + "@unittest.expectedFailure\n    def test(s): f('')\n    def test_b(s): s.assertEqual(f(1), 2)", 1, 0),
        (CASE + "def setUp(s):\n        s.k = 2\n        s.addCleanup(lambda: s.assertEqual(f(1), s.k))\n    def test(s): s.assertEqual(f(0), f(0))", 1, 0),
        (CASE + "def test(s):\n        with s.assertRaisesRegex(TypeError, 'str'): f('')", 1, 0),
        (CASE + "def test(s):\n        s.skipTest('')\n    def test_b(s): s.assertEqual(f(1), 2)", 0.5, 0),
        (CASE + "def test(s):\n        for i in range(3):\n            with s.subTest(i=i): s.assertEqual(f(i), i + 1)", 1, 0),
        (CASE.replace("unittest\n", "unittest\nfrom unittest.mock import patch\n", 1) + "@patch('builtins.print')\n    def test(s, m): s.assertEqual(f(1), 2)", 1, 0),
        (CASE.replace("unittest\n", "unittest, io\nfrom unittest.mock import patch\n", 1) + "@patch('sys.stdout', new_callable=io.StringIO)\n    def test(s, m):\n        f(1)\n        s.assertEqual(m.getvalue(), '2\\n')", 1, 0),
        (CASE + "def test(s): s.assertEqual(f(1), 2)\n    test_b = test", "test must show", None),
    ],
)  # fmt: skip
def test_unittest_runs_its_own_cases(test, right, wrong):
    row = {"prompt": "", "entry_point": "f", "test": test}

    def score(code):
        return human_eval.compute_score("", block(code), row)["score"]

    if wrong is None:
        with pytest.raises(ValueError, match=right):
            score("def f(x): return x + 1")
    else:
        codes = ("def f(x):\n    print(x + 1)\n    return x + 1", "def f(x): return 1")
        assert tuple(map(score, codes)) == (right, wrong)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"test": 3}, "three texts"),
        ({"test": "def check(c:"}, "must be Python"),
        ({"test": "def verify(c): assert c"}, "neither check"),
        ({"test": "import unittest\nclass T(unittest.TestCase): pass"}, "neither check"),
        ({"entry_point": None}, "three texts"),
    ],
)
def test_a_bad_ground_truth_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        human_eval.compute_score("", "", FUNCTIONS[0][0] | change)
    with pytest.raises(ValueError, match="ground truth"):
        human_eval.compute_score("", "", "no json")


def test_the_data(tmp_path):
    rows = [row for row, _, _ in FUNCTIONS + CLASSES]
    source = tmp_path / "tasks.jsonl.gz"
    source.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert data.main(data.Args(source=str(source), output_dir=tmp_path / "out")) == 40
    written = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert [row["extra_info"]["task_id"] for row in written] == [row["task_id"] for row in rows]
    for row in (written[0], written[-1], written[-6]):  # a function, a class, one with == of its own
        truth, answer = row["reward_model"]["ground_truth"], row["extra_info"]["answer"]
        assert human_eval.compute_score(row["data_source"], answer, truth) == RIGHT
        assert "assert" not in row["prompt"][0]["content"]
    assert json.loads(written[-6]["reward_model"]["ground_truth"])["own_eq"] is True
    assert written[0]["prompt"][0]["content"].startswith("Complete this code:\n\n```python\nfrom collections")


@pytest.mark.parametrize(
    "row, message",
    [({"task_id": 1}, "row 0: has"), (FUNCTIONS[0][0] | {"test": "x = 1"}, "row 0, double.*no check")],
)
def test_bad_source_rows(row, message):
    with pytest.raises(ValueError, match=message):
        data.to_row(row, 0)


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="--source /no/such/file: no such file"):
        data.main(data.Args(source="/no/such/file", output_dir=tmp_path / "out"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no rows"):
        data.main(data.Args(source=str(tmp_path / "empty.jsonl"), output_dir=tmp_path / "out"))
