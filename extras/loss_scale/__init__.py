"""The scale of the loss of a model that learns in float16. bfloat16 and float32 need none.

The smallest number of float16 is 6e-8, and many gradients are smaller. They would be 0. So `sharding.backward`
multiplies the loss with a power of two, and with it all gradients, and `sharding.clip_grad_norm` divides them by it,
in float32. The largest number is 65,504. If gradients go beyond it, `clip_grad_norm` skips the update and halves the
scale. After GROWTH_INTERVAL updates without overflow it doubles it.

Source: Micikevicius et al. 2017, arXiv 1710.03740. The numbers are those of torch.amp.GradScaler, except for the
interval, for which verl has 400 in the place of 2,000.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GROWTH_INTERVAL = 400  # updates


@dataclass
class LossScale:
    """The scale of a model, its attribute `loss_scale`. It is the same on all ranks, and part of a checkpoint."""

    scale: float = 2.0**16
    clean: int = 0  # updates since the last overflow, or since the scale has grown
    skipped: int = 0  # updates of the run that were skipped for an overflow

    def overflowed(self, norm: float) -> bool:
        """Take note of the gradient norm of an update. Returns whether the update has to be skipped because the scale
        was too large. At the scale 1, a norm that is not finite has another cause.
        """
        if math.isfinite(norm):
            is_due = self.clean + 1 == GROWTH_INTERVAL
            self.scale, self.clean = (2 * self.scale, 0) if is_due else (self.scale, self.clean + 1)
            return False
        self.clean = 0
        if self.scale == 1:
            return False
        self.scale, self.skipped = self.scale / 2, self.skipped + 1
        return True


def factor_of(model: Any) -> float:
    """What the loss of a model has to be multiplied with."""
    scale = getattr(model, "loss_scale", None)
    return scale.scale if scale else 1.0


def metrics_of(name: str, model: Any) -> dict[str, float]:
    """Metrics of the model that the run calls `name`, if it has a scale."""
    scale = getattr(model, "loss_scale", None)
    return {f"{name}/loss_scale": scale.scale, f"{name}/skipped_for_overflow": float(scale.skipped)} if scale else {}


def state_of(trained: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The scales of a run's models, for the state of its loop, which has nothing of them if there are none."""
    scales = {name: vars(scale) for name, (x, _) in trained.items() if (scale := getattr(x, "loss_scale", None))}
    return {"loss_scales": scales} if scales else {}


def load_state(trained: Mapping[str, tuple[Any, Any]], state: dict[str, Any]) -> None:
    """Give models the scales that `state_of` has put into the state of a loop. Raises ValueError if one is damaged."""
    for name, (model, _) in trained.items() if "loss_scales" in state else ():
        if getattr(model, "loss_scale", None):
            saved = state["loss_scales"].get(name, {})
            numbers = [saved.get(field) for field in vars(model.loss_scale)]
            if not all(isinstance(x, int | float) and 0 <= x < math.inf for x in numbers) or numbers[0] < 1:
                raise ValueError(f"the checkpoint's loss scale of {name} is {saved}; continue from an earlier one")
            model.loss_scale = LossScale(*numbers)
