"""Preference optimization: which responses to a prompt are compared. What a comparison costs stands in train_dpo.py.

P prompts, G responses to each, N pairs of one chosen and one rejected response. Every function is pure, asserts the
shape that it expects, and has the same arguments and result:

Args: scores (P, G), NaN for a response without a score, which is in no pair; margin. Returns: (N, 2) int64, the places
of chosen and rejected among all P * G responses.
"""

import torch
from torch import Tensor

from rl.formulas.shared import check_shapes


def best_against_worst(scores: Tensor, margin: float) -> Tensor:
    """One pair per prompt, its best response against its worst, if their scores differ by more than `margin`.

    Of equal scores the first counts. Example: scores [[1, 0, 1, 0]], margin 0 -> [[0, 1]].

    Source: Direct Language Model Alignment from Online AI Feedback (OAIF), arXiv 2402.04792, for two responses.
    """
    check_shapes(scores, dims=2)
    high, best = scores.nan_to_num(-torch.inf).max(1)
    low, worst = scores.nan_to_num(torch.inf).min(1)
    first = torch.arange(len(scores)) * scores.shape[1]
    return torch.stack([first + best, first + worst], 1)[high - low > margin]


def all_pairs(scores: Tensor, margin: float) -> Tensor:
    """Every two responses to a prompt whose scores differ by more than `margin`, the better one first.

    The pairs of one prompt follow those of another. Example: scores [[1, 0, 1]], margin 0 -> [[0, 1], [2, 1]].
    """
    check_shapes(scores, dims=2)
    G = scores.shape[1]
    wins = scores[:, :, None] - scores[:, None, :] > margin  # (P, G, G), false where one is NaN
    prompt, chosen, rejected = wins.nonzero().unbind(1)
    return torch.stack([prompt * G + chosen, prompt * G + rejected], 1)


def first_against_all(scores: Tensor, margin: float) -> Tensor:
    """The first response to a prompt, which is the reference solution, against every other, as in self-play.

    Scores and `margin` are not used, since the policy shall become like the solution, however its responses score. So
    there are P * (G - 1) pairs.

    Source: Self-Play Fine-Tuning (SPIN), alg. 1, arXiv 2401.01335.
    """
    check_shapes(scores, dims=2)
    places = torch.arange(scores.numel()).view(scores.shape)
    return torch.stack([places[:, :1].expand_as(places[:, 1:]), places[:, 1:]], -1).view(-1, 2)
