"""Implicit process rewards (PRIME): a language model, trained on right and wrong only, that rewards every token.

P prompts, G responses to each, B = P * G sequences, b of them on this rank, T tokens. q_t = log pi_prm(y_t) - log
pi_ref(y_t) is the log-ratio of the reward model to its reference at token t. beta * sum_t q_t is trained to be the
log-odds that the response is right, and then beta * q_t is what token t adds to it. A mask is 1 on tokens that the
policy sampled; NaN marks a response without a score, which leaves the statistics of its group.

Source of all: Process Reinforcement through Implicit Rewards (PRIME), arXiv 2502.01456, as verl's recipe/prime has it;
the reward is that of Free Process Rewards without Process Labels, prop. 3.1, arXiv 2412.01981. Every function is pure.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def informative(accuracies: Tensor, *, low: float, high: float) -> Tensor:
    """Which prompts are neither too easy nor too hard: those whose mean accuracy is within `low` and `high`.

    Args: accuracies (P, G), NaN = not scored; a prompt without a score is not within. Returns: (P,) bool.
    Source: online prompt filtering of PRIME, arXiv 2502.01456.
    """
    assert accuracies.dim() == 2, f"{accuracies.shape}"
    mean = accuracies.nanmean(1)
    return (mean >= low - 1e-6) & (mean <= high + 1e-6)  # a mean of 1, 0, 0, 0, 0 is 0.2, whatever its rounding


def cross_entropy(log_ratios: Tensor, accuracies: Tensor, *, beta: float) -> Tensor:
    """-a log sigmoid(beta * q) - (1 - a) log sigmoid(-beta * q), for q = sum_t q_t of a response.

    Args: log_ratios (b,), the q; accuracies (b,), the a, within 0 and 1. Returns: (b,).
    Source: PRIME, alg. 1, arXiv 2502.01456.
    """
    assert log_ratios.shape == accuracies.shape, f"{log_ratios.shape}, {accuracies.shape}"
    return F.binary_cross_entropy_with_logits(beta * log_ratios, accuracies.to(log_ratios.dtype), reduction="none")


def token_rewards(prm_logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """beta * q_t for every sampled token but the last one of a response, where the outcome is.

    Args: prm_logp, ref_logp, mask (b, T). Returns: (b, T), without gradient.
    Source: PRIME, eq. 3, arXiv 2502.01456.
    """
    assert prm_logp.shape == ref_logp.shape == mask.shape, f"{prm_logp.shape}, {ref_logp.shape}, {mask.shape}"
    inner = mask.bool() & (mask.cumsum(1) < mask.sum(1, keepdim=True))
    return torch.where(inner, beta * (prm_logp - ref_logp), 0.0).detach()


def largest_sum(rewards: Tensor) -> Tensor:
    """The largest absolute sum of token rewards (b, T) from a token to the end: a scalar, 0 without rows.

    Source: verl, recipe/prime, `prime_norm`.
    """
    sums = rewards.flip(1).cumsum(1).abs()
    return sums.max() if sums.numel() else rewards.new_zeros(())


def leave_one_out(means: Tensor) -> tuple[Tensor, Tensor]:
    """What turns a reward r of a response into r * n / (n - 1) - (sum of the group's means) / (n - 1).

    For one reward a response, its own mean, that is r less the mean of the others. For a reward of each token, the mean
    of a response over its tokens stands for it. n counts the scored responses of the group; a lone one keeps its r.

    Args: means (P, G), NaN = not scored. Returns: factors and baselines (P, G), 0 where not scored.
    Source: verl, recipe/prime; PRIME, eq. 5, arXiv 2502.01456, subtracts the mean of the others from each r as it is;
    RLOO, arXiv 2402.14740.
    """
    scored = ~means.isnan()
    n = scored.sum(1, keepdim=True)
    others = (n - 1).clamp(min=1)
    factor = n / others  # 1 of a lone one
    baseline = torch.where(n > 1, means.nansum(1, keepdim=True) / others, 0.0)
    return torch.where(scored, factor, 0.0), torch.where(scored, baseline, 0.0)


def order_accuracy(log_ratios: Tensor, accuracies: Tensor) -> Tensor:
    """How often the reward model puts two responses to a prompt into the right order: a scalar.

    Each pair of a group weighs as much as its accuracies differ; a group without a difference counts as 0.5.

    Args: log_ratios, accuracies (P, G), NaN = not scored. Source: verl, recipe/prime, `compute_dpo_accuracy`.
    """
    assert log_ratios.shape == accuracies.shape, f"{log_ratios.shape}, {accuracies.shape}"
    wanted = (accuracies[:, :, None] - accuracies[:, None, :]).nan_to_num(0.0)  # (P, G, G), each pair twice
    right = ((log_ratios[:, :, None] > log_ratios[:, None, :]) == (wanted > 0)).to(wanted.dtype)
    upper = wanted.abs().triu(1)
    total = upper.sum((1, 2))
    return torch.where(total > 0, (right * upper).sum((1, 2)) / total, 0.5).mean()
