"""The flags of rollout correction, and the weights they ask for. rl/formulas/correction.py has the formulas."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from rl.flags import Needs, NotNegative, Positive
from rl.formulas import correction as formulas


@dataclass(frozen=True)
class Correction:
    """rollout correction: the policy that sampled is not quite the one that learns"""

    # weigh tokens by the ratio of trainer to engine, truncated (TIS); default none; --rollout-quantization and
    # --partial-rollouts ask for one
    rollout_is: Literal["none", "token", "sequence"] | None = None
    rollout_is_threshold: Annotated[Positive, Needs("rollout_is")] = 2.0  # largest weight
    rollout_is_threshold_lower: Annotated[NotNegative, Needs("rollout_is")] = 0.0  # smallest weight
    # leave out tokens, or responses, whose ratio of trainer to engine is beyond the two bounds below (IcePop, MIS);
    # veto: responses that have one such token
    rollout_mask: Literal["none", "token", "sequence", "geometric", "veto"] = "none"
    rollout_mask_threshold: Annotated[Positive, Needs("rollout_mask")] = 2.0  # largest ratio that is kept
    rollout_mask_threshold_lower: Annotated[NotNegative, Needs("rollout_mask")] = 0.5  # smallest ratio that is kept
    # leave out responses with a negative advantage that have become less likely by more than this, in nats a token
    off_policy_mask_threshold: Positive | None = None
    # leave out tokens whose probability by the policy that learns and by the engine differ by more than this (IPO)
    probability_mask_threshold: Positive | None = None


def weights(
    flags: Correction, logp: Tensor, old_logp: Tensor, rollout_logp: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """What the policy loss of every token is multiplied with: the product of all corrections that the flags ask for.

    Args: logp of the policy that learns, old_logp of the one that starts the step, rollout_logp by the engine,
    advantages, mask (B, T). Returns: (B, T), 1 where no flag is set, without gradient.
    """
    result = torch.ones_like(old_logp)
    if flags.rollout_is not in (None, "none"):
        ratio = formulas.rollout_ratio(old_logp, rollout_logp, mask, level=flags.rollout_is)
        low, high = flags.rollout_is_threshold_lower, flags.rollout_is_threshold
        result = result * formulas.truncated(ratio, low=low, high=high)
    if flags.rollout_mask != "none":
        level = "token" if flags.rollout_mask == "veto" else flags.rollout_mask
        ratio = formulas.rollout_ratio(old_logp, rollout_logp, mask, level=level)
        bounds = dict(low=flags.rollout_mask_threshold_lower, high=flags.rollout_mask_threshold)
        is_veto = flags.rollout_mask == "veto"
        result = result * (formulas.all_within(ratio, mask, **bounds) if is_veto else formulas.within(ratio, **bounds))
    if (threshold := flags.off_policy_mask_threshold) is not None:
        result = result * formulas.off_policy_mask(logp, rollout_logp, advantages, mask, threshold=threshold)
    if (threshold := flags.probability_mask_threshold) is not None:
        result = result * formulas.probability_mask(logp, rollout_logp, mask, threshold=threshold)
    return result
