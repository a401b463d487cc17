"""Schedules: pure functions of the step, so that a resumed run needs no state for them."""

import math


def lr_factor(kind: str, step: int, warmup_steps: int, total_steps: int) -> float:
    """The factor of the learning rate in step `step`, counted from 0. All updates of a step share it.

    Linear warm-up, min(1, (step + 1) / max(1, warmup_steps)), so that no step has the learning rate 0. Then "constant"
    stays at 1, "linear" falls from 1 to 0 as 1 - p, and "cosine" as (1 + cos(pi * p)) / 2, with
    p = (step - warmup_steps) / (total_steps - warmup_steps), which is 1 one step after the last.
    Example: constant, warmup_steps 4 -> 0.25, 0.5, 0.75, 1, 1, ...; linear, no warm-up, 4 steps -> 1, 0.75, 0.5, 0.25.

    Args: warmup_steps, 0 or 1 for none. Returns: a factor in [0, 1]. Raises ValueError for another kind.
    Source: SGDR: Stochastic Gradient Descent with Warm Restarts, eq. 5 without restarts, arXiv 1608.03983.
    """
    assert step >= 0, f"step counts from 0, got {step}"
    if kind not in ("constant", "linear", "cosine"):
        raise ValueError(f"--lr-scheduler-type {kind!r} must be constant, linear or cosine")
    if kind == "constant" or step < warmup_steps:
        return min(1.0, (step + 1) / max(1, warmup_steps))
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: int, num_responses: int) -> float:
    """The next weight of the KL penalty: larger if the measured KL is above the target, smaller if below.

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(1, num_responses / horizon))

    Args: coef, the present weight; kl, mean over responses of the mean KL of their tokens; num_responses, those that it
    was measured on; more than the horizon count as the horizon, or the coefficient could become negative.
    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, which has no such limit.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(1, num_responses / horizon))
