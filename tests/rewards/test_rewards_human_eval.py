"""rewards/human_eval.py and its data script: functions with check(candidate), classes with unittest. About 5 s."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest
import tasks

from data import human_eval as data
from rewards import sandbox

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
