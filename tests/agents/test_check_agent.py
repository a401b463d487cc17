"""examples/check_agent.py: what it asks a real server of agents, by the answers that it gets, and its scores."""

import helpers_agents
import pytest

from examples.check_agent import answer_of, compute_score, is_sound

QUESTION = {"role": "user", "content": "4+3-5+2+1=?"}
GUESS = "#### 6"
RIGHT = "4+3=7\n7-5=2\n2+2=4\n4+1=5\n#### 5"
SLIP = "4+3=7\n7-5=3\n3+2=5\n5+1=6\n#### 6"  # its second step does not add up
UNGRADED = RIGHT.replace("####", "So")


def asked(*answers):
    """The messages of each request of one agent, which gets these answers."""
    bodies = helpers_agents.asked("examples/check_agent.py", QUESTION, *answers)
    assert all(body["max_tokens"] == 40 > len(RIGHT) for body in bodies)
    return [body["messages"] for body in bodies]


def said(text):
    return {"role": "assistant", "content": text}


def test_it_asks_once_if_the_steps_are_right():
    assert asked(RIGHT) == [[QUESTION]]


@pytest.mark.parametrize("first", [GUESS, SLIP, UNGRADED])
def test_it_asks_again_with_its_history_if_a_step_is_wrong_or_missing(first):
    assert asked(first, RIGHT) == [[QUESTION], [QUESTION, said(first), QUESTION]]


def test_it_throws_its_history_away_at_last():
    assert asked(GUESS, SLIP, GUESS) == [[QUESTION], [QUESTION, said(GUESS), QUESTION], [QUESTION]]


def test_what_is_sound():
    assert is_sound(RIGHT) and answer_of(RIGHT) == "5"
    assert not any(map(is_sound, (GUESS, SLIP, UNGRADED, RIGHT[6:], "", RIGHT + " or so")))
    assert [answer_of(x) for x in (GUESS, UNGRADED, "", "#### 6 or so")] == ["6", "", "", ""]


def test_a_right_answer_scores_by_how_often_the_agent_has_asked():
    def score(text, **environment):
        return compute_score("arithmetic", text, "5", {"environment": environment})

    assert [score(RIGHT, calls=n)["score"] for n in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert score(RIGHT, calls=2)["acc"] == 1.0 and score(RIGHT) == {"score": 1.0, "acc": 1.0}
    assert score(GUESS, calls=1) == score("", calls=3) == {"score": 0.0, "acc": 0.0}
