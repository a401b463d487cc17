"""Preference optimisation: which of a prompt's responses are compared, and what a comparison costs.

P prompts, R responses to each, N pairs of one chosen and one rejected response. The h of a response is the log-ratio of
the policy to the reference, summed over its tokens; h_w is that of the chosen response (which wins), h_l that of the
rejected one (which loses). The implicit reward of DPO is beta * h.

The losses share one signature and one result, so that a script can pick one from a dict:

    loss = f(ratios, lengths, kl, beta=beta)

Args: ratios (N, 2), h_w and h_l; lengths (N, 2), the tokens that they are sums over; kl (2,), the means of h_w and of
h_l over all pairs of the step, for the policy that began it; beta > 0, how much a nat is worth. What a formula does not
name is not used. Returns: loss (N,), to be minimised. Gradients flow through ratios only.

Every function is pure, keeps the floating dtype it is given, and asserts the shapes it expects.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def best_against_worst(scores: Tensor, margin: float) -> Tensor:
    """One pair a prompt: its best response against its worst, if their scores differ by more than `margin`.

    Of equal scores the first counts. NaN marks a response without a score, which is in no pair.
    Example: scores [[1, 0, 1, 0]], margin 0 -> [[0, 1]].

    Args: scores (P, R). Returns: (N, 2) int64, the places of chosen and rejected among all P * R responses.
    Source: Direct Language Model Alignment from Online AI Feedback (OAIF), arXiv 2402.04792, for two responses.
    """
    assert scores.dim() == 2, f"unexpected shape: {tuple(scores.shape)}"
    high, best = scores.nan_to_num(-torch.inf).max(1)
    low, worst = scores.nan_to_num(torch.inf).min(1)
    first = torch.arange(len(scores)) * scores.shape[1]
    return torch.stack([first + best, first + worst], 1)[high - low > margin]


def all_pairs(scores: Tensor, margin: float) -> Tensor:
    """Every two responses to a prompt whose scores differ by more than `margin`, the better one first.

    NaN marks a response without a score, which is in no pair.
    Example: scores [[1, 0, 1]], margin 0 -> [[0, 1], [2, 1]].

    Args: scores (P, R). Returns: (N, 2) int64, as `best_against_worst`, prompt by prompt.
    """
    assert scores.dim() == 2, f"unexpected shape: {tuple(scores.shape)}"
    R = scores.shape[1]
    wins = scores[:, :, None] - scores[:, None, :] > margin  # (P, R, R); false where one is NaN
    prompt, chosen, rejected = wins.nonzero().unbind(1)
    return torch.stack([prompt * R + chosen, prompt * R + rejected], 1)


def first_against_all(scores: Tensor, margin: float) -> Tensor:
    """The first response to a prompt, which is the reference solution, against every other: self-play.

    The scores are not looked at, nor is `margin`: the solution is what the policy shall not be told from.

    Args: scores (P, R). Returns: (P * (R - 1), 2) int64, as `best_against_worst`.
    Source: Self-Play Fine-Tuning (SPIN), alg. 1, arXiv 2401.01335.
    """
    assert scores.dim() == 2, f"unexpected shape: {tuple(scores.shape)}"
    places = torch.arange(scores.numel()).view(scores.shape)
    return torch.stack([places[:, :1].expand_as(places[:, 1:]), places[:, 1:]], -1).view(-1, 2)


def dpo(ratios: Tensor, lengths: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    """Negative log-likelihood of Bradley and Terry that the chosen response wins, by the implicit rewards.

    -log sigmoid(beta * (h_w - h_l)): log 2 if the policy is the reference.
    Source: Direct Preference Optimization, eq. 7, arXiv 2305.18290; with pairs of `first_against_all` it is SPIN, eq.
    4.7, arXiv 2401.01335.
    """
    assert ratios.dim() == 2 and ratios.shape[1] == 2, f"unexpected shape: {tuple(ratios.shape)}"
    chosen, rejected = ratios.unbind(1)
    return -F.logsigmoid(beta * (chosen - rejected))


def ipo(ratios: Tensor, lengths: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    """Squared distance of the gap from a finite goal, so that a pair that is told apart pulls no further.

    (h_w / L_w - h_l / L_l - 1 / (2 * beta))^2, with L = lengths: means over the tokens of a response, as TRL has them
    after asking the authors; in the paper h is not divided.
    Source: A General Theoretical Paradigm to Understand Learning from Human Preferences, eq. 17, arXiv 2310.12036.
    """
    assert ratios.shape == lengths.shape and ratios.shape[1] == 2, f"unexpected shape: {tuple(ratios.shape)}"
    chosen, rejected = (ratios / lengths.clamp(min=1)).unbind(1)
    return (chosen - rejected - 1 / (2 * beta)).square()


def sppo(ratios: Tensor, lengths: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    """Squared distance of each log-ratio from what self-play wants: its chance to win, less a half, over beta.

    (h_w - 1 / (2 * beta))^2 + (h_l + 1 / (2 * beta))^2: the winner of a pair wins with probability 1, TRL's sppo_hard.
    The paper estimates that probability with a model of preferences, and its eta is 1 / beta.
    Source: Self-Play Preference Optimization, eq. 4.7, arXiv 2405.00675.
    """
    assert ratios.dim() == 2 and ratios.shape[1] == 2, f"unexpected shape: {tuple(ratios.shape)}"
    chosen, rejected = ratios.unbind(1)
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def hinge(ratios: Tensor, lengths: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    """Nothing for a pair whose implicit rewards are one apart, else what is missing: max(0, 1 - beta * (h_w - h_l)).

    Source: SLiC-HF, eq. 1, arXiv 2305.10425; of log-ratios to a reference, RSO, arXiv 2309.06657.
    """
    assert ratios.dim() == 2 and ratios.shape[1] == 2, f"unexpected shape: {tuple(ratios.shape)}"
    chosen, rejected = ratios.unbind(1)
    return F.relu(1 - beta * (chosen - rejected))


def kto_pair(ratios: Tensor, lengths: Tensor, kl: Tensor, *, beta: float) -> Tensor:
    """A gain and a loss as people feel them, each measured from what the policy has moved by anyway.

    (1 - sigmoid(beta * (h_w - max(k_l, 0))) + 1 - sigmoid(beta * (max(k_w, 0) - h_l))) / 2, with (k_w, k_l) = kl: for a
    chosen response the KL is that of the rejected half, and the other way round. The mean over both responses, as in
    TRL 0.8, which has dropped the loss since; there k is that of a batch, and gradients flow through it.
    Source: Kahneman-Tversky Optimization (KTO), arXiv 2402.01306.
    """
    assert ratios.dim() == 2 and ratios.shape[1] == 2 and kl.shape == (2,), f"shapes {ratios.shape}, {kl.shape}"
    (chosen, rejected), (of_chosen, of_rejected) = ratios.unbind(1), kl.detach().clamp(min=0)
    gain, loss = beta * (chosen - of_rejected), beta * (of_chosen - rejected)
    return (2 - gain.sigmoid() - loss.sigmoid()) / 2
