"""KL terms, which keep the policy near a reference: their flags, and the next weight of the KL in the reward.

The reward and the loss that have the terms stand in the scripts, the estimators of the KL in rl/formulas/losses.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rl.flags import AtLeast1, NotNegative, Positive


@dataclass(frozen=True)
class KLTerms:
    """KL terms keep the policy near the reference, which is --model before training."""

    use_kl_in_reward: bool = False  # Subtract kl_coef * KL(policy, reference) from the reward.
    kl_coef: NotNegative = 0.001  # This is the weight of that KL. With --kl-ctrl-type adaptive it is the first one.
    # With d = logp - ref_logp of a token, that KL is estimated as d (k1), d^2 / 2 (k2), exp(-d) - 1 + d (k3 and
    # low_var_kl), or |d| (abs).
    kl_penalty: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    # fixed leaves kl_coef as it is. adaptive steers it so that the KL approaches --kl-target.
    kl_ctrl_type: Literal["fixed", "adaptive"] = "fixed"
    kl_target: Positive = 0.1  # The adaptive controller aims at this KL per token.
    kl_horizon: AtLeast1 = 10_000  # This is a number of responses. The larger it is, the slower kl_coef changes.
    use_kl_loss: bool = False  # Add kl_loss_coef * KL(policy, reference) to the loss.
    kl_loss_coef: NotNegative = 0.001  # This is the weight of that KL term.
    # That KL is estimated as --kl-penalty explains for k1 to abs. k1+ and k3+ have the value of k1 and k3, and the
    # gradient of k2. unbiased also has the right gradient for tokens that an older policy sampled.
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "unbiased"] = "k3"
    # Make the policy the new reference at this interval, in steps. The default is never.
    ref_update_steps: AtLeast1 | None = None

    @property
    def is_used(self) -> bool:
        """Whether there is any KL term."""
        return self.use_kl_in_reward or self.use_kl_loss

    def first_coef(self, state: dict[str, Any]) -> float:
        """The first weight of the KL in the reward. `state` is what a checkpoint has of the loop, {} in a new run."""
        return state.get("kl_coef", self.kl_coef) if self.kl_ctrl_type == "adaptive" else self.kl_coef

    def check(self, flags: Mapping[str, Any]) -> None:
        """Raise ValueError if these flags contradict each other."""
        if self.kl_ctrl_type == "adaptive" and not self.use_kl_in_reward:
            problem = "--kl-ctrl-type adaptive steers the KL in the reward"
            raise ValueError(f"{problem}; add --use-kl-in-reward, or leave it out")
        if self.ref_update_steps and not self.is_used:
            raise ValueError(f"--ref-update-steps {self.ref_update_steps} needs --use-kl-loss or --use-kl-in-reward")

    def next_coef(
        self, kl_coef: float, token_kl: Any, batch: Any, trainable: Any, ranks: Any
    ) -> tuple[float, dict[str, float]]:
        """The weight of the KL in the reward of the next step, and the metrics of this step.

        It stays `kl_coef` unless --kl-ctrl-type is adaptive, see `schedule.adaptive_kl_coef`. Args: token_kl (b, T) of
        this rank's batch; trainable (B,) bool, which responses of the step count. All data ranks must enter.
        """
        from rl.formulas import schedule

        own_kl = token_kl.sum(1) / batch.num_learned.clamp(min=1)  # (b,), which add up to the mean of each response
        mean_kl = ranks.all_rows(own_kl, batch.responses, len(trainable))[trainable].mean().nan_to_num().item()
        metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl_coef}
        if self.kl_ctrl_type == "adaptive":
            aim = dict(target=self.kl_target, horizon=self.kl_horizon, num_responses=int(trainable.sum()))
            kl_coef = schedule.adaptive_kl_coef(kl_coef, mean_kl, **aim)
        return kl_coef, metrics
