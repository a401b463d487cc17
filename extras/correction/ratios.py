"""The ratios of trainer to engine, and the weights and masks that are made of them.

B sequences, T tokens. There are three ratios, with x_t = old_logp_t - rollout_logp_t and L tokens in a row:

    token      exp(x_t)            of this token
    sequence   exp(sum_t x_t)      of the whole response, the same on all its tokens
    geometric  exp(sum_t x_t / L)  the mean of its tokens, for each of them

Every weight and mask multiplies the policy loss of a token. The denominators of the loss stay as they are. Every
function is pure, keeps the floating dtype that it is given, and asserts the shapes that it expects. A mask is 1 on
tokens that the policy sampled. What stands where it is 0, NaN included, never reaches a result.
"""

import torch
from torch import Tensor

from extras.correction import Correction
from rl.formulas.shared import MAX_LOG_RATIO, check_shapes


def rollout_ratio(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, level: str) -> Tensor:
    """How much more likely the trainer finds what the engine sampled: the ratio of a level, on every token.

    The logarithm is bounded to [-20, 20]. Example: x = [log 2, log 8] -> token [2, 8], sequence [16, 16],
    geometric [4, 4].

    Args: old_logp, rollout_logp, mask (B, T); level "token", "sequence" or "geometric". Returns: (B, T), 1 where mask
    is 0, without gradient. Raises: ValueError for an unknown level.
    Source: rollout_is and its levels in verl.
    """
    check_shapes(old_logp, rollout_logp, mask)
    valid = mask.bool()
    log_ratio = torch.where(valid, old_logp - rollout_logp, 0.0).detach()
    if level in ("sequence", "geometric"):
        total = log_ratio.sum(-1, keepdim=True)
        of_row = total / valid.sum(-1, keepdim=True).clamp(min=1) if level == "geometric" else total
        log_ratio = torch.where(valid, of_row, 0.0)
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; known: token, sequence, geometric")
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """Truncated importance weights: clip(ratio, low, high). They are right on average except for the bounds, which
    limit the noise.

    Args: ratio (B, T). Returns: (B, T).
    Source: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, fengyao.notion.site/off-policy-rl;
    truncation from above, IMPALA, arXiv 1802.01561.
    """
    return ratio.clamp(low, high)


def within(ratio: Tensor, *, low: float, high: float) -> Tensor:
    """1 where low <= ratio <= high, else 0: what is further away teaches nothing.

    Of tokens IcePop, of sequences masked importance sampling (MIS), of the geometric mean verl's geo_rs.

    Args: ratio (B, T). Returns: (B, T) of its dtype.
    Source: Every Step Evolves (IcePop), arXiv 2510.18855; MIS, yingru.notion.site (When Speed Kills Stability).
    """
    return ((low <= ratio) & (ratio <= high)).to(ratio.dtype)


def all_within(ratio: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """1 on all tokens of a response whose sampled tokens all have low <= ratio <= high, else 0 on all of them.

    One token that the trainer finds impossible shows that something went wrong with the whole response.

    Args: ratio, of tokens, and mask (B, T). Returns: (B, T) of the ratio's dtype.
    Source: verl's rollout_token_veto_threshold, prime-rl's mask of a sequence by its least ratio.
    """
    check_shapes(ratio, mask)
    beyond = mask.bool() & (within(ratio, low=low, high=high) == 0)
    return (~beyond.any(-1, keepdim=True)).expand_as(ratio).to(ratio.dtype)


def off_policy_mask(
    logp: Tensor, rollout_logp: Tensor, advantages: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """0 on responses with a negative advantage that the policy has moved away from since they were sampled, else 1.

    0 where A < 0 and mean_t(rollout_logp_t - logp_t) > threshold. Such a response says little about what the policy
    does today, and pushing it down further makes training unstable.

    Args: logp, rollout_logp, advantages, mask (B, T); threshold in nats a token. Returns: (B, T), 1 where mask is 0,
    without gradient.
    Source: DeepSeek-V3.2, eq. 9, arXiv 2512.02556.
    """
    check_shapes(logp, rollout_logp, advantages, mask)
    valid = mask.bool()
    moved = torch.where(valid, rollout_logp - logp, 0.0)
    moved = moved.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    return 1.0 - (valid & (advantages < 0) & (moved > threshold)).to(logp.dtype)


def probability_mask(logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """0 on tokens whose probability is no longer what it was when they were sampled, else 1.

    0 where |exp(logp_t) - exp(rollout_logp_t)| > threshold, whatever the sign of the advantage. A rare token may have a
    ratio far from 1 and hardly another probability. Bounds of the ratio leave it out, this does not.

    Args: logp, rollout_logp, mask (B, T). Returns: (B, T), 1 where mask is 0, without gradient.
    Source: INTELLECT Policy Optimization (IPO), docs.primeintellect.ai/prime-rl/ipo.
    """
    check_shapes(logp, rollout_logp, mask)
    moved = torch.where(mask.bool(), logp.exp() - rollout_logp.exp(), 0.0).detach()
    return (moved.abs() <= threshold).to(logp.dtype)


def weights(
    flags: Correction, logp: Tensor, old_logp: Tensor, rollout_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The product of all corrections that the flags ask for, see `extras.correction.Correction.weights`."""
    result = torch.ones_like(old_logp)
    if flags.rollout_is not in (None, "none"):
        ratio = rollout_ratio(old_logp, rollout_logp, mask, level=flags.rollout_is)
        result = result * truncated(ratio, low=flags.rollout_is_threshold_lower, high=flags.rollout_is_threshold)
    low, high = flags.rollout_mask_threshold_lower, flags.rollout_mask_threshold
    if flags.rollout_mask == "veto":
        ratio = rollout_ratio(old_logp, rollout_logp, mask, level="token")
        result = result * all_within(ratio, mask, low=low, high=high)
    elif flags.rollout_mask != "none":
        ratio = rollout_ratio(old_logp, rollout_logp, mask, level=flags.rollout_mask)
        result = result * within(ratio, low=low, high=high)
    if (threshold := flags.off_policy_mask_threshold) is not None:
        result = result * off_policy_mask(logp, rollout_logp, advantages, mask, threshold=threshold)
    if (threshold := flags.probability_mask_threshold) is not None:
        result = result * probability_mask(logp, rollout_logp, mask, threshold=threshold)
    return result
