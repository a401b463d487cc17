"""Distances from a student's next-token distribution to its teacher's.

A row is a position of a response: log-probs under both models of the teacher's K most likely tokens and perhaps of "any
other token" as one more entry, see `with_rest`. All K + 1 then are a distribution, coarser than the real one, so that
a distance is never negative, never larger than the real one, and 0 exactly where the models agree on all entries.

    distance = f(student, teacher, beta=beta)

Args: student, teacher (R, K), log-probs; beta, of `jsd`. Returns: (R,), to be minimized; gradients flow through both.
Every function is pure, keeps the floating dtype it is given, and asserts the shapes it expects.
"""

import math

import torch
from torch import Tensor

LEAST = 1e-8  # probability that any other token has at least, since rounding may leave a sum of all above 1


def with_rest(logps: Tensor) -> Tensor:
    """Log-probs (R, K) of some tokens, and of any other: (R, K + 1). Example: probabilities .5 .3 -> .5 .3 .2"""
    rest = (1 - logps.exp().sum(-1, keepdim=True)).clamp(min=LEAST).log()
    return torch.cat([logps, rest], -1)


def forward_kl(student: Tensor, teacher: Tensor, *, beta: float = 0.0) -> Tensor:
    """KL(teacher || student) = sum_k p_T (log p_T - log p_S). The student has to cover all that the teacher does.

    Source: On-Policy Distillation of Language Models (GKD), sec. 2, arXiv 2306.13649; on the top K, verl's
    forward_kl_topk, which leaves the rest out.
    """
    assert student.shape == teacher.shape, f"{tuple(student.shape)} and {tuple(teacher.shape)}"
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor, *, beta: float = 0.0) -> Tensor:
    """KL(student || teacher) = sum_k p_S (log p_S - log p_T). The student has to stay where the teacher is.

    Source: MiniLLM, eq. 1, arXiv 2306.08543; GKD, sec. 2, arXiv 2306.13649.
    """
    assert student.shape == teacher.shape, f"{tuple(student.shape)} and {tuple(teacher.shape)}"
    return (student.exp() * (student - teacher)).sum(-1)


def jsd(student: Tensor, teacher: Tensor, *, beta: float) -> Tensor:
    """Generalized Jensen-Shannon divergence, bounded, between both KLs.

    beta * KL(teacher || m) + (1 - beta) * KL(student || m), with m = beta * p_T + (1 - beta) * p_S. Divided by beta it
    tends to the forward KL as beta goes to 0, divided by 1 - beta to the reverse one as beta goes to 1.

    Args: beta, above 0 and below 1; 0.5 is the symmetric one, at most log 2.
    Source: GKD, eq. 1, arXiv 2306.13649.
    """
    assert 0 < beta < 1, f"beta {beta}"
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(mixture, teacher) + (1 - beta) * forward_kl(mixture, student)
