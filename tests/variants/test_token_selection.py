"""Which tokens a rule would choose. That all ranks choose the same ones is in tests/data/test_ranks.py."""

from functools import partial

import pytest
import torch

from extras.variants import TokenSelection, token_selection
from rl.data.batching import Update
from rl.data.types import Batch
from rl.formulas.losses import aggregate


def test_covariance_by_hand():
    logp, advantages = torch.tensor([[-1.0, -3.0], [0.0, -4.0]]), torch.tensor([[1.0, 1.0], [-2.0, 0.0]])
    cov = token_selection.covariance(logp, advantages, mean_logp=-2.0, mean_advantage=0.0)
    assert cov.tolist() == [[1.0, -1.0], [-4.0, 0.0]]
    mean = torch.cov(torch.stack([logp.flatten(), advantages.flatten()]), correction=0)[0, 1]
    assert cov.mean().item() == pytest.approx(mean.item())
    with pytest.raises(AssertionError, match=r"unexpected shapes: \(2, 2\), \(1, 2\)"):
        token_selection.covariance(logp, advantages[:1], mean_logp=0.0, mean_advantage=0.0)


def test_rules_by_hand(world):
    """Ten tokens with covariances of 0.5, 1, 2, 4.9 and 5, two of each, and one that was not sampled."""
    logp = torch.tensor([[0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.9, -4.9, 5.0, -5.0, 3.0]])
    advantages, mask = torch.tensor([[1.0, -1.0] * 5 + [0.0]]), torch.tensor([[1.0] * 10 + [0.0]])
    ids, rows = torch.zeros(1, 11, dtype=torch.long), torch.tensor([0])
    batch = Batch(ids, torch.tensor([11]), mask, logp, old_logp=logp, advantages=advantages, rows=rows)
    updates = [Update(range(1), [[0]], 10.0, 1.0, [[0]])]
    flags = TokenSelection(clip_cov_ratio=1.0, kl_cov_ratio=0.4)
    for mode, chosen in {"clip_cov": [4, 5, 6, 7], "kl_cov": [6, 7, 8, 9]}.items():  # the bounds are 1 and 5
        found = token_selection.choose(flags, mode, batch, updates, None, seed=0, ranks=world)
        assert found.columns["chosen"][0].nonzero().flatten().tolist() == chosen
    fewer = TokenSelection(clip_cov_ratio=0.1)
    drawn = [token_selection.choose(fewer, "clip_cov", batch, updates, None, seed=s, ranks=world) for s in range(40)]
    places = [x.columns["chosen"][0].nonzero().flatten().tolist() for x in drawn]
    assert {len(x) for x in places} == {1} and {x for [x] in places} == {4, 5, 6, 7}


def test_told_is_what_was_not_sampled_after_the_first_sampled_token(world):
    """Prompt 2, then sampled and told tokens, then padding. The first two rows are those of one response. The third row
    has no score, so its mask is 0. The mean over the other responses counts all rows of a response.
    """
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0, 0, 0], [0] * 8, [0, 0, 1, 1, 0, 1, 1, 1]]).float()
    lengths, ids = torch.tensor([7, 6, 8, 8]), torch.zeros(4, 8, dtype=torch.long)
    owners = torch.tensor([0, 0, 1, 2])
    batch = Batch(ids, lengths, mask, mask, advantages=mask, rows=torch.arange(4), responses=owners)
    updates = [Update(range(4), [[0, 1, 2, 3]], 9.0, 2.0, [[0, 1, 2, 3]])]
    choose = partial(token_selection.choose, batch=batch, updates=updates, entropies=None, seed=0, ranks=world)
    with_echo = choose(TokenSelection(echo_coef=0.1), "ppo_clip")
    told, num_told = with_echo.columns["told"], with_echo.columns["num_told"]
    assert [row.nonzero().flatten().tolist() for row in told] == [[4, 5], [3, 4, 5], [], [4]]
    assert told.dtype == torch.float32 and torch.equal(with_echo.response_mask, mask)
    assert num_told.tolist() == [5, 5, 0, 1]
    x = torch.zeros(4, 8)
    x[told > 0] = torch.arange(1.0, 7.0)
    for micros in ([[0, 1, 2, 3]], [[1], [0, 3], [2]]):
        sizes = dict(num_tokens=9.0, num_seqs=2.0)
        means = [aggregate(x[i], told[i], "seq-mean-token-mean", lengths=num_told[i], **sizes) for i in micros]
        assert float(sum(means)) == pytest.approx(((1 + 2 + 3 + 4 + 5) / 5 + 6) / 2)
    assert "told" not in choose(TokenSelection(), "dro").columns


def test_chance_depends_on_seed_row_and_place_alone():
    torch.manual_seed(0)
    first = token_selection.uniform(range(200), 50, seed=3)
    torch.manual_seed(1)
    assert torch.equal(token_selection.uniform([7, 150], 50, seed=3), first[[7, 150]])
    assert len(first.unique()) == 10_000 and 0 <= first.min() and first.max() < 1
    assert first.mean() == pytest.approx(0.5, abs=0.01) and first.var() == pytest.approx(1 / 12, abs=0.003)
    assert abs(torch.corrcoef(first[:, :2].T)[0, 1]) < 0.2
    assert not torch.isin(token_selection.uniform(range(200), 50, seed=4), first).any()
