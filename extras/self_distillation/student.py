"""The distance of a student to itself with a hint, over the whole vocabulary."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl.data.types import Batch, Sampling
from rl.model import logprobs
from rl.model.sharding import own_part

# Tokens whose logits by student and teacher exist at a time. A token takes several rows as large as the vocabulary, so
# these are fewer than `logprobs.HEAD_CHUNK`.
CHUNK = 512


@torch.no_grad()
def teacher_states(policy: nn.Module, hinted: Batch) -> Tensor:
    """The last hidden states (R, H) with which the policy predicts R response tokens after it has read their hints.

    Args: hinted (b, T'), from `hints.with_hints`. The states take far less memory than the distributions that they
    stand for. All ranks must enter.
    """
    (states,) = logprobs.run_on_responses(policy, hinted, lambda model, hidden, targets: (hidden,))
    return states[logprobs.sampled_positions(hinted)]


@torch.no_grad()
def states_and_head(teacher: nn.Module, hinted: Batch) -> tuple[Tensor, Tensor | None]:
    """The same states, and the weight (V, H) of the head, for a teacher that may be another model than the student.
    The weight is None if logits are more than a product with it. All ranks must enter.
    """
    heads: list[Tensor | None] = []

    def keep(model: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        source = logprobs.source_of_logits(model)
        heads.append(source.clone() if isinstance(source, Tensor) else None)  # FSDP2 has it together only now
        return (hidden,)

    (states,) = logprobs.run_on_responses(teacher, hinted, keep)
    return states[logprobs.sampled_positions(hinted)], heads[0]


@torch.no_grad()
def move_towards(teacher: nn.Module, policy: nn.Module, rate: float) -> None:
    """teacher = (1 - rate) teacher + rate policy, for all weights that learn. Both models are sharded alike."""
    for x, y in zip(policy.parameters(), teacher.parameters(), strict=True):
        if x.requires_grad:
            own_part(y).lerp_(own_part(x), rate)


def token_divergences(
    policy: nn.Module,
    batch: Batch,
    states: Tensor,
    divergence: Callable,
    *,
    beta: float,
    sampling: Sampling = logprobs.FULL,
    head: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Of every sampled token the student's log-prob, its entropy, its distance to the teacher, and the teacher's
    log-prob, all (b, T). Gradients flow through the student's log-prob and the distance, and not through the teacher.

    Args: batch (b, T); states (R, H), from `teacher_states` of the same rows; divergence, a formula (student, teacher,
    beta) -> (R,) of log-probs (R, V); head (V, H), that of the teacher, by default the policy's.
    """
    args = (states, head, sampling.temperature, functools.partial(divergence, beta=beta))
    return logprobs.run_on_responses(policy, batch, _head, *args)


def _head(
    model: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    states: Tensor,
    head: Tensor | None,
    temperature: float,
    divergence: Callable,
) -> tuple[Tensor, ...]:
    """hidden (R, H), targets (R,), the teacher's states (R, H) -> four tensors (R,), see `token_divergences`."""
    source = logprobs.source_of_logits(model)
    source_of_teacher = source if head is None else head

    def chunk(h: Tensor, y: Tensor, h_teacher: Tensor) -> tuple[Tensor, ...]:
        student = logprobs.logits_of(source, h, temperature).log_softmax(-1)  # (C, V)
        with torch.no_grad():
            teacher = logprobs.logits_of(source_of_teacher, h_teacher, temperature).log_softmax(-1)
            entropy = -(student.exp() * student).sum(-1)
        logp, teacher_logp = (x.gather(-1, y[:, None])[:, 0] for x in (student, teacher))
        return logp, entropy, divergence(student, teacher), teacher_logp

    count = math.ceil(len(hidden) / CHUNK)
    parts = zip(*(x.tensor_split(count) for x in (hidden, targets, states)), strict=True)
    results = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return tuple(torch.cat(x) for x in zip(*results, strict=True))
