"""What there is to say of a conversation: for reward functions, the log, metrics, and advantages by turn."""

import json
import math

import pytest
import torch
from helpers_data import response, scored

from extras.agents import metrics_of, outcome_from_json, outcome_to_json, returns_by_turn, token_rewards
from extras.agents.outcome import make_outcome, turns_of
from rl.data.types import Batch, Outcome

SAID = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}]
SAID += [{"role": "assistant", "content": "2"}]
REPORT = {"calls": 2, "huge": 10**400, "text": "x", "right": True}


def talk(value, lengths, rewards=(), **changes):
    """A response with such turns and such a score."""
    report = {"calls": len(lengths)}
    outcome = make_outcome(SAID, report, lengths, rewards)
    more = dict(num_sampled=sum(lengths), score=scored(value), outcome=outcome)
    return response(length=sum(lengths) + 5, **more | changes).without_texts()


def test_an_outcome_says_to_each_what_it_needs():
    outcome = make_outcome(SAID, REPORT, [4, 1], [0.5, 1.0])
    numbers = {"calls": 2.0, "right": 1.0}
    assert outcome.facts == {"turns": 2, "lengths": [4, 1], "rewards": [0.5, 1.0], "numbers": numbers}
    assert (outcome.reward, outcome.text) == (1.5, "2")
    assert outcome.extra_info == {"messages": SAID, "environment": {"turn_rewards": [0.5, 1.0]} | REPORT}
    expected = {"turns": 2, "messages": SAID, "environment": numbers, "turn_rewards": [0.5, 1.0]}
    assert outcome.record == expected
    of_others = response(score=scored(1.0), outcome=outcome).without_texts().outcome
    assert of_others == (outcome.facts, 1.5, "", {}, {})


def test_what_says_nothing_has_one_turn_and_no_rewards():
    outcome = make_outcome([], {"seconds": 0.5}, [], [])
    assert (outcome.facts["turns"], outcome.reward, outcome.text) == (1, 0.0, "")
    assert "turn_rewards" not in outcome.record and outcome.extra_info["environment"] == {"seconds": 0.5}


@pytest.mark.parametrize("rewards", [[], [0.5], [0.5, -1.0]], ids=str)
def test_an_outcome_travels_as_json(rewards):
    outcome = make_outcome(SAID, REPORT, [4, 1], rewards)
    assert outcome_from_json(outcome_to_json(outcome)) == outcome
    assert Outcome(*json.loads(json.dumps(outcome))) == outcome  # as a checkpoint has it


def test_the_score_of_a_response_is_divided_among_its_turns():
    responses = [
        talk(3.0, [2, 3, 1], [0.5]),  # what no turn has got stands at the last one
        response(length=7, score=scored(2.0)),  # of a run without a partner
        talk(None, [4]),
        talk(1.0, [1, 1], [0.25, 0.75]),
    ]
    rewards, lengths = turns_of(responses)
    nan = math.nan
    expected = [[0.5, 0.0, 2.5], [2.0, nan, nan], [nan, nan, nan], [0.25, 0.75, nan]]
    torch.testing.assert_close(rewards, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert lengths.tolist() == [[2, 3, 1], [7, 0, 0], [4, 0, 0], [1, 1, 0]] and lengths.dtype == torch.float32


def test_returns_by_turn_compare_the_same_turn_of_a_group():
    responses = [talk(3.0, [2, 3], [0.5]), talk(1.0, [4]), talk(2.0, [1, 6], [1.0]), talk(None, [5])]
    returns, lengths = returns_by_turn(responses, 2)  # two prompts, two responses to each, at most two turns
    nan = math.nan
    expected = [[3.0, 1.0], [2.5, nan], [2.0, nan], [1.0, nan]]
    torch.testing.assert_close(returns, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert lengths.tolist() == [[2, 4], [3, 0], [1, 5], [6, 0]]


def test_rewards_of_tokens_stand_at_the_ends_of_turns():
    """Rows of the batch may be others than the first responses of the step."""
    responses = [talk(9.0, [1]), talk(3.0, [2, 1], [0.5]), response(length=2, score=scored(2.0))]
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 1, 0, 0]]).float()
    nothing = torch.zeros(2, 5)
    batch = Batch(nothing.long(), torch.tensor([5, 3]), mask, nothing, rows=torch.tensor([1, 2]))
    assert token_rewards(responses, batch).tolist() == [[0, 0, 0.5, 0, 2.5], [0, 0, 2, 0, 0]]


def test_metrics_of_conversations():
    assert metrics_of([response(), response()]) == {}
    responses = [talk(3.0, [2, 3, 1], [0.5]), talk(1.0, [4]), talk(None, [], finish_reason="error")]
    assert metrics_of(responses) == {
        "num_turns/mean": 5 / 3,
        "num_turns/max": 3.0,
        "num_turns/min": 1.0,
        "environment/calls": 4 / 3,
        "environment/observation_tokens": 5.0,
        "environment/error_frac": 1 / 3,
        "environment/turn_rewards": 0.5 / 3,
    }
    assert "environment/turn_rewards" not in metrics_of(responses[1:])
