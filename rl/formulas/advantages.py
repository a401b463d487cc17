"""Advantage estimators: how much better than expected was a response, or a token?

P prompts, G responses to each, B = P * G sequences, T tokens. Every function is pure, keeps the floating dtype it is
given, and asserts the shapes it expects.

The estimators from `grpo` to `reinforce_plus_plus_baseline` have one signature, so that a script can swap them:

    advantages (P, G) = f(rewards (P, G), lengths (P, G), ...)

NaN in `rewards` marks a response that could not be scored. It leaves the statistics of its group and of the batch, and
its advantage is exactly 0. The only scored response of a group has nothing to compare with, so its baseline is 0.
`lengths` is the number of policy tokens >= 0. What only one estimator needs comes by name, and `**_` takes it in the
others.

The functions below them work on (B, T) tokens. A mask is 1 (or True) on tokens that the policy sampled, 0 on prompts,
padding and observations. What stands where the mask is 0, NaN included, never reaches a result.
"""

import torch
from torch import Tensor

from rl.formulas.shared import check_shapes


def _mean(x: Tensor, weights: Tensor, dim: int) -> Tensor:
    """The weighted mean of x along dim, which stays, or inf if all weights are 0.

    It is measured from the smallest entry of positive weight, so the mean of equal entries is exactly their value. Else
    three times 0.1 would leave a deviation of 1e-9, which a division by std + 1e-6 turns into an advantage.
    """
    used = weights > 0
    lowest = torch.where(used, x, torch.inf).amin(dim, keepdim=True)
    above = torch.where(used, x - lowest, 0.0)
    total = weights.sum(dim, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return lowest + (weights * above).sum(dim, keepdim=True) / total


def _deviation(x: Tensor, weights: Tensor, dim: int) -> Tensor:
    """x minus its weighted mean along dim, see `_mean`, or 0 where the weight is 0."""
    return torch.where(weights > 0, x - _mean(x, weights, dim), 0.0)


def _centered(rewards: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """Rewards minus the weighted mean of their group. An unscored response gets 0, a lone scored one keeps its own."""
    scored = ~rewards.isnan()
    alone = scored.sum(-1, keepdim=True) == 1
    return torch.where(scored & alone, rewards, _deviation(rewards, weights * scored.to(rewards.dtype), dim=-1))


def _whitened(x: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Zero mean and unit variance over all entries, one of weight w counting w times, or 0 where w is 0."""
    deviation = _deviation(x.flatten(), weights.flatten(), dim=0).reshape(x.shape)
    variance = (weights * deviation.square()).sum() / (weights.sum() - 1).clamp(min=1)
    return deviation * (variance + eps).rsqrt()


def group_mean_std(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the scored rewards of each group. The latter divides by their number minus 1.

    A group with fewer than two scored rewards has mean 0 and std 1. The mean of equal rewards is exactly that reward.
    Example: [1, 0, 0] -> 1/3, 0.5774.

    Args: rewards (P, G) float, NaN = not scored. Returns: two tensors (P, 1).
    Source: DeepSeekMath, sec. 4.1.2, arXiv 2402.03300, which compares a score with its group by these two.
    """
    check_shapes(rewards, dims=2)
    scored = (~rewards.isnan()).to(rewards.dtype)
    num_scored = scored.sum(-1, keepdim=True)
    squares = _deviation(rewards, scored, dim=-1).square().sum(-1, keepdim=True)
    std = (squares / (num_scored - 1).clamp(min=1)).sqrt()
    return torch.where(num_scored > 1, _mean(rewards, scored, dim=-1), 0.0), torch.where(num_scored > 1, std, 1.0)


def grpo(rewards: Tensor, lengths: Tensor, *, norm_by_std: bool = True, eps: float = 1e-6, **_: object) -> Tensor:
    """Group-relative advantage: reward against the mean and standard deviation of its group.

    A_i = (r_i - mean_g) / (std_g + eps), or r_i - mean_g without norm_by_std (Dr. GRPO), see `group_mean_std`.
    A group of equal rewards gives exactly 0. Example: rewards [1, 0, 0] -> [1.1547, -0.5774, -0.5774].

    Source: DeepSeekMath, sec. 4.1.2, arXiv 2402.03300; Understanding R1-Zero-Like Training, 2503.20783 (Dr. GRPO).
    """
    check_shapes(rewards, lengths, dims=2)
    mean, std = group_mean_std(rewards)
    return ((rewards - mean) / (std + eps if norm_by_std else 1.0)).nan_to_num()


def grpo_batch(rewards: Tensor, lengths: Tensor, *, eps: float = 1e-6, **_: object) -> Tensor:
    """Reward against the mean of its group, in units of the standard deviation of the whole step.

    A_i = (r_i - mean_g) / (std + eps), std over all scored rewards of the step, divided by their number minus 1. std is
    1 if they are equal or fewer than two. There is one scale for all groups, so one with little spread is not blown up,
    as in `grpo`. `rewards` must hold every group of the step.

    Example: rewards [[1, 0], [0, 0]] -> std 0.5 -> [[1, -1], [0, 0]].

    Source: Tricks or Traps? A Deep Dive into RL for LLM Reasoning (Lite PPO), arXiv 2508.08221.
    """
    check_shapes(rewards, lengths, dims=2)
    std = group_mean_std(rewards.reshape(1, -1))[1]  # of the whole step, as if it was one group
    return _centered(rewards) / (torch.where(std > 0, std, 1.0) + eps)


def max_rl(rewards: Tensor, lengths: Tensor, *, eps: float = 1e-6, **_: object) -> Tensor:
    """Reward against the mean of its group, in units of this mean, which is the gradient of log(chance of being right).

    A_i = (r_i - mean_g) / (mean_g + eps). It is 0 in a group whose mean is not positive. A rare right answer counts
    more: one of reward 1 among n with 0 otherwise has A = n - 1. A group with one scored response has baseline 0, so it
    gets r / (r + eps). For rewards that are never negative. Example: rewards [1, 0, 0, 0] -> [3, -1, -1, -1].

    Source: Maximum Likelihood Reinforcement Learning (MaxRL), arXiv 2602.02710.
    """
    check_shapes(rewards, lengths, dims=2)
    mean = rewards.nanmean(-1, keepdim=True)  # NaN if none is scored, and then nothing below is above 0
    return torch.where(mean > 0, _centered(rewards) / (mean + eps), 0.0)


def grpo_passk(rewards: Tensor, lengths: Tensor, *, eps: float = 1e-6, **_: object) -> Tensor:
    """Only the best response of a group counts, by how far it is ahead of the second best.

    A_best = (r_(1) - r_(2)) / (std_g + eps), std_g as in `group_mean_std`. It is 0 for all others, and for all if two
    share the best. Without the division its gradient is that of the expected best reward of a group (pass@G for right
    and wrong). A group with one scored response has r_(2) = 0.
    Example: rewards [1, 0, 0] -> std 0.5774 -> [1.7320, 0, 0].

    Source: Optimizing Language Models for Inference Time Objectives using RL, arXiv 2503.19595.
    """
    check_shapes(rewards, lengths, dims=2)
    num_scored = (~rewards.isnan()).sum(-1, keepdim=True)
    ranked, order = rewards.nan_to_num(-torch.inf).sort(-1, descending=True)
    lead = ranked[:, :1] - torch.where(num_scored > 1, ranked[:, 1:2], 0.0) if rewards.shape[1] > 1 else ranked
    best = torch.where(num_scored > 0, lead / (group_mean_std(rewards)[1] + eps), 0.0)
    return torch.zeros_like(rewards).scatter(-1, order[:, :1], best)


def gdpo(rewards: Tensor, lengths: Tensor, *, parts: Tensor, weights: tuple[float, ...] = (), **_: object) -> Tensor:
    """Every part of the reward is compared with its group by itself. The sum is whitened over all tokens of the step.

    s_i = sum_k w_k * grpo(parts_k)_i; A_i = (s_i - mean) * rsqrt(var + 1e-8), moments over tokens, as in
    `reinforce_plus_plus_baseline`. If the parts are added up first, one with a wide range hides the others, and
    different combinations get the same advantage. A part that a response lacks (NaN) adds 0 to its s_i. A response
    without any part gets 0 and leaves the moments. `parts` must hold every group of the step. Moments over tokens are
    verl's. The paper and TRL take them over responses.

    Args: rewards is not used; parts (K, P, G) float, NaN = not scored; weights, K numbers, or none: all 1.
    Source: GDPO: Group reward-Decoupled Normalization Policy Optimization, arXiv 2601.05242.
    """
    check_shapes(rewards[None], lengths[None], parts[:1], dims=3)
    assert len(weights) in (0, len(parts)), f"unexpected shapes: {tuple(parts.shape)}, {len(weights)} weights"
    weights = weights or (1.0,) * len(parts)
    total = torch.stack([w * grpo(part, lengths) for w, part in zip(weights, parts, strict=True)]).sum(0)
    return _whitened(total, lengths.to(parts.dtype) * ~parts.isnan().all(0), eps=1e-8)


def rloo(rewards: Tensor, lengths: Tensor, **_: object) -> Tensor:
    """Leave-one-out advantage: reward against the mean of the other responses of the group.

    A_i = r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean_g) * n / (n - 1), n scored responses. With n = 1 this is r_i.
    Example: rewards [1, 0, 0] -> [1, -0.5, -0.5].

    Source: Back to Basics: Revisiting REINFORCE Style Optimization, arXiv 2402.14740.
    """
    check_shapes(rewards, lengths, dims=2)
    num_scored = (~rewards.isnan()).sum(-1, keepdim=True)
    return _centered(rewards) * num_scored / (num_scored - 1).clamp(min=1)


def opo(rewards: Tensor, lengths: Tensor, **_: object) -> Tensor:
    """Advantage against the length-weighted baseline, which minimizes the variance of the policy gradient.

    A_i = r_i - sum_g L_j r_j / sum_g L_j. In a group of several scored responses one without tokens weighs nothing and
    gets 0.

    Source: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.
    """
    check_shapes(rewards, lengths, dims=2)
    return _centered(rewards, lengths.to(rewards.dtype))


def gpg(rewards: Tensor, lengths: Tensor, **_: object) -> Tensor:
    """Group-centered advantage, scaled up when few responses of the batch earn anything.

    A_i = alpha * (r_i - mean_g), alpha = N / max(#{r_i != 0}, 1), N scored responses in the whole batch. `rewards` must
    hold every group of the step. This alpha is verl's. The paper divides by the number of responses whose group has
    different rewards, not by that of responses that earn something.

    Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, arXiv 2504.02546.
    """
    check_shapes(rewards, lengths, dims=2)
    scored = ~rewards.isnan()
    alpha = scored.sum().to(rewards.dtype) / (scored & (rewards != 0)).sum().clamp(min=1)
    return alpha * _centered(rewards)


def reinforce_plus_plus_baseline(rewards: Tensor, lengths: Tensor, **_: object) -> Tensor:
    """Group-centered advantage, whitened over all tokens of the batch.

    s_i = r_i - mean_g; A_i = (s_i - mean) * rsqrt(var + 1e-8), where mean and unbiased var count s_i once per token,
    L_i times: the same as `whiten` over the tokens. Fewer than two tokens in the batch give 0. `rewards` must hold
    every group of the step.

    Source: REINFORCE++, arXiv 2501.03262.
    """
    check_shapes(rewards, lengths, dims=2)
    return _whitened(_centered(rewards), lengths.to(rewards.dtype) * ~rewards.isnan(), eps=1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


@torch.no_grad()
def returns_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each sampled token on.

    R_t = r_t + gamma * R_{t+1}, where t + 1 is the next token with mask 1. The running return passes a masked token
    undiscounted, and a reward that stands there does not count.
    Example: gamma = 0.5, mask [1, 0, 1], r [0, 9, 1] -> [0.5, 0, 1].

    Args: rewards, mask (B, T); gamma in [0, 1]. Returns: (B, T), 0 where mask is 0, without gradient.
    Source: REINFORCE++, arXiv 2501.03262.
    """
    check_shapes(rewards, mask, dims=2)
    sampled = mask.bool()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(sampled[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return torch.where(sampled, returns, 0.0)


def sums_by_group(returns: Tensor, weights: Tensor, mask: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """What `token_baselines` needs of the rows of a rank. The sums of all ranks add up.

    For every group and place t these are sum_i W_it * R_it, sum_i W_it, and the number of rows. Each is over the rows i
    of the group with mask 1 there.

    Args: returns, weights, mask (B, T), as wide on all ranks; groups (B,) int64. Returns: (3, num_groups, T).
    Source: Optimal Token Baseline, arXiv 2602.07078.
    """
    check_shapes(returns, weights, mask, dims=2)
    terms = torch.stack([weights * returns, weights, torch.ones_like(returns)])
    terms = torch.where(mask.bool(), terms, 0.0)
    return terms.new_zeros(3, num_groups, mask.shape[1]).index_add(1, groups, terms)


def token_baselines(sums: Tensor, *, eps: float = 1e-8) -> Tensor:
    """The baseline of every place in a group that makes the noise of the gradient smallest (optimal token baseline).

    B_t = sum_i W_it * R_it / (sum_i W_it + eps), over the rows that have a token there. It is 0 where fewer than two
    have. W_it is a measure of the squared gradient of all log-probs up to t. It is the running sum of terms 1 - 2 pi_t
    + sum_v pi(v)^2. Such a term is the squared gradient of log pi_t with respect to the logits.

    Args: sums (3, P, T), of all ranks, see `sums_by_group`. Returns: (P, T).
    Source: The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL, arXiv 2602.07078.
    """
    assert sums.dim() == 3 and len(sums) == 3, f"unexpected shapes: {tuple(sums.shape)}"
    return torch.where(sums[2] > 1, sums[0] / (sums[1] + eps), 0.0)


def whiten(x: Tensor, mask: Tensor, *, mean: float, var: float, eps: float = 1e-8) -> Tensor:
    """Zero mean and unit variance over all valid tokens of the batch.

    (x - mean) * rsqrt(var + eps), in float64. Fewer than two valid entries, or equal ones, give zeros.

    Args: x float, mask, both (B, T); mean and var, the unbiased variance (ddof=1), of every entry of the step with mask
    1, on all ranks (`Ranks.moments`). Returns: (B, T) of x's dtype, 0 where mask is 0.
    Source: advantage normalization, The 37 Implementation Details of PPO, detail 7, iclr-blog-track.github.io.
    """
    check_shapes(x, mask)
    return torch.where(mask.bool(), (x.double() - mean) * (var + eps) ** -0.5, 0.0).to(x.dtype)
