"""examples/gsm8k_agent.py: what it finds wrong, and what it asks a real server of agents after each answer."""

import helpers_agents
import pytest

from examples.gsm8k_agent import problem_of

QUESTION = {"role": "user", "content": "Natalia sold 48 clips in April, and half as many in May. How many in all?"}
RIGHT = "She sold 48/2 = 24 in May.\nThat makes 48+24 = $72.\n#### 72"
SLIP = "She sold 48/2 = 25 in May.\nThat makes 48+25 = 73.\n#### 73"
NO_END = "She sold 48/2 = 24 in May. The answer is 72."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (RIGHT, ""),
        ("#### 72", ""),
        ("#### -3", ""),
        ("1,200 * 3 = 3,600\n#### 3,600", ""),
        ("10 / 3 = 3.33\n#### 3.33", ""),
        ("2 + 3 * 4 = 14 and 20-7=13\n#### 13", ""),
        ("5 apples = 10\n#### 10", ""),  # no sum
        (SLIP, "48/2 is not 25."),
        ("10 / 3 = 3.3\n#### 3.3", "10 / 3 is not 3.3."),
        ("3/0 = 0\n#### 0", "3/0 is not 0."),
        ("007 + 1 = 9\n#### 9", "007 + 1 is not 9."),
        (NO_END, "There is no line with #### and the answer."),
        ("", "There is no line with #### and the answer."),
    ],
)
def test_what_is_wrong_with_an_answer(text, problem):
    assert problem_of(text) == problem


def asked(*answers):
    """The messages of each request of one agent, which gets these answers."""
    return [body["messages"] for body in helpers_agents.asked("examples/gsm8k_agent.py", QUESTION, *answers)]


def test_it_tells_what_is_wrong_and_at_last_begins_anew():
    told = {"role": "user", "content": "48/2 is not 25. Write the whole solution again."}
    second = [QUESTION, {"role": "assistant", "content": SLIP}, told]
    assert asked(RIGHT) == [[QUESTION]]
    assert asked(SLIP, RIGHT) == [[QUESTION], second]
    assert asked(SLIP, NO_END, SLIP) == [[QUESTION], second, [QUESTION]]
