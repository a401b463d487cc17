"""Which tokens --min-p, --top-k and --top-p leave. tests/model/test_logprobs.py has the log-probs of these tokens."""

import math

import pytest
import torch

from extras.truncation import truncation_of
from extras.truncation.logits import truncation
from rl.data.types import Sampling


def test_what_is_left_out_leaves_less_for_the_next_rule():
    """Of the tokens that min_p keeps, those that top_k keeps, and of these the share top_p."""
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.06, 0.04]], dtype=torch.float64).log()
    assert truncation(logits, 4, 1.0, 0.5).exp().item() == pytest.approx(0.25)  # half of the likeliest, above the 4th
    assert truncation(logits, 3, 1.0, 0.01).exp().item() == pytest.approx(0.1)
    assert 0.3 < truncation(logits, -1, 0.6, 0.5).exp().item() <= 0.5  # 0.6 of 0.8 is less than the likeliest has
    assert 0.1 < truncation(logits, -1, 0.6, 0.0).exp().item() <= 0.3


@pytest.mark.parametrize("masked", [-math.inf, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_among_tokens_of_which_the_model_masks_a_third(masked, dtype):
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0), dtype=dtype) * 3
    logits[:, ::3] = masked
    kept = (logits >= truncation(logits, -1, 0.8, 0.0)[:, None]).sum(1)
    for row, count in zip(logits.double().softmax(-1), kept.tolist(), strict=True):
        sums = row.sort(descending=True).values.cumsum(0)
        assert count == int((sums < 0.8).sum()) + 1 < 150


def test_equal_settings_are_one_object():
    """Or torch would compile the LM head again for each call."""
    first, second = (truncation_of(Sampling(top_k=3, top_p=0.9)) for _ in range(2))
    assert first is second and truncation_of(Sampling(top_k=4)) is not first
    assert truncation_of(Sampling(temperature=0.5)) is None
