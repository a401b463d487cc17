"""rewards/math_dapo.py: the answer line, its fallback, and numbers by value. Hostile texts: test_rewards_math.py."""

import json

import pytest
from launch import SHARED

from rewards.math_dapo import compute_score

MATH500 = SHARED / "math/math500.jsonl"

RIGHT = {"score": 1.0, "acc": 1.0}
WRONG = {"score": -1.0, "acc": 0.0}


@pytest.mark.parametrize(
    "text, truth, right",
    [
        # as verl judges them
        ("Answer: 42", "42", True),
        (r"answer : \boxed{42}", "42", True),
        ("Answer: 1,000", "1000", True),
        ("Answer: 42 dollars", "42", True),
        ("Answer: x=42", "42", True),
        (r"\boxed{42}", "42", True),
        ("The final is 42", "42", False),
        ("Answer: 41", "42", False),
        ("ANSWER: $42$", "42", True),
        ("Answer: the answer is $42$", "42", True),
        ("Answer: 2+40=42", "42", True),
        ("Answer: 41\nno, Answer: 42", "42", True),
        ("Answer: 42\nno, Answer: 41", "42", False),
        ("Answer: 42\n\nI hope it is correct.", "42", True),
        ("Answer:\n42", "42", True),
        (r"Answer: 42 \text{ cm}^2", "42", True),
        (r"Answer: 42^\circ", "42", True),
        (r"Answer: \frac12", r"\frac{1}{2}", True),
        ("Answer: -7", "-7", True),
        ("Answer: 7", "-7", False),
        ("", "42", False),
        ("Answer:", "42", False),
        ("42", "42", False),
        # equal values are equal
        ("Answer: 42.", "42", True),
        ("Answer: 42.0", "42", True),
        ("Answer: 84/2", "42", True),
        ("Answer: 042", "42", True),
        ("Answer: 42", "042", True),
        ("Answer: **42**", "42", True),
        ("**Answer:** 42", "42", True),
        ("**Answer**: $42$.", "42", True),
        (r"Answer: \(42\)", "42", True),
        (r"so \boxed{42.0}", "42", True),
        # one guess only, and evaluated
        ("Answer: 41 or 42", "42", False),
        ("Answer: 41, 42", "42", False),
        ("Answer: 40+2", "42", False),
        ("Answer: a 42", "42", False),
        ("Answer: 42 is wrong", "42", False),
        # a truth with an equals sign
        ("Answer: $4x-5y=-50$", "4x-5y=-50", True),
        ("Answer: -50 = 4x - 5y", "4x-5y=-50", True),
        ("Answer: $x + y = 0$", "x - 3z = 0", False),
        ("Answer: $0$", "x - 3z = 0", False),
        ("Answer: $y = -50$", "4x-5y=-50", False),
        (r"Answer: $0.56 = 56\%$", r"0.56 = 56\%", True),
        (r"Answer: p = 56\%", r"0.56 = 56\%", True),
        ("Answer: 2+3=5", "x=5", True),
        ("Answer: $AB=9, CD=4$", "AB=9, CD=4", True),
        ("Answer: a=4", "4 =", False),
        ("Answer: $y = 2x$", "2x - y = 0", True),
        ("Answer: $z = 2x$", "y = 2x", False),
        # an answer line rules out the box
        (r"\boxed{42} Answer: 41", "42", False),
        (r"\boxed{41} Answer: 42", "42", True),
    ],
)
def test_verdict(text, truth, right):
    assert compute_score("math_dapo", text, truth) == (RIGHT if right else WRONG)


@pytest.mark.skipif(not MATH500.exists(), reason="needs the MATH-500 file")
def test_the_answers_of_math500_are_right():
    """Four of them hold an equals sign, such as `5x - 7y + 11z + 4 = 0`."""
    truths = {json.loads(line)["answer"] for line in MATH500.read_text().splitlines()}
    assert [truth for truth in truths if compute_score("", f"Answer: ${truth}$", truth) != RIGHT] == []


def test_only_the_end_counts():
    line, box = "Answer: 42", r"\boxed{42}"
    assert compute_score("", line + " " * (300 - len(line)), "42") == RIGHT
    assert compute_score("", line + " " * (301 - len(line)), "42") == WRONG
    assert compute_score("", box + " " * (100 - len(box)), "42") == RIGHT
    assert compute_score("", box + " " * (101 - len(box)), "42") == WRONG


def test_arguments_as_the_contract_gives_them():
    arguments = {
        "data_source": "aime_2024",
        "solution_str": "Answer: 33",
        "ground_truth": 33,
        "extra_info": {"index": 0},
    }
    assert compute_score(**arguments) == RIGHT
    with pytest.raises(ValueError, match="ground truth ''"):
        compute_score("aime_2024", "Answer: 33", "")
    with pytest.raises(ValueError, match="ground truth 'None'"):
        compute_score("aime_2024", "Answer: 33", None)
