"""How alike two draws of a token are: what the baseline of each token in train_reinforce.py needs."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from extras.truncation import truncation_of
from rl.data.batching import Update
from rl.data.types import Batch, Sampling
from rl.model.logprobs import in_chunks, logits_of, over_micro_batches, source_of_logits


def collisions(model: PreTrainedModel, batch: Batch, updates: Sequence[Update], *, sampling: Sampling) -> Tensor:
    """The chance that two draws of a token agree, which is the sum of pi(v)^2 over all tokens v.

    Returns: (B, T) on the host, in the type of batch.rollout_logp, zero where response_mask is zero. No gradients flow.
    All ranks must enter.
    """
    return over_micro_batches(model, batch, updates, response_collisions, sampling)[0]


def response_collisions(model: PreTrainedModel, hidden: Tensor, targets: Tensor, sampling: Sampling) -> tuple[Tensor]:
    """The head of `collisions`: hidden (R, H), and targets (R,), which are not used -> (R,)."""
    source, truncate = source_of_logits(model), truncation_of(sampling)

    def of_chunk(h: Tensor) -> tuple[Tensor]:
        logits = logits_of(source, h, sampling.temperature)
        logits = truncate(logits) if truncate else logits
        return (logits.softmax(-1).square().sum(-1),)

    return in_chunks(of_chunk, hidden)
