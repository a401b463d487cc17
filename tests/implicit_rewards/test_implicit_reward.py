"""Implicit rewards: values by hand, and those that verl's recipe/prime gave for the same numbers."""

import math

import pytest
import torch

from extras.implicit_rewards import implicit_reward
from extras.implicit_rewards.accuracy import order_accuracy
from rl.formulas import advantages

NAN = math.nan
Q = torch.tensor(  # log-ratios of the tokens of two groups of three responses
    [[0.3, -0.2, 0.5, 0], [-0.4, 0.1, 0, 0], [0.2, 0.2, -0.6, 0.8], [1, -1, 0, 0], [0.5, 0.6, 0.7, 0], [-0.3, 0, 0, 0]],
    dtype=torch.float64,
)
LENGTHS = [3, 2, 4, 2, 3, 1]
MASK = torch.tensor([[float(t < n) for t in range(4)] for n in LENGTHS], dtype=torch.float64)
RIGHT = torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64)


def test_the_way_from_token_rewards_to_advantages_is_verls():
    """`prime_norm` and `compute_rloo_advantage_return`, with both weights 5 and beta 0.05."""
    is_inner = torch.tensor([[t < n - 1 for t in range(4)] for n in LENGTHS])
    rewards = torch.where(is_inner, 0.05 * Q, 0.0)
    rewards = rewards / (0.05 * 1.1 + 1e-6)  # the largest sum to the end is that of the fifth response: 0.5 + 0.6
    means = (rewards.sum(1) / MASK.sum(1)).view(2, 3)
    factor, baseline = implicit_reward.leave_one_out(means)
    process = rewards * factor.view(-1, 1) - baseline.view(-1, 1)
    outcome = advantages.rloo(RIGHT.view(2, 3), torch.ones(2, 3)).view(-1, 1)
    is_last = torch.tensor([[t == n - 1 for t in range(4)] for n in LENGTHS])
    returns = advantages.returns_to_go(5 * process + 5 * torch.where(is_last, outcome, 0.0), MASK, gamma=1.0)
    expected = [
        [7.159051654, 4.621219008, 5.492415289, 0],
        [-4.242392563, -2.007584711, 0, 0],
        [-1.893950413, -3.749977273, -5.606004133, -2.007584711],
        [5.378735538, 0.530338842, 0, 0],
        [4.090880166, 2.651512397, 0.530338842, 0],
        [-6.969661158, 0, 0, 0],
    ]
    assert torch.allclose(returns, torch.tensor(expected, dtype=torch.float64), atol=1e-8)
    own = returns[MASK > 0]
    whitened = advantages.whiten(returns, MASK, mean=own.mean().item(), var=own.var().item())
    assert whitened[0, :3].tolist() == pytest.approx([1.545139759, 0.976331323, 1.171593921], abs=1e-8)
    assert whitened[5].tolist() == pytest.approx([-1.621550937, 0, 0, 0], abs=1e-8)


def test_order_is_that_of_the_authors():
    """`compute_dpo_accuracy`, which in verl leaves the last token out."""
    sums = (Q * MASK).sum(1)
    assert order_accuracy(sums.view(2, 3), RIGHT.view(2, 3)).item() == pytest.approx(0.75)


def test_leave_one_out_compares_with_the_others_that_have_a_score():
    means = torch.tensor([[1.0, 0.0, 0.5, NAN], [NAN, 0.3, NAN, NAN], [NAN] * 4, [0.75, NAN, NAN, 0.25]])
    factor, baseline = implicit_reward.leave_one_out(means)
    assert factor.tolist() == [[1.5, 1.5, 1.5, 0], [0, 1, 0, 0], [0] * 4, [2, 0, 0, 2]]
    assert (baseline[means.isnan()] == 0).all()
    found = (means.nan_to_num() * factor - baseline).tolist()
    assert found[0] == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5, 0])
    assert found[1] == pytest.approx([0, 0.3, 0, 0]) and found[2] == [0] * 4
    assert found[3] == [0.5, 0, 0, -0.5]


def test_order_accuracy_counts_pairs_by_how_much_they_differ():
    log_ratios = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [5.0, 5.0, 5.0]])
    accuracies = torch.tensor([[1.0, 0.5, 0.0], [1.0, NAN, 0.5], [1.0, 1.0, 1.0]])
    # All right; the only known pair wrong; nothing to order.
    assert order_accuracy(log_ratios, accuracies).item() == pytest.approx((1 + 0 + 0.5) / 3)
    mixed = torch.tensor([[3.0, 1.0, 2.0]])  # 1 before 0.5 and 0: right; 0.5 before 0: wrong, with weight 0.5 of 2
    assert order_accuracy(mixed, accuracies[:1]).item() == pytest.approx(0.75)
    # The better one may come later, and a response without a score is in no pair.
    assert order_accuracy(mixed, accuracies[:1].flip(1)).item() == pytest.approx(0.25)
    unknown = torch.tensor([[0.5, NAN, 1.0]])
    assert order_accuracy(torch.tensor([[2.0, 1.0, 3.0]]), unknown).item() == 1.0
    assert order_accuracy(torch.tensor([[3.0, 1.0, 2.0]]), unknown).item() == 0.0
