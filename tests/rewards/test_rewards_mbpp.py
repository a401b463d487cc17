"""The MBPP reward and its data script; in `make thorough` on all 974 problems."""

import ast
import hashlib
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import SHARED

from data import files
from data import mbpp as mbpp_data
from rewards.sandbox import Verdict, run_tests
from rewards.sandbox import judge as sandbox

if not (sandbox._seccomp_available() and sandbox._landlock_abi()):  # rewards.mbpp refuses to be imported then
    pytest.skip("this kernel or container has no seccomp or no Landlock", allow_module_level=True)

from rewards import mbpp  # noqa: E402
from rewards.mbpp import compute_score, extract_code  # noqa: E402

SOURCE = SHARED / "mbpp" / "mbpp.jsonl"
ADD = {"test_list": ["assert f(1, 2) == 3", "assert f(0, 0) == 0", "assert f(-5, 2) == -3"]}
RIGHT = "def f(a, b):\n    return a + b"
needs_source = pytest.mark.skipif(not SOURCE.exists(), reason=f"needs {SOURCE}")


def block(code, language="python"):
    return f"```{language}\n{code}\n```"


def score(response, truth=ADD):
    return compute_score("google-research-datasets/mbpp", response, truth)


# === the reward ===


@pytest.mark.parametrize(
    "response, expected",
    [
        (block(RIGHT), {"score": 1.0, "acc": 1.0, "loaded": 1.0, "timeout": 0.0}),
        (block("def f(a, b): return 3"), {"score": 1 / 3, "acc": 0.0, "loaded": 1.0, "timeout": 0.0}),
        (block("def g(a, b): return 3"), {"score": 0.0, "acc": 0.0, "loaded": 1.0, "timeout": 0.0}),
        (block("def f(a, b: return 3"), {"score": 0.0, "acc": 0.0, "loaded": 0.0, "timeout": 0.0}),
        (block("import sys\nsys.exit(0)"), {"score": 0.0, "acc": 0.0, "loaded": 0.0, "timeout": 0.0}),
        ("I cannot do that.", {"score": 0.0, "acc": 0.0, "loaded": 0.0, "timeout": 0.0}),
        ("", {"score": 0.0, "acc": 0.0, "loaded": 1.0, "timeout": 0.0}),
        (
            block("def f(a, b):\n    while a == 0: pass\n    return a + b"),
            {"score": 2 / 3, "acc": 0.0, "loaded": 1.0, "timeout": 1.0},
        ),
    ],
)
def test_score(response, expected, short_limits):
    assert score(response) == expected


def test_ground_truth_as_text_and_with_setup():
    truth = {"test_list": ["assert f(1, int(math.sqrt(4))) == K"], "test_setup_code": "K = 3"}
    for imports in (["import math"], ["import math", "import os"]):
        assert score(block(RIGHT), json.dumps(truth | {"test_imports": imports}))["score"] == 1.0
    assert score(block(RIGHT), truth | {"test_imports": None})["score"] == 1.0  # math is known by its name


@pytest.mark.parametrize(
    "truth",
    [
        "",
        "not json",
        "[]",
        "{}",
        None,
        3,
        [],
        {"test_list": []},
        {"test_list": None},
        {"test_list": [3]},
        {"test_list": ["assert f(1, 2) == 3"], "test_setup_code": 3},
        {"test_list": ["assert f(1, 2) == 3"], "test_imports": 3},
        {"test_list": ["f(1, 2)"]},
        {"test_list": ["assert f(1, 2"]},
    ],
)
def test_ground_truth_of_another_form(truth):
    with pytest.raises(ValueError, match="test_list|no assert|not Python"):
        score(block(RIGHT), truth)


def test_a_verdict_that_says_nothing_is_no_score(monkeypatch):
    """The sandbox itself cannot be made to fail on demand, so its answer is given here."""
    monkeypatch.setattr(mbpp, "run_tests", lambda *args, **options: Verdict("sandbox_error", 0, 3))
    assert score(block(RIGHT)) is None


@pytest.mark.parametrize(
    "response, code",
    [
        ("x = 1", "x = 1"),
        (block("x = 1"), "x = 1"),
        (f"First\n{block('x = 1')}\nthen\n{block('x = 2')}\ndone", "x = 2"),
        (f"{block('x = 1')}\nIt prints\n{block('1', 'text')}", "x = 1"),
        (f"{block('x = 1', '')}\nIt prints\n{block('1', '')}", "1"),
        (f"{block('x = 1', '')}\n{block('x = 2', 'Python3')}\n{block('x = 3', 'js')}", "x = 2"),
        (block("x = 1", " py "), "x = 1"),
        ("```python\nx = 1\ny = 2", "x = 1\ny = 2"),
        ("  ```python\n  x = 1\n  ```", "  x = 1"),
        ("```python\nx = 1\n```python\nx = 2\n```", "x = 1"),
        ("```python\n```", ""),
        ("see `x`, ```y```", "see `x`, ```y```"),
        ("```python\r\nx = 1\r\n```", "x = 1\r"),
        ("", ""),
    ],
)
def test_extract_code(response, code):
    assert extract_code(response) == code


def test_extract_code_is_fast_on_any_text():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(["```", "python", "\n", " ", "`", "x = 1"], k=rng.randrange(20)))
        assert extract_code(text) in text
    for text in ("```" * 100_000, "```python\n" * 50_000, " " * 300_000 + "```", "\n" * 300_000, "`" * 300_000):
        assert len(extract_code(text)) <= len(text)


# === all problems ===


@pytest.fixture(scope="module")
def problems():
    return [json.loads(line) for line in SOURCE.read_text().splitlines()]


def judge(problems, code_of):
    """{task id: verdict}; two at a time, since the work is in the sandboxes."""
    codes = [code_of(p) for p in problems]  # some parse Python, which Python 3.11 must not do in two threads at once
    with ThreadPoolExecutor(2) as pool:
        verdicts = pool.map(
            lambda p, code: run_tests(code, p["test_list"], setup=p["test_setup_code"], timeout_s=15), problems, codes
        )
        return {p["task_id"]: verdict for p, verdict in zip(problems, verdicts, strict=True)}


@needs_source
@pytest.mark.thorough  # below, twenty rows of the data have it too
def test_every_reference_solution_passes(problems):
    verdicts = judge(problems, lambda p: p["code"])
    assert len(verdicts) == 974
    assert {task: v for task, v in verdicts.items() if v != Verdict("pass", 3, 3)} == {}


@needs_source
@pytest.mark.thorough  # below, twenty rows of the data have it too
def test_no_wrong_answer_passes(problems):
    """Every function returns a text that no problem asks for. The next test says where None would be right."""

    def stub(problem):
        names = [n.name for n in ast.parse(problem["code"]).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        return "\n".join(f"def {name}(*args, **kwargs): return 'no problem asks for this'" for name in names)

    verdicts = judge(problems, stub)
    assert {task: v for task, v in verdicts.items() if (v.status, v.passed) != ("fail", 0)} == {}


@needs_source
def test_none_passes_no_problem_and_one_assert_of_a_few(problems):
    none = [p for p in problems if any(test.endswith("None") for test in p["test_list"])]
    verdicts = judge(none, lambda p: "def " + ast.parse(p["test_list"][0]).body[0].test.left.func.id + "(*a): return")
    right = {395: 1, 431: 1, 452: 1, 546: 1, 746: 1, 755: 1, 761: 1, 954: 2}
    assert {task: (v.status, v.passed) for task, v in verdicts.items()} == {t: ("fail", n) for t, n in right.items()}


# === the data ===


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """{eval split: {file: rows}}"""
    if not SOURCE.exists():
        pytest.skip(f"needs {SOURCE}")
    tables = {}
    for split in ("validation", "test"):
        folder = tmp_path_factory.mktemp(split)
        counts = mbpp_data.main(mbpp_data.Args(source=str(SOURCE), output_dir=folder, eval_split=split))
        tables[split] = {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "test")}
        assert counts == {name: len(rows) for name, rows in tables[split].items()}
    return tables


def ids(rows):
    return [row["extra_info"]["task_id"] for row in rows]


def test_splits(tables):
    for split in tables:
        assert ids(tables[split]["train"]) == list(range(601, 975))
    assert ids(tables["validation"]["test"]) == list(range(511, 601))
    assert ids(tables["test"]["test"]) == list(range(11, 511))


def test_a_row_in_full(tables):
    (row,) = [row for row in tables["validation"]["train"] if row["extra_info"]["task_id"] == 607]
    source = next(json.loads(line) for line in SOURCE.read_text().splitlines() if '"task_id": 607,' in line)
    assert row["data_source"] == "google-research-datasets/mbpp"
    assert row["ability"] == "code"
    assert row["extra_info"] == {
        "split": "train",
        "index": 6,
        "task_id": 607,
        "question": source["text"],
        "answer": "```python\n" + "\n".join(source["code"].split("\r\n")) + "\n```",
    }
    assert row["reward_model"]["style"] == "rule"
    assert json.loads(row["reward_model"]["ground_truth"]) == {
        "test_list": source["test_list"],
        "test_setup_code": "",
        "test_imports": [],
    }
    assert row["prompt"] == [
        {
            "role": "user",
            "content": "Write a function to search a literals string in a string and also find the location within the "
            "original string where the pattern occurs by using regex. Complete this code:\n\n```python\n"
            "def find_literals(text, pattern):\n    pass\n```\n\nWrite it in Python, with the standard library only. "
            "Put the whole code into one block that starts with ```python and ends with ```.",
        }
    ]


def test_prompts_name_what_is_called_and_show_no_test(tables):
    for row in [*tables["test"]["train"], *tables["test"]["test"], *tables["validation"]["test"]]:
        (message,) = row["prompt"]
        tests = json.loads(row["reward_model"]["ground_truth"])["test_list"]
        shown = ast.parse(extract_code(message["content"]))
        names = {node.name for node in shown.body}
        called = {
            n.func.id
            for n in ast.walk(ast.parse("\n".join(tests)))
            if isinstance(n, ast.Call) and hasattr(n.func, "id")
        }
        assert names & called, message
        assert not any(test in message["content"] for test in tests)


def test_the_reward_takes_the_rows(tables):
    for row in tables["test"]["test"][:20]:
        answer = f"Here it is.\n{row['extra_info']['answer']}\n"
        assert compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"])["score"] == 1.0
        stub = row["prompt"][0]["content"]
        result = compute_score(row["data_source"], stub, row["reward_model"]["ground_truth"])
        assert result["loaded"] == 1.0 and result["acc"] == 0.0


def source_row(**changes):
    row = {"task_id": 700, "text": "Add.", "code": RIGHT, "test_list": ADD["test_list"], "test_setup_code": ""}
    return row | changes


def test_shown_tests():
    (message,) = mbpp_data.to_row(source_row(), "train", 0, show_tests=True)["prompt"]
    assert (
        "It must satisfy these tests:\n\n```python\n" + "\n".join(ADD["test_list"]) + "\n```\n\n" in message["content"]
    )


def test_stub_of_a_class_keeps_its_constructor_only():
    code = "class P:\n    x = 1\n    def __init__(self, a): self.a = a\n    def m(self): pass\n"
    code += "def h(): pass\ndef f(p): h()"
    assert mbpp_data.stub(code, "assert f(P(1)) == 1") == (
        "class P:\n\n    def __init__(self, a):\n        self.a = a\n\ndef f(p):\n    pass"
    )


@pytest.mark.parametrize(
    "row, message",
    [
        (source_row(code="def g(): pass"), "train row 3, task 700: the tests use nothing that the code defines"),
        (source_row(code="def f("), "train row 3, task 700: .*fix the source"),
        ({"text": "Add."}, r"train row 3: has \['text'\], not \['code'"),
    ],
)
def test_bad_source_rows(row, message):
    with pytest.raises(ValueError, match=message):
        mbpp_data.to_row(row, "train", 3)


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="--source /no/such/file: no such file"):
        mbpp_data.main(mbpp_data.Args(source="/no/such/file", output_dir=tmp_path / "out"))
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(json.dumps(source_row(task_id=i)) for i in range(601, 900)))
    with pytest.raises(ValueError, match="lacks 75 tasks of train, the first is 900"):
        mbpp_data.main(mbpp_data.Args(source=str(short), output_dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_hub_layout(tmp_path, monkeypatch, capsys):
    """The hub's four parquet files give the same rows as one jsonl file. The download itself is left out."""
    rows = [source_row(task_id=i) for i in range(1, 975)]
    (tmp_path / "hub" / "full").mkdir(parents=True)
    for name, part in {
        "prompt": rows[:10],
        "test": rows[10:510],
        "validation": rows[510:600],
        "train": rows[600:],
    }.items():
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "hub" / "full" / f"{name}-00000-of-00001.parquet")
    monkeypatch.setattr(files.huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path / "hub"))
    assert mbpp_data.main(mbpp_data.Args(output_dir=tmp_path / "a")) == {"train": 374, "test": 90}
    (tmp_path / "mbpp.jsonl").write_text("\n".join(map(json.dumps, rows)))
    mbpp_data.main(mbpp_data.Args(source=str(tmp_path / "mbpp.jsonl"), output_dir=tmp_path / "b"))
    printed = capsys.readouterr().out
    for name in ("train", "test"):
        first, second = ((tmp_path / folder / f"{name}.parquet").read_bytes() for folder in "ab")
        assert first == second
        assert printed.count(hashlib.sha256(first).hexdigest()) == 2
