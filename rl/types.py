"""The data that flows through a training step: Completion -> Sample -> Batch.

Axes: P prompts of a step, G responses per prompt, B = P * G sequences, T tokens (prompt + response, right-padded), V
vocabulary. Every per-token tensor is (B, T) and aligned: position t describes token t given the tokens before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True)
class Sampling:
    """How an engine samples. `temperature=0` is greedy; `top_k=-1` and `top_p=1` switch truncation off."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()


class Completion(NamedTuple):
    """What an engine returns for one response: ids including the stop token, one log-prob per id, and why it ended."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"


OnGroup = Callable[[int, list[Completion]], None]  # (position of the prompt, its completions)


@dataclass(frozen=True, eq=False)
class Sample:
    """One trajectory, as numpy arrays, which other ranks get ten times as fast as lists; lists given are converted.

    `response_mask` is 1 on tokens the policy sampled, 0 on tool output.
    """

    prompt_ids: np.ndarray  # int32
    response_ids: np.ndarray  # int32
    response_mask: np.ndarray  # int8
    rollout_logprobs: np.ndarray  # float32
    finish_reason: str
    row_index: int

    def __post_init__(self):
        dtypes = dict(prompt_ids="int32", response_ids="int32", response_mask="int8", rollout_logprobs="float32")
        for name, dtype in dtypes.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))

    @property
    def num_tokens(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. Only the first `lengths[i]` positions of row i are real; the pad id itself means nothing.

    response_mask is 1 for tokens that the policy sampled and learns from, EOS included; a script clears it for
    responses that got no score. rollout_logp is zero for tokens that were not sampled, all other per-token tensors
    where the mask is zero. The optional ones are None until a phase of the step adds them to a new Batch.
    """

    input_ids: torch.Tensor  # (B, T) int64
    lengths: torch.Tensor  # (B,) int64, prompt + response
    response_mask: torch.Tensor  # (B, T) float32
    rollout_logp: torch.Tensor  # (B, T) float32, by the engine that sampled
    old_logp: torch.Tensor | None = None  # (B, T) by the policy that starts the step
    ref_logp: torch.Tensor | None = None  # (B, T) by the frozen reference
    advantages: torch.Tensor | None = None  # (B, T)
    values: torch.Tensor | None = None  # (B, T)
    returns: torch.Tensor | None = None  # (B, T)


def select(batch: Batch, rows: Sequence[int], device: torch.device | str | None = None) -> Batch:
    """Rows of a batch, cut to their longest sequence and moved to `device`: (b, T') tensors.

    No rows give one empty row: two tokens and a zero mask. It weighs nothing; a rank that has run out of work uses it
    to take part in the collectives of the forward and backward pass.
    """
    index = torch.as_tensor(rows if len(rows) else [0], dtype=torch.long)
    width = int(batch.lengths[index].max()) if len(rows) else 2
    tensors = {f.name: value for f in fields(batch) if (value := vars(batch)[f.name]) is not None}
    cut = {name: x[index] if x.ndim == 1 else x[index, :width] for name, x in tensors.items()}
    if not len(rows):
        cut = {name: torch.zeros_like(x) for name, x in cut.items()} | {"lengths": torch.tensor([2])}
    return Batch(**{name: x.to(device) for name, x in cut.items()})
