"""The student's distance to its teacher, from the pass that also gives its log-probs."""

import functools
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl.data.types import Batch, Sampling
from rl.formulas.distillation import with_rest
from rl.model import logprobs


def token_distances(
    policy: nn.Module, batch: Batch, distance: Callable | None, *, beta: float, sampling: Sampling = logprobs.FULL
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """`token_logprobs` of a policy, and its distance to the teacher at every sampled token, from one pass.

    Args: batch (b, T), from `add_teacher`; distance, a formula (student, teacher, beta) -> (R,). None: the estimate
    log p_S - log p_T by the sampled token, a constant, since its gradient is not that of the distance. Returns: logp,
    entropy (without gradient) and distance, all (b, T); and as metrics, the probability that both give to the K tokens.
    """
    if distance is None:
        logp, entropy = logprobs.token_logprobs(policy, batch, sampling=sampling)
        return logp, entropy, (logp - batch.ref_logp).detach(), {}
    scored = logprobs.sampled_positions(batch)
    top_ids, top_logp = batch.columns["top_ids"], batch.columns["top_logp"]
    distance = functools.partial(distance, beta=beta)
    args = (top_ids[scored].long(), top_logp[scored], sampling.temperature, distance)
    logp, entropy, gap, student = logprobs.run_on_responses(policy, batch, _student_head, *args)
    teacher = top_logp.exp().sum(-1)
    return logp, entropy, gap, {"distillation/student_mass": student, "distillation/teacher_mass": teacher}


def _student_head(model, hidden, targets, ids, teacher, temperature, distance):
    """hidden (R, H), targets (R,), ids and teacher's log-probs (R, K) -> four tensors (R,), see `token_distances`."""

    source = logprobs.source_of_logits(model)

    def chunk(h: Tensor, y: Tensor, ids: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
        logps = logprobs.logits_of(source, h, temperature).log_softmax(-1)  # (C, V)
        student, is_all = logps.gather(-1, ids), ids.shape[-1] == logps.shape[-1]
        entropy = -(logps.detach().exp() * logps.detach()).sum(-1)
        both = (student, teacher.to(student.dtype))
        gap = distance(*(both if is_all else map(with_rest, both)))
        return logps.gather(-1, y[:, None])[:, 0], entropy, gap, student.detach().exp().sum(-1)

    return logprobs.in_chunks(functools.partial(checkpoint, chunk, use_reentrant=False), hidden, targets, ids, teacher)
