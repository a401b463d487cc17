"""Learning-rate schedules: pure functions of the step, so resuming a run is setting `step`.

Each returns the factor by which the base learning rate is multiplied. `step` is the number of steps already made: 0 for
the first; all updates of a training step share its learning rate. A warm-up counts k + 1 at step k, so that no step,
not even the first, has learning rate 0.
"""

import math


def constant_with_warmup(step: int, *, warmup_steps: int) -> float:
    """Linear warm-up, then 1.

    min(1, (step + 1) / max(1, warmup_steps)): step 0 has 1 / warmup_steps, never 0; step warmup_steps - 1 is the
    first with 1. Example: warmup_steps 4 -> 0.25, 0.5, 0.75, 1, 1, ...

    Args: step >= 0, 0 for the first step; warmup_steps, 0 or 1 for none. Returns: a factor in (0, 1].
    """
    assert step >= 0, f"step counts from 0, got {step}"
    return min(1.0, (step + 1) / max(1, warmup_steps))


def cosine_with_warmup(step: int, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> float:
    """Linear warm-up, then half a cosine from 1 down to min_lr_ratio.

    Warm-up as in constant_with_warmup. From step = warmup_steps on, p = (step - warmup_steps) / (total_steps -
    warmup_steps) and the factor is min + (1 - min) * (1 + cos(pi * p)) / 2. p reaches 1 at step = total_steps, one past
    the last step, so the last step is not wasted on a learning rate of 0; beyond, the factor stays at the minimum.

    Args: step >= 0, 0 for the first step; total_steps, of the whole run; min_lr_ratio in [0, 1].
    Returns: a factor in [0, 1].
    Raises: ValueError if min_lr_ratio is not in [0, 1].
    Source: SGDR: Stochastic Gradient Descent with Warm Restarts, eq. 5 without restarts, arXiv 1608.03983.
    """
    assert step >= 0, f"step counts from 0, got {step}"
    if not 0.0 <= min_lr_ratio <= 1.0:
        raise ValueError(f"min_lr_ratio must be in [0, 1], got {min_lr_ratio}")
    if step < warmup_steps:
        return constant_with_warmup(step, warmup_steps=warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


def lr_factor(kind: str, step: int, warmup_steps: int, total_steps: int) -> float:
    """The schedule named `kind`, "constant" or "cosine" (down to 0), after `step` steps.

    Raises ValueError for another name.
    """
    if kind == "constant":
        return constant_with_warmup(step, warmup_steps=warmup_steps)
    if kind == "cosine":
        return cosine_with_warmup(step, warmup_steps=warmup_steps, total_steps=total_steps)
    raise ValueError(f"--lr-scheduler-type {kind!r} must be constant or cosine")


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: int, num_responses: int) -> float:
    """The next weight of the KL penalty: larger if the measured KL is above the target, smaller if below.

        coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(1, num_responses / horizon))

    Args: coef, the present weight; kl, mean over responses of the mean KL of their tokens; num_responses, those that it
    was measured on; more than the horizon count as the horizon, or the coefficient could become negative.
    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, which has no such limit.
    """
    return coef * (1 + min(max(kl / target - 1, -0.2), 0.2) * min(1, num_responses / horizon))
