"""A mistake of the user ends a script with one sentence, by one rank; a bug shows its traceback. See rl/mistakes.py."""

import json
import math
import sys
import time

import launch
import pytest

import train_grpo
from rl import mistakes, stop
from rl.console import progress_line
from rl.data.rows import read_rows
from rl.flags import build, check_limits
from rl.formulas.schedule import lr_factor
from rl.run.tracking import Tracker


def ended_by(action, capsys):
    """What a script prints that ends with the error of an action."""
    with pytest.raises(Exception) as caught:
        action()
    mistakes.explain(caught.type, caught.value, caught.value.__traceback__)
    return capsys.readouterr().err


def no_folder(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    return lambda: Tracker(tmp_path, train_grpo.Args(), 0, False, enabled=True)


@pytest.fixture(autouse=True)
def named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_grpo.py", "--lr", "nan"])


def test_a_mistake_is_one_sentence(capsys, tmp_path):
    nan = lambda: check_limits(build(train_grpo.Args, lr=math.nan))  # noqa: E731
    assert ended_by(nan, capsys) == "train_grpo.py: error: --lr nan must be at least 0 and at most 1e6\n"
    said = ended_by(lambda: read_rows(tmp_path / "x.parquet"), capsys)  # a FileNotFoundError
    assert said.startswith(f"train_grpo.py: error: {tmp_path}/x.parquet: no such data file;") and said.count("\n") == 1
    said = ended_by(no_folder(tmp_path), capsys)  # an OSError
    assert said.startswith("train_grpo.py: error: ") and "is not an ordinary file" in said and said.count("\n") == 1


def not_ours():
    raise ValueError("this is a test")


BUGS = {
    "the interpreter's ValueError in our code": lambda: progress_line(1, 2, {"train/loss": "x"}),
    "our code called in a wrong way": lambda: check_limits(None),
    "a library's ValueError": lambda: json.loads("{"),
    "a ValueError of a user's own module": lambda: not_ours(),
    "an assert": lambda: lr_factor("constant", -1, 0, 0),
}


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS.keys())
def test_a_bug_shows_its_traceback(bug, capsys):
    said = ended_by(bug, capsys)
    assert said.startswith("Traceback (most recent call last):") and "train_grpo.py: error" not in said


def test_the_sentence_of_a_runtime_error_has_its_cause(capsys, tmp_path):
    source = 'try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError("the pool failed") from e\n'
    (tmp_path / "pool.py").write_text(source)
    pool = compile(source, str(tmp_path / "pool.py"), "exec")
    said = ended_by(lambda: exec(pool, {"__name__": "rl.scoring.pool"}), capsys)
    assert said == "train_grpo.py: error: the pool failed (ZeroDivisionError('division by zero'))\n"


def test_after_the_first_step_has_begun_every_error_shows_its_traceback(capsys):
    stop.start()
    try:
        stop.arm(lambda: None)
        said = ended_by(lambda: check_limits(build(train_grpo.Args, lr=math.nan)), capsys)
    finally:
        stop.end()
    assert said.startswith("Traceback") and said.endswith("ValueError: --lr nan must be at least 0 and at most 1e6\n")


def test_other_ranks_wait_until_the_first_one_has_spoken(capsys, monkeypatch, tmp_path):
    waited = []
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        said = ended_by(lambda: check_limits(build(train_grpo.Args, lr=-1.0)), capsys)
        assert said == "train_grpo.py: error: --lr -1.0 must be at least 0 and at most 1e6\n"
    assert waited == [(mistakes.PATIENCE_S, "")]
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told == said.rstrip()


def torchrun(*flags):
    process = launch.start("train_grpo.py", *flags, nproc=2)
    return launch.finish(process), process.returncode


def test_under_torchrun_one_rank_says_it_and_torchrun_repeats_it():
    output, status = torchrun("--ppo-mini-batch-size", 9, "--train-batch-size", 8, "--lr", "nan")
    before, _, report = output.partition("failed (exitcode: 1)")
    sentence = "train_grpo.py: error: --lr nan must be at least 0 and at most 1e6"
    assert status == 1 and before.count(sentence) == 1 and report.count(sentence) == 1
    assert "ValueError" not in output and "/rl/" not in output  # only torchrun's own traceback
    assert sentence in report.splitlines()[-2]  # the last line that says anything


@pytest.mark.thorough
def test_under_torchrun_one_rank_says_which_flag_there_is_not():
    output, status = torchrun("--lrr", 1e-6)
    assert status == 1 and output.count("Unrecognized options: --lrr") == 1 and "/rl/" not in output
    assert output.count("train_grpo_variants.py has the flags") == 1
