"""Weights, gradients and moments in host memory, while the device needs its own for something else, or for good.

`OffloadFlags` joins the flags about memory. What a script moves to the host while it samples goes through `offload` and
`onload`. The machine is in host.py.
"""

from dataclasses import dataclass
from typing import Any

from rl.flags import Free, Switch

NO_OFFLOAD = {"optimizer_offload": False, "param_offload": False}  # "auto" where nobody has computed what fits


@dataclass(frozen=True)
class OffloadFlags:
    """These flags decide what is kept in host memory."""

    # Keep AdamW's moments in host memory. During its step they pass through the GPU, those of one parameter at a time.
    optimizer_offload: Free[Switch] = "auto"
    # Keep weights, gradients and moments in host memory. Layers come to the GPU to compute, and AdamW steps on the
    # host.
    param_offload: Free[Switch] = "auto"

    @property
    def home(self) -> Any:
        """What keeps a sharded model in host memory, see `rl.model.sharding.Memory`, or None if nothing does."""
        if self.param_offload is not True:
            return None
        from extras.offload import host

        return host.HostMemory()


def offload(model: Any, optimizer: Any = None) -> None:
    """Move a sharded model, and its optimizer's state, to the host, when no graph waits for its backward pass."""
    from extras.offload import host

    host.offload(model, optimizer)


def onload(model: Any, device: Any, optimizer: Any = None) -> None:
    """Undo `offload`, bit by bit. Neither does anything to a model whose `home` is the host."""
    from extras.offload import host

    host.onload(model, device, optimizer)


def prepare_steps(optimizer: Any, memory: OffloadFlags, device: Any) -> None:
    """From now on an AdamW steps as the flags say: with its moments in host memory, and on all cores of the host
    if its weights are there too. That changes no bit.
    """
    if memory.optimizer_offload:
        from extras.offload import host

        host.keep_moments_on_host(optimizer, device)
    if memory.home is not None:
        from extras.offload import host

        host.step_on_all_cores(optimizer)
