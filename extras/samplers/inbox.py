"""How a sampler gets the weights that its run has told of: from a file, or over the network while it goes on."""

import time
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from extras.samplers.weight_files import read_weights
from extras.samplers.weight_network import Receiving

UNREADABLE_S = 20.0  # a sampler that cannot read weights for this long does not share a folder with the run


class Inbox:
    """The newest weights that the run has told of. Args: host, of the run, as this machine reaches it, which weights
    that come over the network need.
    """

    def __init__(self, host: str | None):
        self.host = host
        self.newest: dict[str, Any] | None = None  # what the run has told, or None once they are taken
        self.arriving: Receiving | None = None  # a transfer over the network that goes on
        self.last_key = b""  # of the transfer that was begun last
        self.unread_since: float | None = None  # since when weights could not be read

    def tell(self, weights: dict[str, Any]) -> None:
        """The run has told of newer weights. While others arrive, these wait until the run tells of them again."""
        if self.arriving is None:
            self.newest = weights

    def take(self) -> tuple[int, Iterator[tuple[str, Tensor]]] | None:
        """The version of the newest weights and their (name, tensor) pairs, or None if there are none, or none yet.

        Raises RuntimeError if weights could not be read for too long.
        """
        if (weights := self.newest) is None:
            return None
        try:
            named_tensors = self._read(weights)
        except OSError as error:  # newer ones have replaced them, of which the run will tell
            self.newest, self.unread_since = None, self.unread_since or time.monotonic()
            if time.monotonic() - self.unread_since > UNREADABLE_S:
                why = "; on another machine a sampler needs --weights-transfer gloo or nccl, or --weights-dir"
                why = "" if "key" in weights else why
                raise RuntimeError(f"the run's weights cannot be read: {error}{why}") from error
            return None
        if named_tensors is None:
            return None
        self.newest = self.unread_since = None
        return weights["version"], named_tensors

    def _read(self, weights: dict[str, Any]) -> Iterator[tuple[str, Tensor]] | None:
        """(name, tensor) pairs, or None while they are on their way. Raises OSError if they cannot be read."""
        if "key" not in weights:
            return read_weights(weights)
        if self.arriving is None and weights["key"] != self.last_key:  # else the run will see that it has failed
            self.last_key, self.arriving = weights["key"], Receiving(weights, self.host)
            self.arriving.start()
        if self.arriving is None or self.arriving.is_alive():
            return None
        arrived, self.arriving = self.arriving, None
        return arrived.named_tensors()
