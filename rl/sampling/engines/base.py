"""What every engine that samples responses can do.

    engine = make_engine(model, ranks, flags, longest=1024)
    engine.wake(); engine.update_weights(...)         the policy's weights, after every update of them
    engine.add(requests)                              at any time, also while others are sampled
    while engine.has_requests():
        for completion in engine.step(): ...          one more token for each; those that are complete now
    engine.sleep()

`Loop` in rl/sampling/loop.py has this loop once, for groups of responses.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl.data.types import Completion, Request
from rl.ranks import Ranks


class Engine:
    """Requests in flight over one copy of the model, on this rank or on a few neighboring ones.

    Ranks that share an engine (--tensor-model-parallel-size) enter `has_requests`, `step`, `abort`, `update_weights`,
    `sleep`, `wake` and `close` together. Each adds its own requests and gets its own completions.

    Engines draw from the global random generators of torch and numpy, which whoever calls `step` seeds first. A request
    with a seed of its own has its own generator.
    """

    def __init__(self, ranks: Ranks, longest: int):
        self.device, self.rank, self.longest = ranks.device, ranks.rank, longest
        self.first_rank = ranks.rank  # of those that share this engine, which sample with one seed
        self.group: dist.ProcessGroup | None = None  # of those ranks, for objects on the host. One rank alone has none.
        self.memory = 0  # bytes on the device that `sleep` gives back. `make_engine` measures it.
        self.policy_version = 0  # number of the weights. Each push adds one. A resumed run sets it to its first step.
        # The dtype of the column "routed_experts" of completions, or None if they do not have that column.
        self.routing: np.dtype | None = None
        self.new: list[Completion] = []  # of this rank's requests that have not begun
        self.in_flight: dict[Any, Completion] = {}  # of those that have, of all ranks that share this engine

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests, whose keys differ from those in flight. Raises ValueError if one could outgrow the engine."""
        for request in requests:
            n = len(request.prompt_ids) + request.sampling.max_tokens
            if n > self.longest:
                raise ValueError(f"prompt and response may have {n} tokens, but the engine was made for {self.longest}")
        self.new += [Completion(request, self.rank) for request in requests]

    def of_group(self, value: Any) -> list[Any]:
        """The `value` of each rank that shares this engine, in their order. All of them must enter."""
        if self.group is None:
            return [value]
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, value, group=self.group)
        return parts

    def has_requests(self, *, waiting: bool = False) -> bool:
        """Whether any response is still to be sampled, by this rank or one that shares the engine. `waiting` says that
        this rank will add more, so none of them may leave.
        """
        return bool(self.in_flight) or any(self.of_group(waiting or bool(self.new)))

    @property
    def is_idle(self) -> bool:
        """Whether `step` has nothing to sample. It returns [] then."""
        return not self.in_flight and not self.new

    def step(self) -> list[Completion]:
        """Sample about one more token of every response that fits into the memory. Returns those that are complete."""
        raise NotImplementedError

    def abort(self) -> list[Completion]:
        """Stop sampling all requests. Returns what those of this rank have so far, with the reason "abort"."""
        raise NotImplementedError

    @property
    def own_requests(self) -> Iterator[Completion]:
        """What the requests of this rank have so far that are not complete."""
        return (x for x in chain(self.new, self.in_flight.values()) if x.rank == self.rank and not x.is_cut)

    def cut(self, keys: Collection[Any]) -> list[Completion]:
        """Stop sampling the requests of this rank that have these keys. Returns what they have so far, with the reason
        "abort". Unlike `abort`, a rank may do that alone: ranks that share the engine hear of it later, and what is
        sampled until then is dropped.
        """
        keys = set(keys)
        ended = [x for x in self.own_requests if x.request.key in keys]
        for x in ended:
            x.is_cut = True
        self.new = [x for x in self.new if not x.is_cut]
        return ended

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load (name, whole tensor) pairs with Hugging Face names, lazily. All ranks must enter. No request may be in
        flight, see `Loop.interrupt`. Raises RuntimeError naming weights that no pushed tensor reached.
        """
        raise NotImplementedError

    def sleep(self) -> None:
        """Give the accelerator's memory back. `wake` and `update_weights` must follow. No request may be in flight."""

    def wake(self) -> None:
        """Take the memory again. What is in it is undefined until `update_weights`."""

    def close(self) -> None:
        """Shut down, once every rank is done."""

    def _forget(self, names: Iterable[Any]) -> list[Completion]:
        """Forget requests in flight, by their names. Returns the completions of this rank that were not cut."""
        ended = [self.in_flight.pop(name) for name in names]
        return [x for x in ended if x.rank == self.rank and not x.is_cut]
