"""The chance that two draws of a token agree, against a sum in plain Python."""

import math
from types import SimpleNamespace

import pytest
import torch

from extras.variants.collisions import response_collisions
from rl.data.types import Sampling


@pytest.mark.parametrize("top_k", [-1, 3])
def test_the_chance_that_two_draws_agree_is_that_of_the_truncated_distribution(top_k):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, generator=generator) for n in (5, 6))
    head = SimpleNamespace(weight=weight)
    model = SimpleNamespace(packed=SimpleNamespace(own_logits=None), get_output_embeddings=lambda: head)
    [chances] = response_collisions(model, hidden, None, Sampling(temperature=0.7, top_k=top_k))
    expected = []
    for logits in (hidden @ weight.T / 0.7).tolist():
        weights = sorted(map(math.exp, logits), reverse=True)[: 6 if top_k < 0 else top_k]
        expected.append(sum((x / sum(weights)) ** 2 for x in weights))
    assert chances.tolist() == pytest.approx(expected)
