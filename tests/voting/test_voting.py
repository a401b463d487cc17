"""Which answer a response gives, and which of several responses is elected."""

import pytest

from extras.voting import elected, final_answer
from rl.data.types import Score


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["7", "8", "8"], 1),
        (["7", "8", "8", "7"], 0),  # a tie goes to the answer seen first
        ([None, "8", None, "7", None], 1),  # no answer is no vote, however many there are
        ([None, "1", "2", "2"], 2),
        ([None, None], None),
        ([], None),
    ],
)
def test_majority_vote(answers, winner):
    scores = [Score(answer or "", float(i), {}, "ok", 0.0) for i, answer in enumerate(answers)]
    assert elected(scores) is (None if winner is None else scores[winner])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1+1=2\n#### 17", "17"),
        ("-3.5 apples", "-3.5"),
        ("1,234,567 is it.", "1234567"),
        ("none", None),
        (r"\boxed{1}, no: \boxed{\frac{1}{2}} of 6", r"\frac{1}{2}"),  # the last box, with the braces inside it
        (r"\boxed{ A }", "A"),
        (r"3 and \boxed{4", "4"),  # a box without an end holds nothing
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer
