import random

import pytest

from rewards.gsm8k import compute_score


def score(text, truth, method="strict", **kwargs):
    return compute_score("openai/gsm8k", text, truth, method=method, **kwargs)


@pytest.mark.parametrize(
    "text, truth, strict, flexible",
    [
        ("#### 42", "42", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### $18", "18", 1, 1),
        ("#### 18.00", "18", 1, 1),
        ("#### 18.", "18", 1, 1),
        ("the answer is 42", "42", 0, 1),
        ("the answer is 42.", "42", 0, 1),
        ("#### 41 then #### 42", "42", 1, 1),
        ("#### 42 then #### 41", "42", 0, 0),
        ("#### 42 and 7 apples", "42", 1, 0),
        ("####42", "42", 1, 1),
        ("####   42", "42", 1, 1),
        ("####\t42", "42", 1, 1),
        ("####\n42", "42", 0, 1),  # the number must stand on the line of its mark
        ("#### -5", "-5", 1, 1),
        ("#### -5", "5", 0, 0),
        ("#### -$5", "-5", 1, 1),
        ("#### $-5", "-5", 1, 1),
        ("#### +5", "5", 1, 1),
        ("#### \u22125", "-5", 1, 1),  # typographic minus
        (r"#### \$18", "18", 1, 1),
        ("#### .5", "0.5", 1, 1),
        ("#### 007", "7", 1, 1),
        ("#### 0.1", "0.10", 1, 1),
        ("#### 0.30000000000000004", "0.3", 0, 0),  # exact, not floating point
        ("#### 9007199254740993", "9007199254740992", 0, 0),
        ("#### 42%", "42", 1, 1),
        ("#### 1,234.50.", "1234.5", 1, 1),
        ("#### done: #### 42, I said ####", "42", 1, 1),
        ("3 + 4 = 10-5", "5", 0, 1),
        ("(7)-5", "5", 0, 1),
        ("x=-5", "-5", 0, 1),
        ("", "42", 0, 0),
        ("####", "42", 0, 0),
        ("#### forty-two", "42", 0, 0),
    ],
)
def test_verdict(text, truth, strict, flexible):
    assert score(text, truth) == strict
    assert score(text, truth, "flexible") == flexible


@pytest.mark.parametrize("truth", ["1234", "1,234", " 1234 ", "$1,234", "1234.0", 1234])
def test_ground_truth_is_read_by_the_same_rule(truth):
    assert score("#### 1,234", truth) == score("#### 1234", truth) == 1.0


@pytest.mark.parametrize(
    "text", ["#### 1.2.3", "#### 1,2,3", "#### 1,2,3,", "#### 1,23", "#### 1..2", "#### ,.", "#### 12,3456"]
)
def test_malformed_number_is_never_right(text):
    digits = text.removeprefix("#### ")
    for truth in ("123", "1.2", "1", "2", "3", digits, "no number"):
        assert score(text, truth) == score(text, truth, "flexible") == 0.0


def test_format_score_needs_an_answer():
    assert score("#### 41", "42", format_score=0.1) == 0.1
    assert score("#### 1.2.3", "42", format_score=0.1) == 0.1
    assert score("#### 42", "42", format_score=0.1) == 1.0
    assert score("42", "42", format_score=0.1) == 0.0
    assert score("41", "42", "flexible", format_score=0.1) == 0.1
    assert score("none", "42", "flexible", format_score=0.1) == 0.0


def test_only_the_last_300_characters_count():
    answer = "#### 42"
    assert score(answer + " " * (300 - len(answer)), "42") == 1.0
    assert score(answer + " " * (301 - len(answer)), "42") == 0.0
    assert score("42" + "x" * 299, "42", "flexible") == 0.0


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-inf", "sNaN", "١٢", "４２", "²", "9" * 5000, "1e999999999", "\ud800", "\x00", "0x2A"],
)
def test_strange_text_never_raises(number, method):
    for text in (number, f"#### {number}", f"#### {number}\n"):
        assert score(text, "42", method) == 0.0
        assert score("#### 42", text, method) == 0.0


def test_huge_numbers_are_exact():
    assert score("#### " + "9" * 290, "9" * 290) == 1.0
    assert score("#### " + "9" * 290, "9" * 289 + "8") == 0.0


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(5000):
        text, truth = ("".join(rng.choices("#### $-+.,0159\\()x\n٣−", k=rng.randrange(40))) for _ in range(2))
        assert score(text, truth) in (0.0, 1.0)
        assert score(text, truth, "flexible") in (0.0, 1.0)


def test_unknown_method():
    with pytest.raises(ValueError, match="'loose' is unknown; choose strict or flexible"):
        score("#### 42", "42", "loose")


def test_signature_for_the_reward_contract():
    assert compute_score("openai/gsm8k", "#### 42", "42", {"index": 0}) == 1.0
    assert isinstance(compute_score(data_source="x", solution_str="#### 1", ground_truth="2"), float)
