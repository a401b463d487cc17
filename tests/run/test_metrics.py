"""Metrics against numbers worked out by hand or by brute force. tests/data/test_ranks.py has those of several ranks."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers_data import ranks_without_group, response, scored

from eval import pass_at_k
from rl.console import progress_line
from rl.data.types import Batch, take_rows
from rl.ranks import Ranks
from rl.run.means import Means, describe, describe_tokens, of_norms, of_staleness
from rl.run.metrics import of_groups, of_lengths, of_scores
from rl.sampling.evaluation import mean_by_name, of_prompt, of_scoring

NAN, INF = math.nan, math.inf


def micro(mask: torch.Tensor, rollout_logp: torch.Tensor, ages: torch.Tensor | None = None) -> Batch:
    """Rows of a micro-batch with this mask and these log-probs (b, T) of the engine."""
    columns = {} if ages is None else {"ages": ages}
    return Batch(torch.zeros_like(mask).long(), mask.sum(1).long(), mask, rollout_logp, columns=columns)


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


def test_groups_without_spread():
    scores = torch.tensor([[1.0, 0.0, NAN, 1.0], [0.5, 0.5, 0.5, NAN], [NAN, NAN, NAN, NAN], [0.0, -2.0, 0.0, 0.0]])
    assert of_groups(scores) == {"reward/zero_std_frac": 2 / 4}  # all scored ones equal; nothing scored
    assert of_groups(scores[:, :1]) == {}  # a single response is not compared with anything: no reason for an alarm


def test_scores_of_a_step_by_hand():
    values = [1.0, 0.0, None, 1.0, 0.5, -2.0]
    sources = {7: "math", 5: "code"}
    parts = [{"acc": 1.0}, {"acc": 0.0}, {}, {"acc": 0.0}, {}, {}]
    status = ["none" if value is None else "ok" for value in values]
    responses = [
        response(row_index=row, data_source=sources[row], score=scored(value, part, how, seconds=0.5))
        for row, value, part, how in zip([5, 5, 7, 5, 7, 7], values, parts, status, strict=True)
    ]
    expected = {
        "critic/score/mean": 0.5 / 5,
        "critic/score/max": 1.0,
        "critic/score/min": -2.0,
        "reward/error_frac": 0.0,
        "reward/timeout_frac": 0.0,
        "reward/none_frac": 1 / 6,
        "reward/seconds_p95": 0.5,
        "reward/seconds_max": 0.5,
        "reward/code/acc": 1 / 3,
    }
    assert same(of_scores(responses), expected)


def test_scores_when_nothing_could_be_scored():
    responses = [response(score=scored(None, status="timeout")) for _ in range(3)]
    result = of_scores(responses)
    assert math.isnan(result["critic/score/mean"]) and result["reward/timeout_frac"] == 1.0
    assert of_groups(torch.full((2, 3), NAN)) == {"reward/zero_std_frac": 1.0}


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
    assert same(of_scoring(scores, ["math", "math", "code", "code", "math", "code", "code", "math"]), expected)


def test_a_held_out_prompt_by_hand():
    scores = [
        scored(1.5, {"acc": 1.0, "style": 0.5}, text="so 7"),
        scored(-0.5, {"acc": 0.0, "style": 1.0}, text="so 1,008"),
        scored(None, {"acc": 1.0}, "none", text="1008 it is"),
        scored(0.25, text="no idea"),
    ]
    assert same(
        of_prompt("math", scores, [3, 4, 5, 8]),
        {
            "val-core/math/reward/mean@4": (1.5 - 0.5 + 0.0 + 0.25) / 4,  # no score counts as 0
            "val-core/math/reward/best@4/mean": 1.5,
            "val-core/math/reward/maj@4/mean": -0.5,  # of the first that says 1008
            "val-aux/math/acc/mean@4": 2 / 3,
            "val-aux/math/acc/best@4/mean": 1.0,
            "val-aux/math/style/mean@4": 0.75,
            "val-aux/math/style/best@4/mean": 1.0,
            "val/accuracy": (1.0 + 0.0 + 1.0 + 0.25) / 4,  # acc where there is one, else the score
            "val/response_length": 5.0,
        },
    )
    alone = of_prompt("math", scores[2:3], [5])
    assert alone == {
        "val-core/math/reward/mean@1": 0.0,
        "val-aux/math/acc/mean@1": 1.0,
        "val/accuracy": 1.0,
        "val/response_length": 5.0,
    }
    nobody = of_prompt("math", [scored(1.0, text="none"), scored(1.0, text="")], [1, 1])
    assert nobody["val-core/math/reward/maj@2/mean"] == 0.0  # without an answer nothing is elected


def test_means_by_name():
    assert mean_by_name([{"a": 1.0, "b": 5.0}, {"a": 2.0}, {"a": 6.0, "c": 0.0}]) == {"a": 3.0, "b": 5.0, "c": 0.0}


def test_accuracy_prefers_acc_to_the_score():
    scores = [scored(0.7), scored(0.7, {"acc": 0.0}), scored(0.7, {"other": 1.0}), scored(None, status="error")]
    assert [s.accuracy for s in scores] == [0.7, 0.0, 0.7, 0.0]


RESPONSES = [response(3, 4), response(5, 8, finish_reason="length"), response(5, 8), response(1, 0)]


def test_lengths():
    expected = {
        "response_length/mean": 5.0,
        "response_length/max": 8.0,
        "response_length/min": 0.0,
        "response_length/clip_ratio": 0.25,  # by the reason: the third ended just in time
        "prompt_length/mean": 3.5,
        "prompt_length/max": 5.0,
        "prompt_length/min": 1.0,
    }
    assert same(of_lengths(RESPONSES), expected)


def test_the_age_of_tokens_by_hand(world):
    """Three responses: of the newest weights, of three versions, and one that was not sampled."""
    ages = torch.tensor([[-1, 0, 0, 0, -1, -1, -1], [2, 2, -1, 1, 1, 1, 0], [-1] * 7])
    expected = {"staleness_mean": 7 / 9, "staleness_max": 2.0, "mixed_frac": 1 / 3}
    of = micro(torch.ones(3, 7), torch.zeros(3, 7), ages)
    assert of_staleness(of, world) == pytest.approx({f"rollout/{name}": x for name, x in expected.items()})
    nothing = take_rows(of, [])
    assert set(of_staleness(replace(nothing, columns={}), world).values()) == {0.0}
    without_rows = of.map(lambda _, x: x[:0])
    assert set(of_staleness(without_rows, world).values()) == {0.0}


def test_norms_are_means_and_count_the_updates_that_were_skipped():
    norms = [{"actor": 1.0, "critic": 4.0}, {"actor": 3.0, "critic": INF}, {"actor": 5.0, "critic": 0.0}]
    expected = {"actor/grad_norm": 3.0, "critic/grad_norm": INF, "actor/skipped_updates": 1.0}
    assert same(of_norms(norms), expected)
    assert same(of_norms([{"actor": NAN}]), {"actor/grad_norm": NAN, "actor/skipped_updates": 1.0})


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


def test_the_distance_of_policies_by_hand(world):
    """Two sequences with three and one tokens; what the mask leaves out is nonsense. In two parts, as micro-batches."""
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    rollout = torch.tensor([[-1.0, -2.0, -0.25, NAN], [9.0, 0.0, INF, 0.0]])
    old = torch.tensor([[-1.5, -1.0, -0.25, 7.0], [2.0, -3.0, 1.0, NAN]])
    logp = torch.tensor([[-1.0, -1.25, 0.0, 7.0], [2.0, -3.0, 1.0, NAN]])
    means = Means(world)
    weights = torch.tensor([[0.5, 0.0, 1.0, NAN], [1.0, 2.0, 1.0, 0.0]])
    for part in (slice(0, 1), slice(1, 2)):
        means.between_policies(micro(mask[part], rollout[part]), logp[part], old[part], weights[part])
    empty = torch.zeros(1, 2)
    means.between_policies(micro(empty, empty), empty, empty, empty)  # a rank without work left
    ratios = [math.exp(x) for x in (-0.5, 1.0, 0.0, -3.0)]  # old - rollout
    squares = sum(r**2 for r in ratios) / 4
    mean = sum(ratios) / 4
    probs = [math.exp(-1) - math.exp(-1.5), math.exp(-1) - math.exp(-2), 0.0, 1 - math.exp(-3)]
    expected = {
        "actor/ppo_kl": (-0.5 + 0.25 - 0.25 + 0.0) / 4,
        "rollout/logprob_gap_mean": (0.5 + 1.0 + 0.0 + 3.0) / 4,
        "rollout/logprob_gap_max": 3.0,
        "training/rollout_probs_diff_mean": sum(probs) / 4,
        "rollout_corr/kl": (0.5 - 1.0 + 0.0 + 3.0) / 4,
        "rollout_corr/k3_kl": sum(r - 1 - math.log(r) for r in ratios) / 4,
        "rollout_corr/rollout_is_mean": mean,
        "rollout_corr/rollout_is_min": math.exp(-3),
        "rollout_corr/rollout_is_max": math.e,
        "rollout_corr/chi2_token": squares - 1,
        "rollout_corr/chi2_seq": ((ratios[0] * ratios[1] * ratios[2]) ** 2 + ratios[3] ** 2) / 2 - 1,
        "rollout_corr/rollout_is_eff_sample_size": mean**2 / squares,
        "rollout_corr/ppl_ratio": (math.exp((0.5 - 1.0 + 0.0) / 3) + math.exp(3.0)) / 2,
        "rollout_corr/weight_mean": 3.5 / 4,
        "rollout_corr/rollout_rs_masked_fraction": 1 / 4,
    }
    result = means.reduce()
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=1e-5), name


def test_ratios_of_policies_that_are_far_apart_are_cut(world):
    means, mask = Means(world), torch.ones(1, 2)
    for rollout in ([[-50.0, -30.0]], [[50.0, 30.0]]):
        means.between_policies(micro(mask, torch.tensor(rollout)), torch.zeros(1, 2), torch.zeros(1, 2))
    most, least, found = math.exp(20), math.exp(-20), means.reduce()
    for name, value in {
        "rollout/logprob_gap_max": 50.0,
        "rollout_corr/rollout_is_max": most,
        "rollout_corr/rollout_is_min": least,
        "rollout_corr/rollout_is_mean": (most + least) / 2,
        "rollout_corr/chi2_seq": (most**2 + least**2) / 2 - 1,
        "rollout_corr/ppl_ratio": (most + least) / 2,
    }.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_chi2_of_sequences_beyond_ten_nats(world):
    """verl's case: of four rows one is 15 nats apart, in 3 tokens of 5 nats each."""
    old = torch.tensor([[-1.0] * 3] * 4)
    rollout = old - torch.tensor([[5.0], [0.0], [0.0], [0.0]])
    means = Means(world)
    means.between_policies(micro(torch.ones(4, 3), rollout), old, old)
    assert means.reduce()["rollout_corr/chi2_seq"] == pytest.approx((math.exp(30) + 3) / 4 - 1, rel=1e-5)


def test_the_distance_of_equal_policies_is_none(world):
    logp = torch.tensor([[-1.0, -2.0, -3.0]])
    means = Means(world)
    means.between_policies(micro(torch.ones(1, 3), logp), logp, logp, torch.ones(1, 3))
    ones = {"rollout_corr/rollout_is_eff_sample_size", "rollout_corr/ppl_ratio", "rollout_corr/weight_mean"}
    ones |= {f"rollout_corr/rollout_is_{x}" for x in ("mean", "min", "max")}
    assert means.reduce() == {name: float(name in ones) for name in means.reduce()}


def test_means_by_hand(world):
    means = Means(world, num_updates=2)
    assert means.reduce() == {}
    parameter = torch.tensor(2.0, requires_grad=True)
    grid = torch.tensor([[1.0, 2.0, NAN], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    means.over_tokens(mask, {"tokens": grid * parameter.detach()})
    means.over_tokens(torch.tensor([[0.0, 1.0]]), {"tokens": torch.tensor([[50.0, 6.0]]) * parameter / 2})
    means.over_sequences({"sequences": torch.tensor([1.0, 2.0, 6.0])})
    means.over_sequences({"sequences": torch.tensor([-4.0])})
    means.over_updates({"loss": parameter * 0.5})
    means.over_updates({"loss": torch.tensor(0.25)})
    means.over_updates({"loss": torch.tensor(1.0)})
    means.largest(
        torch.tensor([[1.0, 0.0]]), {"largest": torch.tensor([[3.0, 8.0]]), "below": torch.tensor([[-3.0, 8]])}
    )
    means.largest(
        torch.tensor([[1.0, 1.0]]),
        {"largest": torch.tensor([[0.5, 1.0]]) * parameter, "below": torch.tensor([[-3.0, -2]])},
    )
    means.largest(torch.tensor([[1.0, 0.0]]), {"smallest": torch.tensor([[3.0, -8.0]])}, sign=-1)
    means.largest(torch.tensor([[1.0, 1.0]]), {"smallest": torch.tensor([[2.0, 1.0]]) * parameter}, sign=-1)
    assert means.reduce() == {
        "tokens": (2.0 + 4.0 + 8.0 + 6.0) / 4,  # each token alike, however many a micro-batch has
        "sequences": 5.0 / 4,
        "loss": 2.25 / 2,  # of two updates
        "largest": 3.0,
        "below": -2.0,  # and not 0, which no value with mask 1 is
        "smallest": 2.0,
    }
    kept = [*means.sums.values(), *means.ends.values()]
    assert not any(x.requires_grad for x in kept)  # or every micro-batch's graph would stay alive


def test_what_was_not_measured_is_left_out(world):
    """It is not 0, which would be a value like any other; and what was measured is there, whatever it is."""
    means, nothing = Means(world), torch.zeros(1, 2)
    means.over_tokens(nothing, {"tokens": torch.tensor([[NAN, 5.0]]), "other": torch.tensor([[1.0, 2.0]])})
    means.over_sequences({"sequences": torch.zeros(0)})
    means.largest(nothing, {"smallest": torch.tensor([[NAN, 5.0]])}, sign=-1)
    means.largest(nothing, {"largest": torch.tensor([[NAN, 5.0]]), "zero": nothing})
    means.over_tokens(nothing + 1, {"other": torch.tensor([[1.0, 2.0]])})
    means.largest(nothing + 1, {"zero": nothing, "infinite": nothing + INF, "undefined": nothing + NAN})
    means.over_updates({"loss": torch.tensor(0.0)})
    found = means.reduce()
    assert math.isnan(found.pop("undefined"))
    assert found == {"other": 1.5, "zero": 0.0, "infinite": INF, "loss": 0.0}


GAPS = {"rollout/logprob_gap_mean", "rollout/logprob_gap_max"}


def test_a_step_of_old_tokens_says_nothing_about_the_gap_between_engine_and_trainer(world):
    ages, means = torch.tensor([[1, 2, 0]]), Means(world)
    mask, old = torch.tensor([[1.0, 1.0, 0.0]]), torch.full((1, 3), -1.0)
    means.between_policies(micro(mask, old - 0.5, ages), old, old)
    found = means.reduce()
    assert found["rollout/stale_gap_mean"] == 0.5 and not GAPS & found.keys()
    step = {"perf/throughput": 1.0, "timing_s/step": 1.0}
    assert "gap" not in progress_line(1, 2, step | found)
    fresh = torch.tensor([[0.0, 0.0, 1.0]])  # one token, without a gap
    means.between_policies(micro(fresh, old, ages), old, old)
    found = means.reduce()
    assert {name: found[name] for name in GAPS} == dict.fromkeys(GAPS, 0.0)
    assert "gap 0e+00" in progress_line(1, 2, step | found)


@pytest.mark.parametrize("proximal", ["sampler", "loglinear"])
def test_without_the_trainers_log_probs_nothing_is_said_of_the_engine(world, proximal):
    means, logp = Means(world), torch.full((1, 3), -1.0)
    weights = torch.tensor([[0.5, 1.0, 0.0]])
    means.between_policies(micro(logp * 0 + 1, logp - 0.25), logp, logp - 0.25, weights, proximal=proximal)
    of_weights = {"rollout_corr/weight_mean": 0.5, "rollout_corr/rollout_rs_masked_fraction": pytest.approx(1 / 3)}
    assert means.reduce() == {"actor/ppo_kl": -0.25, **of_weights}


def test_means_do_not_lose_small_terms(world):
    means = Means(world)
    means.over_updates({"x": torch.tensor(1e8)})
    for _ in range(100):
        means.over_updates({"x": torch.tensor(1.0)})  # each would vanish in float32
    assert means.reduce() == {"x": 1e8 + 100}


def test_tokens_are_described_by_two_exchanges_between_ranks():
    class Counting(Ranks):
        def all_reduce_sum(self, x):
            exchanged.append(x)
            return x

        def all_reduce_max(self, x):
            exchanged.append(x)
            return x

    exchanged, values = [], torch.tensor([[1.0, 2.0], [6.0, 90.0]])
    ranks = Counting(**vars(ranks_without_group()))
    found = describe_tokens("x", values, torch.tensor([[1.0, 1.0], [1.0, 0.0]]), ranks)
    assert found == {"x/mean": 3.0, "x/max": 6.0, "x/min": 1.0} and len(exchanged) == 2
