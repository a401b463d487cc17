"""Learning-rate factors against hand-computed values."""

import math

import pytest

from rl.formulas import schedule


def constant(step, warmup_steps):
    return schedule.lr_factor("constant", step, warmup_steps, 10_000)


def cosine(step, warmup_steps, total_steps):
    return schedule.lr_factor("cosine", step, warmup_steps, total_steps)


def test_constant_matches_hand_values():
    factors = [constant(k, warmup_steps=4) for k in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_constant_without_warmup_is_one(warmup_steps):
    assert [constant(k, warmup_steps=warmup_steps) for k in (0, 1, 1000)] == [1.0, 1.0, 1.0]


def test_cosine_matches_hand_values():
    factors = [cosine(k, warmup_steps=2, total_steps=6) for k in range(8)]
    half = math.sqrt(0.5)
    assert factors == pytest.approx([0.5, 1.0, 1.0, 0.5 + half / 2, 0.5, 0.5 - half / 2, 0.0, 0.0], abs=1e-15)


def test_linear_matches_hand_values():
    factors = [schedule.lr_factor("linear", k, 2, 6) for k in range(8)]
    assert factors == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_cosine_falls_to_zero_and_stays_there():
    factors = [cosine(k, warmup_steps=0, total_steps=10) for k in range(20)]
    assert factors[0] == 1.0
    assert factors[5] == pytest.approx(0.5)
    assert factors[10:] == [0.0] * 10
    assert factors == sorted(factors, reverse=True)


def test_the_warmup_of_a_cosine_is_that_of_a_constant():
    for k in range(5):
        assert cosine(k, warmup_steps=5, total_steps=10) == constant(k, warmup_steps=5)


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (1, 1), (3, 3), (5, 3), (0, 7), (4, 9)])
def test_schedules_never_waste_an_update_of_the_run(warmup_steps, total_steps):
    for k in range(total_steps):
        assert 0 < constant(k, warmup_steps=warmup_steps) <= 1
        assert 0 < cosine(k, warmup_steps=warmup_steps, total_steps=total_steps) <= 1


def test_a_cosine_that_is_all_warmup_or_has_one_step_left():
    assert [cosine(k, warmup_steps=2, total_steps=2) for k in range(4)] == [0.5, 1.0, 1.0, 0.0]
    assert [cosine(k, warmup_steps=2, total_steps=3) for k in range(4)] == [0.5, 1.0, 1.0, 0.0]


def test_schedules_are_found_by_their_names():
    assert [schedule.lr_factor("constant", k, 2, 4) for k in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [schedule.lr_factor("cosine", k, 2, 4) for k in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    with pytest.raises(ValueError, match="--lr-scheduler-type 'exponential' must be constant, linear or cosine"):
        schedule.lr_factor("exponential", 0, 2, 4)


@pytest.mark.parametrize(
    ("coef", "kl", "num_responses", "expected"),
    [
        (0.001, 0.05, 1024, 0.00097952),  # far below the target: -0.2 * 1024 / 10000
        (0.00097952, 0.2, 1024, 0.00099958057),  # far above it: +0.2
        (0.00099958057, 0.11, 512, 0.00100469842),  # near it: +0.1 * 512 / 10000
        (0.5, 0.1, 1024, 0.5),
        (0.5, 0.0, 10_000, 0.4),
        (0.5, -0.3, 10_000, 0.4),  # an estimate may be negative
        (0.5, 0.0, 100_000, 0.4),  # the coefficient may not
    ],
)
def test_adaptive_kl_coef_matches_hand_values(coef, kl, num_responses, expected):
    result = schedule.adaptive_kl_coef(coef, kl, target=0.1, horizon=10_000, num_responses=num_responses)
    assert result == pytest.approx(expected, rel=1e-8)


def test_schedules_reject_a_negative_step():
    with pytest.raises(AssertionError, match="-1"):
        constant(-1, warmup_steps=0)
    with pytest.raises(AssertionError, match="-1"):
        cosine(-1, warmup_steps=0, total_steps=10)
