"""Weights that travel to samplers over the network, for --weights-transfer gloo and nccl of train_async.py."""

from typing import Any


def outbox(transfer: str, address: str, device: Any, patience_s: float) -> Any:
    """The run's side: see `weight_network.Outbox`."""
    from extras.samplers.weight_network import Outbox

    return Outbox(transfer, address, device, patience_s)


def receiving(about: dict[str, Any], host: str) -> Any:
    """The sampler's side: see `weight_network.Receiving`."""
    from extras.samplers.weight_network import Receiving

    return Receiving(about, host)
