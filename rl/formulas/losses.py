"""Loss formulas: per-element values with the shape of their input, which the script weights, masks, sums and divides.

B sequences, T tokens. logp is the policy being trained, old_logp the one that defines the trust region, ref_logp the
frozen reference, rollout_logp what the inference engine reported. A mask is 1 (or True) on tokens that the policy
sampled, 0 elsewhere. What stands where it is 0, NaN included, reaches neither a value nor a gradient.

The policy losses share one signature and one result, so that a script can pick one from a dict:

    loss, clipped = f(logp, old_logp, advantages, mask, *, clip_ratio_low, clip_ratio_high, ...)

Args: the tensors logp, old_logp, advantages and mask are (B, T). Everything else is passed by name. A loss names what
it needs, and `**_` takes the rest.
Returns: loss (B, T), to be minimized, 0 where mask is 0; clipped (B, T), 1.0 where the clip decides the loss, without
gradient. Gradients flow through logp only. In the formulas delta = logp - old_logp, ratio = exp(delta), and sg(x) is x
without its gradient (stop-gradient).

Every function is pure, keeps the floating dtype it is given, and asserts the shapes it expects.
"""

import torch
from torch import Tensor

from rl.formulas.shared import MAX_LOG_RATIO, check_shapes

Loss = tuple[Tensor, Tensor]  # loss and clipped
MEANS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")  # of `aggregate`


def _keep(x: Tensor, mask: Tensor) -> Tensor:
    """x where mask is 1, else 0. Unlike x * mask, this stops NaN and inf, in the backward pass as well."""
    return torch.where(mask.bool(), x, 0.0)


def _clip_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Pessimistic surrogate max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)), and where the clip decides it."""
    free, bounded = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, bounded), bounded > free


def aggregate(
    x: Tensor,
    mask: Tensor,
    mode: str,
    *,
    num_tokens: float,
    num_seqs: float,
    scale: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Weighted sum of per-token values, divided by denominators of the whole mini-batch.

    S_i = sum_t m_it * x_it, L_i = sum_t m_it. A row without valid tokens contributes 0.
    token-mean            sum_i S_i / num_tokens                   DAPO
    seq-mean-token-sum    sum_i S_i / num_seqs
    seq-mean-token-mean   sum_i (S_i / L_i) / num_seqs             GRPO, GSPO, SAPO, GMPO
    seq-mean-token-sum-norm   sum_i S_i / (num_seqs * scale)       Dr. GRPO; scale is a constant, e.g. the length limit
    The denominators count the mini-batch over all ranks, so what the micro-batches give adds up to the same sum however
    they are cut. A mini-batch without tokens (num_tokens = 0) gives 0.

    Args: x, mask (B, T); num_tokens, num_seqs >= 0 of the mini-batch; scale > 0; lengths (B,), the L of the response of
    each row, if a response may have several rows. Then S_i and L_i are those of a response. Returns: scalar.
    Raises: ValueError for an unknown mode, or without a positive scale where one is needed.
    Source: DAPO, eq. 12, arXiv 2503.14476; Understanding R1-Zero-Like Training (Dr. GRPO), arXiv 2503.20783.
    """
    check_shapes(x, mask, dims=2)
    x = _keep(x, mask)
    row_sums = x.sum(-1)
    if mode == "token-mean":
        return x.sum() / max(num_tokens, 1)
    if mode == "seq-mean-token-sum":
        return row_sums.sum() / max(num_seqs, 1)
    if mode == "seq-mean-token-mean":
        lengths = mask.bool().sum(-1) if lengths is None else lengths
        return (row_sums / lengths.clamp(min=1)).sum() / max(num_seqs, 1)
    if mode == "seq-mean-token-sum-norm":
        if scale is None or scale <= 0:
            raise ValueError(f"seq-mean-token-sum-norm needs a positive scale, such as the length limit, got {scale}")
        return row_sums.sum() / max(num_seqs, 1) / scale
    raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(MEANS)}")


def ppo_clip(logp, old_logp, advantages, mask, *, clip_ratio_low, clip_ratio_high, clip_ratio_c=None, **_) -> Loss:
    """Clipped surrogate of PPO, with a lower clip and an upper clip, and optionally the dual clip.

    max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)). Where A < 0 and c is given, it is at most -A * c.
    |delta| <= 20. Without the dual clip a bad token that the policy has made much more likely has an unbounded loss.

    Raises: ValueError unless clip_ratio_c > 1.
    Source: PPO, eq. 7, arXiv 1707.06347; dual clip, arXiv 1912.09729; clip-higher, DAPO, eq. 10, arXiv 2503.14476.
    """
    check_shapes(logp, old_logp, advantages, mask)
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c must be greater than 1, got {clip_ratio_c}")
    ratio = _keep(logp - old_logp.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss, clipped = _clip_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    if clip_ratio_c is not None:
        ceiling = -advantages * clip_ratio_c
        dual = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(dual, ceiling, loss), clipped | dual
    return _keep(loss, mask), _keep(clipped.to(loss.dtype), mask)


def gspo(logp, old_logp, advantages, mask, *, clip_ratio_low, clip_ratio_high, **_) -> Loss:
    """Clipped surrogate on the length-normalized ratio of the whole sequence (the GSPO-token form).

    log s_it = logp_it - sg(logp_it) + sg(mean_t delta_it), at most 10; max(-A * s, -A * clip(s, 1 - low, 1 + high)).
    No dual clip. Sequence ratios hardly move, so the paper's clips are 3e-4 and 4e-4. Aggregate by seq-mean-token-mean
    to match it.

    Source: Group Sequence Policy Optimization, eq. 13 and 14, arXiv 2507.18071; summed over tokens it is LUSPO, arXiv
    2602.05261.
    """
    check_shapes(logp, old_logp, advantages, mask)
    live = _keep(logp, mask)
    delta = live.detach() - _keep(old_logp.detach(), mask)
    sequence = delta.sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)
    ratio = (live - live.detach() + sequence).clamp(max=10.0).exp()
    loss, clipped = _clip_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return _keep(loss, mask), _keep(clipped.to(loss.dtype), mask)


def dppo_tv(logp, old_logp, advantages, mask, *, clip_ratio_low, clip_ratio_high, clip_ratio_c=None, **_) -> Loss:
    """Policy gradient within a trust region of probabilities, not of their ratio: total variation of (token, rest).

    With p = exp(logp), p_old = exp(old_logp): -sg(min(ratio, c)) * A * logp, and 0 where the token has already moved
    too far in the wanted direction: p - p_old > high where A > 0, p_old - p > low elsewhere. |delta| <= 20. So a rare
    token may grow by a large ratio, and a likely one may not lose much. The clip ratios bound differences of
    probabilities, 0.1 to 0.2 or so. c is 20 in the paper. clipped is 1 where the loss is 0.

    Source: Rethinking the Trust Region in LLM Reinforcement Learning (DPPO-Binary-TV), arXiv 2602.04879.
    """
    check_shapes(logp, old_logp, advantages, mask)
    live, old = _keep(logp, mask), _keep(old_logp, mask).detach()
    moved = live.detach().exp() - old.exp()
    outside = torch.where(advantages > 0, moved > clip_ratio_high, moved < -clip_ratio_low)
    return _weighted_gradient(live, old, advantages, mask, outside, clip_ratio_c)


def dppo_kl(logp, old_logp, advantages, mask, *, clip_ratio_low, clip_ratio_high, clip_ratio_c=None, **_) -> Loss:
    """As `dppo_tv`, with the KL divergence of (token, rest) in the place of total variation.

    D = p_old * (old_logp - logp) + (1 - p_old) * log((1 - p_old + 1e-8) / (1 - p + 1e-8)). The loss is 0 where the
    token has moved in the wanted direction and D > high (A > 0), D > low (elsewhere). clipped is 1 where the loss is 0.

    Source: Rethinking the Trust Region in LLM Reinforcement Learning (DPPO-Binary-KL), arXiv 2602.04879.
    """
    check_shapes(logp, old_logp, advantages, mask)
    live, old = _keep(logp, mask), _keep(old_logp, mask).detach()
    p, p_old = live.detach().exp(), old.exp()
    q, q_old = (1 - p).clamp(min=0), (1 - p_old).clamp(min=0)  # rounding may make a probability larger than 1
    rest = q_old * ((q_old + 1e-8) / (q + 1e-8)).log()
    divergence = p_old * (old - live.detach()) + rest
    too_high, too_low = (divergence > clip_ratio_high) & (p > p_old), (divergence > clip_ratio_low) & (p < p_old)
    outside = torch.where(advantages > 0, too_high, too_low)
    return _weighted_gradient(live, old, advantages, mask, outside, clip_ratio_c)


def _weighted_gradient(
    live: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, outside: Tensor, cap: float | None
) -> Loss:
    """-sg(min(ratio, cap)) * A * live where a token is not `outside`, else 0. Also returns where it is."""
    ratio = (live.detach() - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = torch.where(outside, 0.0, -ratio.clamp(max=torch.inf if cap is None else cap) * advantages * live)
    return _keep(loss, mask), _keep(outside.to(live.dtype), mask)


def cispo(logp, old_logp, advantages, mask, *, clip_ratio_low, clip_ratio_high, **_) -> Loss:
    """Policy gradient under a clipped importance weight. Every token keeps a gradient, and only its weight is bounded.

    -sg(clip(ratio, 1 - low, 1 + high)) * A * logp, |delta| <= 20. clipped is 1 where the weight was changed.

    Source: MiniMax-M1 (CISPO), eq. 4 and 5, arXiv 2506.13585.
    """
    check_shapes(logp, old_logp, advantages, mask)
    live = _keep(logp, mask)
    ratio = (live - _keep(old_logp, mask)).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return _keep(-weight * advantages * live, mask), _keep((weight != ratio).to(logp.dtype), mask)


def sapo(logp, old_logp, advantages, mask, *, tau_pos=1.0, tau_neg=1.05, **_) -> Loss:
    """Soft gate instead of a clip. The gradient fades smoothly as the ratio leaves 1.

    -A * sigmoid(tau * (ratio - 1)) * 4 / tau, tau = tau_pos where A > 0, else tau_neg. |delta| <= 20. The factor
    4 / tau makes the slope 1 at ratio 1. Nothing is clipped. Aggregate by seq-mean-token-mean to match
    the paper.

    Source: Soft Adaptive Policy Optimization, arXiv 2511.20347.
    """
    check_shapes(logp, old_logp, advantages, mask)
    ratio = _keep(logp - old_logp.detach(), mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau = torch.where(advantages > 0, tau_pos, torch.full_like(advantages, tau_neg))
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return _keep(-gate * advantages, mask), torch.zeros_like(logp)


def gmpo(logp, old_logp, advantages, mask, *, clip_ratio_low, clip_ratio_high, **_) -> Loss:
    """Geometric mean of the token ratios of a sequence, each clipped in log space, pessimistically as in PPO.

    s = sign(A_t); delta'_t = s * min(s * delta_t, s * clip(delta_t, -low, high));
    loss_i = -mean_t(A_t) * exp(mean_t delta'_t)
    Every valid token of row i holds loss_i, so seq-mean-token-mean gives mean_i(loss_i). The clip ratios bound log
    ratios (0.4 and 0.4 in the paper). No dual clip. clipped is 1 where the clip decides delta'.

    Source: Geometric-Mean Policy Optimization, arXiv 2507.20673.
    """
    check_shapes(logp, old_logp, advantages, mask)
    delta, advantage = _keep(logp - old_logp.detach(), mask), _keep(advantages, mask)
    sign, length = advantage.sign(), mask.bool().sum(-1, keepdim=True).clamp(min=1)
    free, bounded = sign * delta, sign * delta.clamp(-clip_ratio_low, clip_ratio_high)
    ratio = ((sign * torch.minimum(free, bounded)).sum(-1, keepdim=True) / length).exp()
    row_loss = -advantage.sum(-1, keepdim=True) / length * ratio
    return _keep(row_loss.expand_as(logp), mask), _keep((bounded < free).to(logp.dtype), mask)


def vespo(logp, old_logp, advantages, mask, *, vespo_pos=(2.0, 3.0), vespo_neg=(3.0, 2.0), **_) -> Loss:
    """Policy gradient under a weight of the whole sequence that fades on both sides of the old policy, softly.

    -sg(phi(W)) * A * logp, phi(W) = exp(lam) * W^k * exp(-lam * W), W = exp(sum_t delta_t) of the whole sequence, the
    sum within [-20, 20]. phi(1) = 1, and phi is largest at W = k / lam. (k, lam) is vespo_pos where A >= 0, and
    vespo_neg where A < 0. The sum is not divided by the length, so W leaves 1 quickly in long sequences. Nothing is
    clipped.

    Source: VESPO, arXiv 2602.10693. The values of k and lam are those that the code of its authors takes by default,
    and TRL too. The authors' code puts a correction for the engine's log-probs into W. Here, as with all losses, it is
    a factor of its own.
    """
    check_shapes(logp, old_logp, advantages, mask)
    live = _keep(logp, mask)
    sequence = (live.detach() - _keep(old_logp.detach(), mask)).sum(-1, keepdim=True)
    sequence = sequence.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    pairs = zip(vespo_pos, vespo_neg, strict=True)
    k, lam = (torch.where(advantages < 0, neg, torch.full_like(advantages, pos)) for pos, neg in pairs)
    phi = (lam + k * sequence - lam * sequence.exp()).exp()
    return _keep(-phi * advantages * live, mask), torch.zeros_like(logp)


def dro(logp, old_logp, advantages, mask, *, dro_beta=0.05, **_) -> Loss:
    """Policy gradient that pays for the distance from the old policy, without a ratio and without a clip.

    -A * logp + dro_beta / 2 * delta^2. Its gradient is -(A - dro_beta * delta), so it is 0 where the policy has moved
    by delta = A / dro_beta. Nothing is clipped.

    Source: Offline Regularised RL for LLM Alignment (DRO), arXiv 2405.19107, and verl. The paper squares the sum over a
    response, and learns a value in the place of the baseline. Here, as in verl, each token is squared on its own.
    """
    check_shapes(logp, old_logp, advantages, mask)
    live = _keep(logp, mask)
    delta = live - _keep(old_logp.detach(), mask)
    return _keep(-advantages * live + dro_beta / 2 * delta**2, mask), torch.zeros_like(logp)


def clip_cov(logp, old_logp, advantages, mask, *, chosen, clip_ratio_low, clip_ratio_high, **_) -> Loss:
    """Clipped surrogate of PPO, and a loss of 0 on tokens that are `chosen` (B, T) bool, so that these do not push.

    0 where chosen, max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)) elsewhere, |delta| <= 20. No dual clip.
    `token_selection.choose` draws `chosen` among the tokens that make the policy surer of itself. clipped is 1 where
    chosen.

    Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.
    """
    check_shapes(mask, chosen)
    loss, _ = ppo_clip(logp, old_logp, advantages, mask, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    return _keep(loss, ~chosen), _keep(chosen.to(loss.dtype), mask)


def kl_cov(logp, old_logp, advantages, mask, *, chosen, ppo_kl_coef, **_) -> Loss:
    """Surrogate without a clip. Tokens that are `chosen` (B, T) bool pay for moving away from the step's first policy.

    -A * ratio, and + ppo_kl_coef * |delta| where chosen. The delta of the ratio is within [-20, 20].
    `token_selection.choose` chooses the tokens that make the policy surest of itself. clipped is 1 where
    chosen.

    Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.
    """
    check_shapes(logp, old_logp, advantages, mask, chosen)
    delta = _keep(logp - old_logp.detach(), mask)
    loss = -advantages * delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss = loss + ppo_kl_coef * _keep(delta.abs(), chosen)
    return _keep(loss, mask), _keep(chosen.to(loss.dtype), mask)


def policy_gradient(logp, old_logp, advantages, mask, **_) -> Loss:
    """Plain REINFORCE: -A * logp. old_logp is not used, and nothing is clipped.

    Source: Simple Statistical Gradient-Following Algorithms (REINFORCE), Williams 1992; GPG, arXiv 2504.02546.
    """
    check_shapes(logp, old_logp, advantages, mask)
    return _keep(-advantages * _keep(logp, mask), mask), torch.zeros_like(logp)


def kl(logp: Tensor, ref_logp: Tensor, kind: str, *, old_logp: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(policy || reference) from a token that the policy sampled, d = logp - ref_logp.

    k1: d (unbiased value);  abs: |d|;  k2: d^2 / 2 (unbiased gradient of the KL);
    k3, low_var_kl: exp(x) - x - 1, x = clip(-d, -20, 20), the result at most 10 (unbiased value, low variance).
    A suffix "+" keeps the value and takes the gradient of k2: k2 - sg(k2) + sg(base).
    unbiased: ratio * k3, ratio = exp(clip(logp - old_logp, -20, 20)) with its gradient: value and gradient are those of
    the KL of the policy, also for tokens that the older policy of old_logp sampled.
    There is no mask here, so all inputs must be finite everywhere. `aggregate` masks the result.

    Args: logp, ref_logp, old_logp (B, T), the last one for "unbiased" only. Returns: (B, T). Raises: ValueError for an
    unknown kind.
    Source: Schulman, Approximating KL Divergence, joschu.net/blog/kl-approx.html; gradients, arXiv 2510.01555;
    unbiased, DeepSeek-V3.2, eq. 7, arXiv 2512.02556.
    """
    check_shapes(logp, ref_logp)
    if kind == "unbiased":
        assert old_logp is not None and old_logp.shape == logp.shape, "unbiased needs old_logp of the shape of logp"
        ratio = (logp - old_logp.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        return ratio * kl(logp, ref_logp, "k3")
    difference = logp - ref_logp
    x = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k2, k3 = 0.5 * difference.square(), (torch.expm1(x) - x).clamp(max=10.0)
    values = {"k1": difference, "abs": difference.abs(), "k2": k2, "k3": k3, "low_var_kl": k3}
    base = kind.removesuffix("+")
    if base not in values:
        known = "k1, k2, k3 (low_var_kl), abs, each also with the suffix +; unbiased"
        raise ValueError(f"unknown KL estimator {kind!r}; known: {known}")
    return values[base] if base == kind else k2 - k2.detach() + values[base].detach()
