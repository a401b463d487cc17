"""What every engine that samples responses can do.

    engine = make_engine(model, ranks, longest=1024)
    engine.wake(); engine.update_weights(...)         the policy's weights, after every update of them
    engine.add(requests)                              at any time, also while others are sampled
    while engine.has_requests():
        for completion in engine.step(): ...          one more token for each; those that are complete now
    engine.sleep()

rl/sampling/rollout.py has this loop once, for groups of responses.
"""

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from rl.data.encode import load_tokenizer
from rl.data.types import Completion, Request


class Engine(Protocol):
    """Requests in flight over one copy of the model, on this rank or on a few neighbouring ones.

    Ranks that share an engine (--tensor-model-parallel-size) enter `has_requests`, `step`, `abort`, `update_weights`,
    `sleep`, `wake` and `close` together. Each adds its own requests and gets its own completions.

    Engines draw from the global random generators of torch and numpy. Whoever calls `step` seeds them first.
    """

    device: torch.device
    first_rank: int  # of those that share this engine: they sample with one seed
    group: dist.ProcessGroup | None  # of those ranks, for objects on the host; None for one rank alone
    memory: int  # bytes on the device that `sleep` gives back, as `make_engine` has seen it; 0 before
    policy_version: int  # how often weights were pushed

    def add(self, requests: Sequence[Request]) -> None:
        """Take requests. Raises ValueError if one could outgrow the engine, or has the key of one that is in flight."""

    def has_requests(self) -> bool:
        """Whether any response is still to be sampled, by this rank or one that shares the engine."""

    def step(self) -> list[Completion]:
        """Sample about one more token of every response that fits into the memory. Returns those that are complete."""

    def abort(self, keys: Iterable[Hashable] | None = None) -> list[Completion]:
        """Stop sampling these requests of this rank, by default all. Returns what they have so far, reason "abort"."""

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load (name, whole tensor) pairs with Hugging Face names, lazily. All ranks must enter.

        Responses in flight go on with the new weights; what they have so far is read again by the new weights. Raises
        RuntimeError naming weights that no pushed tensor reached.
        """

    def sleep(self) -> None:
        """Give the accelerator's memory back; `wake` and `update_weights` must follow. No request may be in flight."""

    def wake(self) -> None:
        """Take the memory again. What is in it is undefined until `update_weights`."""

    def close(self) -> None:
        """Shut down, once every rank is done."""


class StopTexts:
    """Finds the token that completes a stop text of `Sampling.stop`."""

    def __init__(self, model: str):
        self.model, self.tokenizer = model, None  # loaded when first needed

    def complete(self, token_ids: Sequence[int], texts: tuple[str, ...]) -> bool:
        """Whether the last of these tokens completes one of the texts. Ask after every token."""
        if not texts or not token_ids:
            return False
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.model)
        longest = max(len(text.encode()) for text in texts)  # no token is shorter than a byte
        tail = self.tokenizer.decode(list(token_ids[-longest - 4 :]))
        return any(text in tail for text in texts)


def check_request(request: Request, taken: Container[Hashable], max_model_len: int) -> None:
    """Raise ValueError if a request could outgrow an engine, or has a key that is `taken`."""
    most = len(request.prompt_ids) + request.sampling.max_tokens
    if most > max_model_len:
        raise ValueError(
            f"a prompt and its response may have {most} tokens, but the engine was made for {max_model_len}"
        )
    if request.key in taken:
        raise ValueError(f"a request with the key {request.key!r} is in flight already; keys tell completions apart")
