"""A user's compute_score: how it is found, how it is called, and what happens when it fails."""

import math
import os

import pytest

from rl.scoring import load_reward_function, score_samples
from rl.types import Sample

ROWS = [
    {"data_source": f"set {i}", "reward_model": {"style": "rule", "ground_truth": str(i)}, "extra_info": {"index": i}}
    for i in range(5)
]
TEXTS = ["right 0", "right 1", "right 2", "right 3", "right 4"]
SAMPLES = [Sample([1], [2], [1], [0.0], "stop", i) for i in (3, 0, 4, 1, 2)]  # not in the order of the rows


def score(compute_score, samples=SAMPLES):
    return score_samples(compute_score, samples, [TEXTS[s.row_index] for s in samples], ROWS)


def test_every_sample_is_scored_with_its_own_row():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        return 10.0 * int(ground_truth)

    assert score(compute_score) == [30.0, 0.0, 40.0, 10.0, 20.0]
    assert calls == [(f"set {i}", f"right {i}", str(i), {"index": i}) for i in (3, 0, 4, 1, 2)]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1, 1.0),
        (0.0, 0.0),
        (True, 1.0),
        (False, 0.0),
        (-2.5, -2.5),
        ({"score": 0.25, "acc": True}, 0.25),
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        ({"score": math.nan}, None),
        ({"acc": 1.0}, None),
        ("wrong", None),
        (None, None),
        ([1.0], None),
    ],
)
def test_what_a_reward_function_may_return(returned, expected):
    [result] = score(lambda *_: returned, SAMPLES[:1])
    assert result == expected and type(result) is type(expected)


def test_failures_are_none_the_rest_is_scored_and_one_message_names_the_row(capsys):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if ground_truth == "0":
            raise ZeroDivisionError("no such luck")
        return math.nan if ground_truth in "14" else 1.0

    assert score(compute_score) == [1.0, None, None, None, 1.0]
    out, err = capsys.readouterr()
    assert out == "" and err.count("reward function failed") == 1
    assert "row 0" in err and "ZeroDivisionError: no such luck" in err and "'right 0'" in err
    assert "compute_score" in err  # the traceback leads to the user's line
    assert score(compute_score, SAMPLES[:1]) == [1.0] and capsys.readouterr().err == ""


def test_a_value_that_is_no_number_is_said_with_its_value(capsys):
    assert score(lambda *_: -math.inf, SAMPLES[2:3]) == [None]
    err = capsys.readouterr().err
    assert "row 4" in err and "returned -inf" in err


def test_no_samples_no_scores():
    assert score_samples(lambda *_: 1.0, [], [], ROWS) == []


# ---------------------------------------------------------------------------------------------------------------------
# Finding the function

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Answer:  # with such annotations, it looks its module up by name
    value: float


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return Answer(0.5).value


def other(data_source, solution_str, ground_truth, extra_info=None):
    return 0.75


constant = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(("suffix", "expected"), [("", 0.5), (":", 0.5), (":compute_score", 0.5), (":other", 0.75)])
def test_a_verl_style_file_with_or_without_a_name(file, suffix, expected):
    assert load_reward_function(f"{file}{suffix}")("set", "text", "truth") == expected


def test_a_path_is_relative_to_where_the_user_is_then_to_the_repository(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert load_reward_function("mine.py:other")("set", "text", "truth") == 0.75
    assert not os.path.exists("rewards/gsm8k.py")
    gsm8k = load_reward_function("rewards/gsm8k.py:compute_score")
    assert (gsm8k("gsm8k", "so #### 72", "72"), gsm8k("gsm8k", "so #### 71", "72")) == (1.0, 0.0)
    (file.parent / "rewards").mkdir()
    (file.parent / "rewards" / "gsm8k.py").write_text("compute_score = lambda *_: 9.0")
    assert load_reward_function("rewards/gsm8k.py")("gsm8k", "so #### 71", "72") == 9.0


def test_two_files_of_the_same_name_do_not_mix(tmp_path):
    functions = []
    for value in (1.0, 2.0):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "reward.py").write_text(f"VALUE = {value}\n\ndef compute_score(*_):\n    return VALUE\n")
        functions.append(load_reward_function(f"{folder / 'reward.py'}"))
    assert [function() for function in functions] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no/such/file.py:compute_score", ["no/such/file.py", "path/to/file.py:function"]),
        ("rewards:compute_score", ["no file 'rewards'"]),  # a folder
        ("MINE:missing", ["MINE", "no function 'missing'"]),
        ("MINE:constant", ["no function 'constant'"]),
        ("", ["no file ''"]),
    ],
)
def test_mistakes_name_the_flag_and_the_file(file, spec, words):
    spec = spec.replace("MINE", str(file))
    with pytest.raises(ValueError, match="--custom-reward-function") as error:
        load_reward_function(spec)
    for word in [repr(spec), *words]:
        assert word.replace("MINE", str(file)) in str(error.value)
