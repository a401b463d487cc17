"""Which tokens a rule would choose. That all ranks choose the same ones is in tests/data/test_ranks.py."""

import pytest
import torch

from rl.data import token_selection


def test_covariance_by_hand():
    logp, advantages = torch.tensor([[-1.0, -3.0], [0.0, -4.0]]), torch.tensor([[1.0, 1.0], [-2.0, 0.0]])
    cov = token_selection.covariance(logp, advantages, mean_logp=-2.0, mean_advantage=0.0)
    assert cov.tolist() == [[1.0, -1.0], [-4.0, 0.0]]
    mean = torch.cov(torch.stack([logp.flatten(), advantages.flatten()]), correction=0)[0, 1]
    assert cov.mean().item() == pytest.approx(mean.item())
    with pytest.raises(AssertionError, match=r"unexpected shapes: \(2, 2\), \(1, 2\)"):
        token_selection.covariance(logp, advantages[:1], mean_logp=0.0, mean_advantage=0.0)


def test_rules_by_hand():
    cov, mask = torch.tensor([[0.5, 1.0, 2.0, 4.9, 5.0, 3.0]]), torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]])
    chance, flags = torch.rand(1, 6), token_selection.TokenSelection(clip_cov_ratio=0.1, kl_cov_ratio=0.2)
    decides, among, share = token_selection.random_within(cov, mask, chance, flags)
    assert decides is chance and share == 0.1
    assert among.tolist() == [[False, False, True, True, False, False]]
    decides, among, share = token_selection.largest_covariance(cov, mask, chance, flags)
    assert decides is cov and share == 0.2 and among.tolist() == [[True] * 5 + [False]]


def test_chance_depends_on_seed_row_and_place_alone():
    torch.manual_seed(0)
    first = token_selection.uniform(range(200), 50, seed=3)
    torch.manual_seed(1)
    assert torch.equal(token_selection.uniform([7, 150], 50, seed=3), first[[7, 150]])
    assert len(first.unique()) == 10_000 and 0 <= first.min() and first.max() < 1
    assert first.mean() == pytest.approx(0.5, abs=0.01) and first.var() == pytest.approx(1 / 12, abs=0.003)
    assert abs(torch.corrcoef(first[:, :2].T)[0, 1]) < 0.2
    assert not torch.isin(token_selection.uniform(range(200), 50, seed=4), first).any()
