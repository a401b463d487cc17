"""The distance of a student to itself with a hint, over the whole vocabulary."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl.data.types import Batch, Sampling
from rl.model import logprobs

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


def token_divergences(
    policy: nn.Module,
    batch: Batch,
    states: Tensor,
    divergence: Callable,
    *,
    beta: float,
    sampling: Sampling = logprobs.FULL,
) -> tuple[Tensor, ...]:
    """Of every sampled token the student's log-prob, its entropy, its distance to the teacher, and the teacher's
    log-prob, all (b, T). Gradients flow through the student's log-prob and the distance, and not through the teacher.

    Args: batch (b, T); states (R, H), from `teacher_states` of the same rows and weights; divergence, a formula
    (student, teacher, beta) -> (R,) of log-probs (R, V).
    """
    args = (states, sampling.temperature, functools.partial(divergence, beta=beta))
    return logprobs.run_on_responses(policy, batch, _head, *args)


def _head(
    model: nn.Module, hidden: Tensor, targets: Tensor, states: Tensor, temperature: float, divergence: Callable
) -> tuple[Tensor, ...]:
    """hidden (R, H), targets (R,), the teacher's states (R, H) -> four tensors (R,), see `token_divergences`."""
    source = logprobs.source_of_logits(model)

    def chunk(h: Tensor, y: Tensor, h_teacher: Tensor) -> tuple[Tensor, ...]:
        student = logprobs.logits_of(source, h, temperature).log_softmax(-1)  # (C, V)
        with torch.no_grad():
            teacher = logprobs.logits_of(source, h_teacher, temperature).log_softmax(-1)
            entropy = -(student.exp() * student).sum(-1)
        logp, teacher_logp = (x.gather(-1, y[:, None])[:, 0] for x in (student, teacher))
        return logp, entropy, divergence(student, teacher), teacher_logp

    count = math.ceil(len(hidden) / CHUNK)
    parts = zip(*(x.tensor_split(count) for x in (hidden, targets, states)), strict=True)
    results = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return tuple(torch.cat(x) for x in zip(*results, strict=True))
