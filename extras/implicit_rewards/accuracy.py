"""How right responses are, and how well implicit rewards order the responses of a group."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rl.data.types import Sample


def accuracies_of(responses: Sequence[Sample]) -> Tensor:
    """How right each response is, (B,) float32 within 0 and 1, see `Score.accuracy`, or NaN without a score."""
    scores = [x.score for x in responses]
    return torch.tensor([math.nan if x.value is None else x.accuracy for x in scores]).clamp(0, 1)


def order_accuracy(log_ratios: Tensor, accuracies: Tensor) -> Tensor:
    """How often the reward model puts two responses to a prompt into the right order: a scalar.

    Each pair of a group weighs as much as its accuracies differ. A group without a difference counts as 0.5.

    Args: log_ratios, accuracies (P, G), NaN = not scored. Source: the code of PRIME's authors; verl's
    `compute_dpo_accuracy` (recipe/prime) leaves the last token of a response out.
    """
    assert log_ratios.shape == accuracies.shape, f"{log_ratios.shape}, {accuracies.shape}"
    wanted = (accuracies[:, :, None] - accuracies[:, None, :]).nan_to_num(0.0)  # (P, G, G), each pair twice
    right = ((log_ratios[:, :, None] > log_ratios[:, None, :]) == (wanted > 0)).to(wanted.dtype)
    upper = wanted.abs().triu(1)
    total = upper.sum((1, 2))
    return torch.where(total > 0, (right * upper).sum((1, 2)) / total, 0.5).mean()
