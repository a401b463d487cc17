"""Rollout correction: what to do if the policy that sampled the responses is not the one that learns from them.

They differ because the engine computes with other kernels than the trainer, because groups may have waited for a step
(DAPO), and because a step may make several updates. Corrections multiply the policy loss of each token: weights keep
the gradient right on average, and masks leave out tokens whose probability has changed too much. ratios.py has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rl.flags import Needs, NotNegative, Positive


@dataclass(frozen=True)
class Correction:
    """The policy that sampled is not quite the one that learns. These flags correct for that."""

    # Multiply the loss of a token by a truncated ratio of trainer to engine (TIS). none does not do so, token takes the
    # ratio of the token, and sequence takes that of its response. The default is none, except that one has to
    # choose with --rollout-quantization or --partial-rollouts.
    rollout_is: Literal["none", "token", "sequence"] | None = None
    rollout_is_threshold: Annotated[Positive, Needs("rollout_is")] = 2.0  # A larger ratio counts as this.
    rollout_is_threshold_lower: Annotated[NotNegative, Needs("rollout_is")] = 0.0  # A smaller ratio counts as this.
    # Leave out what has a ratio of trainer to engine beyond the two bounds below (IcePop, MIS). none leaves out
    # nothing, token leaves out tokens, sequence and geometric leave out responses by the product or the geometric mean
    # of their ratios, and veto leaves out responses with one such token.
    rollout_mask: Literal["none", "token", "sequence", "geometric", "veto"] = "none"
    rollout_mask_threshold: Annotated[Positive, Needs("rollout_mask")] = 2.0  # This is the largest ratio that is kept.
    # This is the smallest ratio that is kept.
    rollout_mask_threshold_lower: Annotated[NotNegative, Needs("rollout_mask")] = 0.5
    # Leave out responses with a negative advantage that have become less likely by more than this, in nats per token.
    # By default none is left out because of that.
    off_policy_mask_threshold: Positive | None = None
    # Leave out tokens to which the policy that learns and the engine give probabilities that differ by more than this,
    # as in IPO. By default none is left out because of that.
    probability_mask_threshold: Positive | None = None

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if not quite the policy that learns will sample, and --rollout-is does not say whether to
        correct for that.
        """
        quantization, share = flags["rollout_quantization"], flags["partial_rollouts"]
        problem = f"--partial-rollouts {share:g}: older weights have sampled some tokens"
        if quantization != "none":
            problem = f"--rollout-quantization {quantization}: the policy that samples is not quite the one that learns"
        if self.rollout_is is None and (quantization != "none" or share):
            fix = "add --rollout-is token, which corrects for that, or --rollout-is none to do without"
            raise ValueError(f"{problem}; {fix}")

    def weights(self, logp: Any, old_logp: Any, rollout_logp: Any, advantages: Any, mask: Any) -> Any:
        """What the policy loss of every token is multiplied by: the product of all corrections that the flags ask for.

        Args: the log-probs of each token, (B, T), by the policy that learns (logp), by the policy that starts the step
        (old_logp) and by the engine (rollout_logp); advantages and mask (B, T). Returns: a tensor (B, T) of the dtype
        of old_logp, without gradient; it is 1 everywhere if no flag is set.
        """
        kinds = {self.rollout_is, self.rollout_mask, self.off_policy_mask_threshold, self.probability_mask_threshold}
        if kinds <= {None, "none"}:
            return old_logp.new_ones(old_logp.shape)
        from extras.correction import ratios

        return ratios.weights(self, logp, old_logp, rollout_logp, advantages, mask)
