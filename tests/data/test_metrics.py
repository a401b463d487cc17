"""Metrics against numbers worked out by hand or by brute force."""

import itertools
import math
import time

import pytest
import torch

from rl.fsdp import Dist
from rl.metrics import (
    Sums,
    Timer,
    accuracy,
    alarms,
    describe,
    evaluation_metrics,
    gap_sums,
    majority_vote,
    parse_alarm,
    pass_at_k,
    reward_metrics,
    rollout_metrics,
    scoring_metrics,
    throughput,
)
from rl.scoring import Score
from rl.types import Sample

NAN, INF = math.nan, math.inf


def same(left: dict, right: dict) -> bool:
    """Equal dicts of floats, NaN equal to NaN."""
    return left.keys() == right.keys() and all(
        math.isnan(right[k]) if math.isnan(v) else v == pytest.approx(right[k]) for k, v in left.items()
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 6.0], (3.0, 6.0, 1.0)),
        ([[-1.0, NAN], [INF, 0.5]], (-0.25, 0.5, -1.0)),  # only what is finite counts
        ([4.0], (4.0, 4.0, 4.0)),
        ([NAN, -INF], (NAN, NAN, NAN)),
        ([], (NAN, NAN, NAN)),
    ],
)
def test_describe(values, expected):
    result = describe("critic/score", torch.tensor(values))
    assert same(result, dict(zip(["critic/score/mean", "critic/score/max", "critic/score/min"], expected, strict=True)))


def test_describe_keeps_the_precision_of_many_float32_values():
    assert describe("x", torch.full((1_000_001,), 0.1))["x/mean"] == pytest.approx(0.1, rel=1e-7)


def test_reward_metrics():
    rewards = torch.tensor([[1.0, 0.0, NAN, 1.0], [0.5, 0.5, 0.5, NAN], [NAN, NAN, NAN, NAN], [0.0, -2.0, 0.0, 0.0]])
    expected = {
        "critic/score/mean": 1.5 / 10,
        "critic/score/max": 1.0,
        "critic/score/min": -2.0,
        "reward/zero_std_frac": 2 / 4,  # all scored ones equal; nothing scored
    }
    assert same(reward_metrics(rewards), expected)


def test_reward_metrics_when_nothing_could_be_scored():
    result = reward_metrics(torch.full((2, 3), NAN))
    assert math.isnan(result["critic/score/mean"])
    assert result["reward/zero_std_frac"] == 1.0


def scored(value, components=None, status="ok", seconds=0.0):
    return Score("text", value, components or {}, status, seconds)


def test_scoring_metrics_by_hand():
    scores = [
        scored(1.0, {"acc": 1.0, "style": 0.5}, seconds=0.1),
        scored(0.0, {"acc": 0.0, "style": 1.0}, seconds=0.2),
        scored(None, {"acc": 1.0}, "none", seconds=0.3),  # not scored, but what it says about itself counts
        scored(None, status="error", seconds=0.4),
        scored(None, status="error", seconds=0.5),
        scored(None, status="timeout", seconds=10.0),
        scored(-1.0, {"acc": 0.0}, seconds=0.0),
        scored(2.0, seconds=0.0),
    ]
    expected = {
        "reward/error_frac": 2 / 8,
        "reward/timeout_frac": 1 / 8,
        "reward/none_frac": 1 / 8,
        "reward/seconds_p95": 0.5 + 0.65 * 9.5,  # rank 0.95 * 7 = 6.65 of the sorted ones, counted from 0
        "reward/seconds_max": 10.0,
        "reward/math/acc": 1 / 2,
        "reward/math/style": 0.75,
        "reward/code/acc": 1 / 2,
    }
    assert same(scoring_metrics(scores, ["math", "math", "code", "code", "math", "code", "code", "math"]), expected)


def test_evaluation_metrics_by_hand():
    scores = [
        scored(1.5, {"acc": 1.0, "style": 0.5}),
        scored(-0.5, {"acc": 0.0, "style": 1.0}),
        scored(None, {"acc": 1.0}, "none"),
        scored(0.25),
        scored(None, status="timeout"),
    ]
    expected = {
        "val-core/math/reward/mean@1": (1.5 - 0.5 + 0.0) / 3,  # no score counts as 0
        "val-core/code/reward/mean@1": 0.25 / 2,
        "val-aux/math/acc/mean@1": 2 / 3,
        "val-aux/math/style/mean@1": 0.75,
        "val/accuracy": (1.0 + 0.0 + 1.0 + 0.25 + 0.0) / 5,  # acc where there is one, else the score
    }
    assert same(evaluation_metrics(scores, ["math", "math", "math", "code", "code"]), expected)


def test_accuracy_prefers_acc_to_the_score():
    scores = [scored(0.7), scored(0.7, {"acc": 0.0}), scored(0.7, {"other": 1.0}), scored(None, status="error")]
    assert [accuracy(s) for s in scores] == [0.7, 0.0, 0.7, 0.0]


def sample(prompt, response, reason):
    return Sample([1] * prompt, [2] * response, [1] * response, [0.0] * response, reason, 0)


SAMPLES = [sample(3, 4, "stop"), sample(5, 8, "length"), sample(5, 8, "stop"), sample(1, 0, "stop")]


def test_rollout_metrics():
    expected = {
        "response_length/mean": 5.0,
        "response_length/max": 8.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,  # by the reason: the third ended just in time
        "prompt_length/mean": 3.5,
        "prompt_length/max": 5.0,
        "prompt_length/min": 1.0,
    }
    assert same(rollout_metrics(SAMPLES), expected)


def test_throughput_counts_prompts_and_responses_per_second_and_rank():
    d = Dist(0, 4, torch.device("cpu"), torch.float32)
    expected = {
        "perf/total_num_tokens": 34.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 34 / (2.0 * 4),
        "perf/gen_tokens_per_s": 20 / 0.5,
    }
    assert same(throughput(SAMPLES, {"timing_s/step": 2.0, "timing_s/gen": 0.5}, d), expected)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n):
    for right in range(n + 1):
        outcomes = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(outcomes, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at_k(n, right, k) == pytest.approx(expected, abs=1e-12), (n, right, k)


def test_pass_at_k_example_and_limits():
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(10_000, 5_000, 100) == pytest.approx(1.0)  # no factorial overflows
    for k in (0, 5, -1):
        with pytest.raises(ValueError, match=f"pass@{k} needs 1 <= k <= n = 4"):
            pass_at_k(4, 1, k)


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
    assert majority_vote(answers) == winner


def test_gap_sums_by_hand():
    rollout = torch.tensor([[-1.0, -2.0, 50.0], [-0.5, 0.0, 0.0]])
    trainer = torch.tensor([[-1.5, -1.0, -50.0], [-0.5, -9.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    result = {name: value.item() for name, value in gap_sums(rollout, trainer, mask).items()}
    expected = {
        "gap": 0.5 + 1.0 + 0.0,
        "probs_diff": (math.exp(-1) - math.exp(-1.5)) + (math.exp(-1) - math.exp(-2)),
        "rollout_kl": 0.5 - 1.0 + 0.0,
    }
    assert same(result, expected)


def test_sums_over_micro_batches(world):
    sums = Sums(world.device)
    assert sums.reduce() == {}
    parameter = torch.tensor(2.0, requires_grad=True)
    sums.add(loss=parameter * 0.5, tokens=torch.tensor(3))
    sums.add(tokens=torch.tensor(4), loss=torch.tensor(0.25))
    sums.add_max(gap_max=torch.tensor(-3.0))
    sums.add_max(gap_max=torch.tensor(-1.0))
    sums.add_max(gap_max=torch.tensor(-2.0))
    assert sums.reduce() == {"loss": 1.25, "tokens": 7.0, "gap_max": -1.0}
    assert not sums.totals["loss"].requires_grad  # or every micro-batch's graph would stay alive


def test_sums_do_not_lose_small_terms(world):
    sums = Sums(world.device)
    sums.add(x=torch.tensor(1e8))
    for _ in range(100):
        sums.add(x=torch.tensor(1.0))  # each would vanish in float32
    assert sums.reduce() == {"x": 1e8 + 100}


def test_timer_adds_up_phases_of_the_same_name():
    clock = Timer(torch.device("cpu"))
    time.sleep(0.02)
    clock("gen")
    time.sleep(0.05)
    clock("update")
    time.sleep(0.03)
    clock("gen")
    metrics = clock.metrics()
    assert metrics.keys() == {"timing_s/gen", "timing_s/update", "timing_s/step"}
    assert metrics["timing_s/gen"] >= 0.05 and metrics["timing_s/update"] >= 0.05
    phases = metrics["timing_s/gen"] + metrics["timing_s/update"]
    assert phases <= metrics["timing_s/step"] < phases + 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("response_length/clip_ratio>0.5", ("response_length/clip_ratio", ">", 0.5)),
        ("val-core/my data/reward/mean@1 < -1e-3 ", ("val-core/my data/reward/mean@1", "<", -0.001)),
        (" a>3", ("a", ">", 3.0)),
    ],
)
def test_parse_alarm(text, expected):
    assert parse_alarm(text) == expected


@pytest.mark.parametrize("text", ["", "a", "a>", ">1", " >1", "a>=1", "a>b", "a>1>2", "a<b<1", "a=1", "a>nan", "a<inf"])
def test_a_text_that_is_no_alarm_is_refused_with_the_form(text):
    with pytest.raises(ValueError) as error:
        parse_alarm(text)
    assert str(error.value).startswith(f"--alarms {text!r} must be metric>number or metric<number")
    with pytest.raises(ValueError, match="--alarms"):
        alarms({"a": 0.0}, [text])


@pytest.mark.parametrize(
    ("value", "above", "below"),
    [
        (0.75, ["a is 0.75, beyond the limit of --alarms a>0.5"], []),
        (0.5, [], []),  # at the limit
        (0.25, [], ["a is 0.25, beyond the limit of --alarms a<0.5"]),
        (INF, ["a is inf, beyond the limit of --alarms a>0.5"], []),
        (-INF, [], ["a is -inf, beyond the limit of --alarms a<0.5"]),
        (NAN, ["a is nan, beyond the limit of --alarms a>0.5"], ["a is nan, beyond the limit of --alarms a<0.5"]),
    ],
)
def test_alarms(value, above, below):
    metrics = {"a": value, "b": NAN}  # nobody asked for b
    assert alarms(metrics, ["a>0.5"]) == above and alarms(metrics, ["a<0.5"]) == below
    assert alarms(metrics, ["a<0.5", "absent>0", "absent<0", "a > 0.5"]) == below + above
    assert alarms(metrics, []) == []
