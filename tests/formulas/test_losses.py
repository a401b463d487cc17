"""Losses against hand-computed values and plain Python loops; their gradients against the derivative on paper."""

import math
from itertools import combinations

import pytest
import torch

from rl.formulas import losses

NAN = float("nan")
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


def of_some(function):
    """A loss that treats chosen tokens apart, with a choice that says which they are by their old log-prob."""

    def loss(logp, old_logp, advantages, mask, **options):
        chosen = (old_logp > -2) & (old_logp < -0.6)
        return function(logp, old_logp, advantages, mask, chosen=chosen, ppo_kl_coef=0.7, **options)

    return loss


POLICY = {
    "ppo_clip": losses.ppo_clip,
    "dppo_tv": losses.dppo_tv,
    "dppo_kl": losses.dppo_kl,
    "gspo": losses.gspo,
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "gmpo": losses.gmpo,
    "vespo": losses.vespo,
    "dro": losses.dro,
    "policy_gradient": losses.policy_gradient,
    "clip_cov": of_some(losses.clip_cov),
    "kl_cov": of_some(losses.kl_cov),
}
KL_KINDS = ["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def check(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual.detach(), f64(expected).to(actual.dtype), rtol=tolerance, atol=tolerance)


def token_batch(spread=0.4):
    """logp, old_logp, advantages, mask: off policy enough to clip tokens and rows; gaps, padding and an empty row."""
    logp = -3 * torch.rand(7, 9, dtype=torch.float64)
    drift = f64([[0.5], [-0.4], [0.3], [-0.5], [0.6], [0.0], [-0.3]])
    old_logp = logp - drift - spread * torch.randn(7, 9, dtype=torch.float64)
    advantages = f64([[1.3], [-0.7], [0.4], [0.9], [-1.1], [0.6], [-0.8]]).repeat(1, 9)
    mask = (torch.rand(7, 9) < 0.7).double()
    mask[0, 4:] = 0.0
    mask[1, :3] = 0.0
    mask[2] = 0.0
    mask[3] = 1.0
    mask[6] = torch.eye(9)[4]  # one token
    return logp, old_logp, advantages, mask


def gradient(function, logp, *tensors, **options):
    """Loss, clipped, and the gradient of the summed loss with respect to the first argument."""
    leaf = logp.clone().requires_grad_()
    loss, clipped = function(leaf, *tensors, **options)
    return loss.detach(), clipped, torch.autograd.grad(loss.sum(), leaf)[0]


# --- policy losses ---


def token_reference(name, logp, old, adv, row_mean, c):
    """Loss, clipped and d loss / d logp of one valid token. row_mean is the mean log ratio of its row."""
    ratio, low, high = math.exp(logp - old), 0.8, 1.28
    if name == "policy_gradient":
        return -adv * logp, 0.0, -adv
    if name == "dro":
        return -adv * logp + 0.025 * (logp - old) ** 2, 0.0, -adv + 0.05 * (logp - old)
    if name == "cispo":
        weight = min(max(ratio, low), high)
        return -weight * adv * logp, float(weight != ratio), -weight * adv
    if name in ("dppo_tv", "dppo_kl"):
        p, p_old, good = math.exp(logp), math.exp(old), adv > 0
        if name == "dppo_tv":
            outside = p - p_old > high - 1 if good else p_old - p > 1 - low
        else:
            q, q_old = max(1 - p, 0), max(1 - p_old, 0)  # the batch has log-probs above 0
            kl = p_old * math.log(p_old / p) + q_old * math.log((q_old + 1e-8) / (q + 1e-8))
            outside = kl > high - 1 and p > p_old if good else kl > 1 - low and p < p_old
        weight = min(ratio, c) if c is not None else ratio
        return (0.0, 1.0, 0.0) if outside else (-weight * adv * logp, 0.0, -weight * adv)
    if name == "sapo":
        tau = 1.0 if adv > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -adv * gate * 4 / tau, 0.0, -adv * 4 * gate * (1 - gate) * ratio
    if name == "kl_cov":
        chosen = float(-2 < old < -0.6)
        slope = math.copysign(0.7, logp - old) * chosen
        return -adv * ratio + slope * (logp - old), chosen, -adv * ratio + slope
    if name == "clip_cov":
        if -2 < old < -0.6:
            return 0.0, 1.0, 0.0
        loss, _, grad = token_reference("ppo_clip", logp, old, adv, row_mean, None)
        return loss, 0.0, grad
    if name == "gspo":
        ratio, c = math.exp(row_mean), None
    if c is not None and adv < 0 and ratio > c:
        return -adv * c, 1.0, 0.0
    if (adv > 0 and ratio > high) or (adv < 0 and ratio < low):
        return -adv * (high if adv > 0 else low), 1.0, 0.0
    return -adv * ratio, 0.0, -adv * ratio


@pytest.mark.parametrize("name", [x for x in POLICY if x not in ("gmpo", "vespo")])
@pytest.mark.parametrize("c", [None, 1.5])
def test_policy_losses_match_loop_reference(name, c):
    logp, old_logp, advantages, mask = token_batch()
    loss, clipped, grad = gradient(POLICY[name], logp, old_logp, advantages, mask, **CLIPS, clip_ratio_c=c)
    expected = [[[0.0, 0.0, 0.0] for _ in row] for row in logp]
    for i in range(len(logp)):
        valid = [t for t, m in enumerate(mask[i].tolist()) if m]
        deltas = [(logp[i, t] - old_logp[i, t]).item() for t in valid]
        for t in valid:
            token = [x[i, t].item() for x in (logp, old_logp, advantages)]
            expected[i][t] = list(token_reference(name, *token, sum(deltas) / len(deltas), c))
    check(torch.stack([loss, clipped, grad], dim=-1), expected)
    if name not in ("sapo", "dro", "policy_gradient"):
        assert 0 < clipped.sum() < mask.sum()


def test_ppo_clip_matches_hand_values():
    # ratio 1.5 and 0.5, once with a good and once with a bad advantage
    logp = f64([[1.5, 0.5, 1.5, 0.5]]).log()
    args = torch.zeros_like(logp), f64([[1.0, 1.0, -1.0, -1.0]]), torch.ones_like(logp)
    loss, clipped, grad = gradient(losses.ppo_clip, logp, *args, **CLIPS)
    check(loss, [[-1.28, -0.5, 1.5, 0.8]])
    check(clipped, [[1, 0, 0, 1]])
    check(grad, [[0.0, -0.5, 1.5, 0.0]])


def test_ppo_clip_dual_clip_bounds_the_loss_of_bad_tokens_only():
    logp = f64([[4.0, 2.0, 4.0]]).log()
    args = torch.zeros_like(logp), f64([[-2.0, -2.0, 2.0]]), torch.ones_like(logp)
    loss, clipped, grad = gradient(losses.ppo_clip, logp, *args, **CLIPS, clip_ratio_c=3.0)
    check(loss, [[6.0, 4.0, -2.56]])
    check(clipped, [[1, 0, 1]])
    check(grad, [[0.0, 4.0, 0.0]])
    check(losses.ppo_clip(logp, *args, **CLIPS)[0], [[8.0, 4.0, -2.56]])


@pytest.mark.parametrize("c", [1.0, 0.5])
def test_ppo_clip_rejects_a_dual_clip_of_at_most_one(c):
    with pytest.raises(ValueError, match="clip_ratio_c must be greater than 1"):
        losses.ppo_clip(*token_batch(), **CLIPS, clip_ratio_c=c)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "sapo", "clip_cov", "kl_cov"])
def test_token_losses_bound_the_log_ratio(name):
    logp, wide = f64([[900.0, -900.0]]), {"clip_ratio_low": 1.0, "clip_ratio_high": math.inf}
    loss, _, grad = gradient(POLICY[name], logp, logp * 0, logp * 0 - 1, logp * 0 + 1, **wide)
    assert torch.isfinite(loss).all() and torch.isfinite(grad).all()
    if name in ("ppo_clip", "clip_cov", "kl_cov"):
        check(loss, [[math.exp(20), math.exp(-20)]])
    if name == "cispo":
        check(grad, [[math.exp(20), math.exp(-20)]])


def test_gspo_bounds_the_log_ratio_of_the_sequence():
    loss, _ = losses.gspo(f64([[30.0, 0.0]]), f64([[0.0, 0.0]]), f64([[-1.0, -1.0]]), f64([[1, 1]]), **CLIPS)
    check(loss, [[math.exp(10)] * 2])


def test_gspo_matches_hand_values():
    # log ratios 0.3 and -0.1: mean 0.1, so the sequence ratio is e^0.1 on both tokens; the third is padding
    logp, mask = f64([[-0.7, -1.1, 7.0]]), f64([[1, 1, 0]])
    loss, clipped, grad = gradient(losses.gspo, logp, f64([[-1.0, -1.0, 0.0]]), f64([[2.0] * 3]), mask, **CLIPS)
    check(loss, [[-2 * math.exp(0.1), -2 * math.exp(0.1), 0.0]])
    check(grad, [[-2 * math.exp(0.1), -2 * math.exp(0.1), 0.0]])
    check(clipped, [[0, 0, 0]])
    tight = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
    loss, clipped = losses.gspo(logp, f64([[-1.0, -1.0, 0.0]]), f64([[2.0] * 3]), mask, **tight)
    check(loss, [[-2 * 1.0004, -2 * 1.0004, 0.0]])
    check(clipped, [[1, 1, 0]])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    logp = f64([[3.0, 0.1, 1.1]]).log()
    args = torch.zeros_like(logp), f64([[1.0, -1.0, 1.0]]), torch.ones_like(logp)
    _, clipped, grad = gradient(losses.cispo, logp, *args, **CLIPS)
    check(grad, [[-1.28, 0.8, -1.1]])
    check(clipped, [[1, 1, 0]])


def test_dppo_matches_hand_values():
    # probabilities 0.5 -> 0.8, 0.5 -> 0.6 and 0.01 -> 0.03, whose ratio is 3, with a good advantage; 0.5 -> 0.2 with a
    # bad one, and 0.5 -> 0.8 with a bad one, which is moved back
    p, p_old = f64([[0.8, 0.6, 0.03, 0.2, 0.8]]), f64([[0.5, 0.5, 0.01, 0.5, 0.5]])
    args = p_old.log(), f64([[1.0, 1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 5)
    limits = dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=2.0)
    loss, clipped, grad = gradient(losses.dppo_tv, p.log(), *args, **limits)
    check(clipped, [[1, 0, 0, 1, 0]])
    check(grad, [[0.0, -1.2, -2.0, 0.0, 1.6]])
    check(loss, [[0.0, -1.2 * math.log(0.6), -2 * math.log(0.03), 0.0, 1.6 * math.log(0.8)]])
    # KL of (0.5, 0.5) to (0.8, 0.2) is log(5 / 4) = 0.223, to (0.6, 0.4) it is 0.020, of 0.01 to 0.03 it is 0.009
    limits = dict(clip_ratio_low=0.23, clip_ratio_high=0.015)
    _, clipped, grad = gradient(losses.dppo_kl, p.log(), *args, **limits)
    check(clipped, [[1, 1, 0, 0, 0]])
    check(grad, [[0.0, 0.0, -3.0, 0.4, 1.6]])
    above = f64([[1e-6, 1e-6]]), f64([[0.5, 0.5]]).log(), f64([[1.0, -1.0]]), torch.ones(1, 2)
    _, clipped, grad = gradient(losses.dppo_kl, *above, **limits)  # rounding may make a probability larger than 1
    check(clipped, [[1, 0]])
    check(grad, [[0.0, 2.0]], 1e-5)


def test_luspo_is_gspo_with_every_row_times_its_length():
    logp, old_logp, advantages, mask = token_batch()
    loss, _ = losses.gspo(logp, old_logp, advantages, mask, **CLIPS)
    actual = losses.aggregate(loss, mask, "seq-mean-token-sum", num_tokens=mask.sum().item(), num_seqs=6)
    expected = 0.0
    for i in range(7):
        valid = [t for t in range(9) if mask[i, t]]
        if valid:
            ratio = math.exp(sum((logp[i, t] - old_logp[i, t]).item() for t in valid) / len(valid))
            A = advantages[i, 0].item()
            expected += len(valid) * max(-A * ratio, -A * min(max(ratio, 0.8), 1.28)) / 6
    assert actual.item() == pytest.approx(expected, rel=1e-12)


def test_sapo_uses_the_temperatures_it_is_given():
    args = f64([[2.0, 2.0]]).log(), f64([[0.0, 0.0]]), f64([[1.0, -1.0]]), f64([[1, 1]])
    loss, _ = losses.sapo(*args, **CLIPS, tau_pos=1.1, tau_neg=2.3)
    check(loss, [[-4 / 1.1 / (1 + math.exp(-1.1)), 4 / 2.3 / (1 + math.exp(-2.3))]])
    check(losses.sapo(*args)[0], [[-4 / (1 + math.exp(-1.0)), 4 / 1.05 / (1 + math.exp(-1.05))]])


def test_gmpo_matches_loop_reference():
    logp, old_logp, advantages, mask = token_batch()
    advantages = advantages + 0.3 * torch.randn_like(advantages)  # the sign may differ within a row
    loss, clipped, grad = gradient(losses.gmpo, logp, old_logp, advantages, mask, **CLIPS)
    expected = [[[0.0, 0.0, 0.0] for _ in row] for row in logp]
    for i in range(len(logp)):
        valid = [t for t, m in enumerate(mask[i].tolist()) if m]
        used, cut = {}, {}
        for t in valid:
            delta, adv = (logp[i, t] - old_logp[i, t]).item(), advantages[i, t].item()
            used[t] = min(delta, 0.28) if adv > 0 else max(delta, -0.2)
            cut[t] = float(used[t] != delta)
        for t in valid:
            mean_adv = sum(advantages[i, n].item() for n in valid) / len(valid)
            value = -mean_adv * math.exp(sum(used.values()) / len(valid))
            expected[i][t] = [value, cut[t], 0.0 if cut[t] else value]  # L_i tokens hold it, each moves it by 1 / L_i
    check(torch.stack([loss, clipped, grad], dim=-1), expected)
    assert 0 < clipped.sum() < mask.sum()


def test_gmpo_mean_of_rows_is_the_objective_of_the_paper():
    logp, old_logp, advantages, mask = token_batch()
    loss, _ = losses.gmpo(logp, old_logp, advantages, mask, clip_ratio_low=9.0, clip_ratio_high=9.0)
    actual = losses.aggregate(loss, mask, "seq-mean-token-mean", num_tokens=mask.sum().item(), num_seqs=7)
    expected = 0.0
    for i in range(7):
        ratios = [math.exp(logp[i, t] - old_logp[i, t]) for t in range(9) if mask[i, t]]
        if ratios:
            expected -= advantages[i, 0].item() * math.prod(ratios) ** (1 / len(ratios)) / 7
    assert actual.item() == pytest.approx(expected, rel=1e-12)


def test_vespo_matches_loop_reference():
    logp, old_logp, advantages, mask = token_batch()
    advantages = advantages + 2 * torch.randn_like(advantages)  # the sign may differ within a row
    loss, clipped, grad = gradient(losses.vespo, logp, old_logp, advantages, mask, **CLIPS)
    expected = [[[0.0, 0.0, 0.0] for _ in row] for row in logp]
    for i in range(len(logp)):
        valid = [t for t, m in enumerate(mask[i].tolist()) if m]
        W = math.prod(math.exp(logp[i, t] - old_logp[i, t]) for t in valid)
        for t in valid:
            A = advantages[i, t].item()
            k, lam = (2, 3) if A >= 0 else (3, 2)
            slope = -math.exp(lam) * W**k * math.exp(-lam * W) * A
            expected[i][t] = [slope * logp[i, t].item(), 0.0, slope]
    check(torch.stack([loss, clipped, grad], dim=-1), expected)


def test_vespo_by_hand():
    # two tokens of ratio 2 make W = 4, of ratio 1/2 W = 1/4; phi(4) = e^3 4^2 e^-12, phi(1/4) = e^2 / 64 e^(-1/2)
    logp, args = f64([[2.0, 2.0], [0.5, 0.5]]).log(), (torch.zeros(2, 2).double(), f64([[1, 1], [-1, -1]]))
    _, _, grad = gradient(losses.vespo, logp, *args, torch.ones(2, 2))
    check(grad, [[-16 * math.exp(-9)] * 2, [math.exp(1.5) / 64] * 2])
    _, _, grad = gradient(losses.vespo, logp, *args, torch.ones(2, 2), vespo_pos=(1, 1), vespo_neg=(1, 0))
    check(grad, [[-4 * math.exp(-3)] * 2, [1 / 4] * 2])
    far = gradient(losses.vespo, logp * 100, *args, torch.ones(2, 2))
    assert all(x.isfinite().all() for x in far) and far[2].abs().max() < 1e-9


def test_dro_by_hand():
    # the policy has moved by log 2, up and down. With beta 2, A = 2 log 2 is where the gradient ends.
    logp, A = f64([[2.0, 0.5]]).log(), 2 * math.log(2)
    loss, _, grad = gradient(
        losses.dro, logp, torch.zeros(1, 2).double(), f64([[A, A]]), torch.ones(1, 2), dro_beta=2.0
    )
    check(loss, [[-A * math.log(2) + math.log(2) ** 2, A * math.log(2) + math.log(2) ** 2]])
    check(grad, [[0.0, -2 * A]])


def test_chosen_tokens_by_hand():
    # ratios 1.5 and 0.5; the first token of each row is chosen
    logp, old_logp = f64([[1.5, 1.5], [0.5, 0.5]]).log(), torch.zeros(2, 2, dtype=torch.float64)
    advantages, mask = f64([[2.0, 2.0], [-1.0, -1.0]]), torch.ones(2, 2)
    batch, chosen = (logp, old_logp, advantages, mask), torch.tensor([[True, False], [True, False]])
    loss, clipped, grad = gradient(losses.clip_cov, *batch, chosen=chosen, **CLIPS, clip_ratio_c=1.1)
    check(loss, [[0.0, -2 * 1.28], [0.0, 0.8]])  # both others are clipped
    check(grad, [[0.0, 0.0], [0.0, 0.0]])
    check(clipped, [[1.0, 0.0], [1.0, 0.0]])
    loss, clipped, grad = gradient(losses.kl_cov, *batch, chosen=chosen, ppo_kl_coef=0.1)
    check(loss, [[-3 + 0.1 * math.log(1.5), -3], [0.5 + 0.1 * math.log(2), 0.5]])
    check(grad, [[-3 + 0.1, -3], [0.5 - 0.1, 0.5]])
    check(clipped, [[1.0, 0.0], [1.0, 0.0]])
    for function in (losses.clip_cov, losses.kl_cov):
        with pytest.raises(AssertionError, match=r"unexpected shapes: .*\(2, 2\), \(1, 2\)"):
            function(*batch, chosen=chosen[:1], **CLIPS, ppo_kl_coef=1.0)


@pytest.mark.parametrize("name", sorted(set(POLICY) - {"clip_cov", "kl_cov"}))
def test_policy_losses_on_policy_have_the_policy_gradient(name):
    logp, _, advantages, mask = token_batch()
    _, clipped, grad = gradient(POLICY[name], logp, logp, advantages, mask, **CLIPS)
    torch.testing.assert_close(grad, -advantages * mask, rtol=1e-12, atol=1e-12)
    assert (clipped == 0).all()


def test_policy_losses_differ_off_policy():
    batch = token_batch()
    grads = {name: gradient(f, *batch, **CLIPS)[2] for name, f in POLICY.items()}
    grads["dual"] = gradient(losses.ppo_clip, *batch, **CLIPS, clip_ratio_c=1.5)[2]
    for first, second in combinations(grads, 2):
        assert (grads[first] - grads[second]).abs().max() > 1e-3, (first, second)


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_let_no_gradient_into_old_logp(name):
    logp, old_logp, advantages, mask = token_batch()
    old_logp.requires_grad_()
    loss, clipped = POLICY[name](logp.requires_grad_(), old_logp, advantages, mask, **CLIPS)
    loss.sum().backward()
    assert old_logp.grad is None and not clipped.requires_grad


@pytest.mark.parametrize("name", ["gspo", "cispo", "sapo", "gmpo", "vespo", "dro", "policy_gradient"])
def test_policy_losses_ignore_the_dual_clip(name):
    batch = token_batch(spread=2.0)
    for first, second in zip(
        POLICY[name](*batch, **CLIPS), POLICY[name](*batch, **CLIPS, clip_ratio_c=1.1), strict=True
    ):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", ["sapo", "vespo", "dro", "policy_gradient"])
def test_policy_losses_without_a_clip_ignore_the_clip_ratios(name):
    batch = token_batch()
    for first, second in zip(POLICY[name](*batch, **CLIPS), POLICY[name](*batch), strict=True):
        assert torch.equal(first, second)


# --- KL ---


@pytest.mark.parametrize(
    ("kind", "alias", "expected"),
    [
        ("k1", "k1", [0.5, -0.5]),
        ("abs", "abs", [0.5, 0.5]),
        ("k2", "k2", [0.125, 0.125]),
        ("k3", "low_var_kl", [math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1]),
    ],
)
def test_kl_matches_hand_values(kind, alias, expected):
    logp, ref_logp = f64([[-1.0, -2.0]]), f64([[-1.5, -1.5]])
    for name in (kind, alias, kind + "+", alias + "+"):
        check(losses.kl(logp, ref_logp, name), [expected])


@pytest.mark.parametrize(("kind", "expected"), [("k1", 1.0), ("abs", -1.0), ("k2", -0.5), ("k3", 1 - math.exp(0.5))])
def test_kl_has_its_own_gradient_and_with_plus_that_of_k2(kind, expected):
    for name, derivative in ((kind, expected), (kind + "+", -0.5)):
        logp = f64([[-2.0]]).requires_grad_()
        losses.kl(logp, f64([[-1.5]]), name).sum().backward()
        check(logp.grad, [[derivative]])


def test_kl_k3_is_clamped():
    logp = f64([[0.0, 0.0, 50.0]]).requires_grad_()
    value = losses.kl(logp, f64([[5.0, 1000.0, 0.0]]), "k3")
    check(value, [[10.0, 10.0, 10.0]])
    value.sum().backward()
    check(logp.grad, [[0.0, 0.0, 0.0]])


def test_kl_k3_is_never_negative_in_float32():
    difference = torch.logspace(-8, 0, 200)
    value = losses.kl(difference, torch.zeros(200), "k3")
    assert (value >= 0).all()
    expected = [math.expm1(-d) + d for d in difference.double().tolist()]
    torch.testing.assert_close(value, torch.tensor(expected), rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", ["k4", "full", "", "+", "k1++"])
def test_kl_rejects_unknown_kinds(kind):
    with pytest.raises(ValueError, match=r"k1, k2, k3 \(low_var_kl\), abs"):
        losses.kl(torch.zeros(1, 1), torch.zeros(1, 1), kind)


def test_unbiased_kl_matches_hand_values():
    logp, ref_logp = f64([[-1.0, -2.0]]), f64([[-1.5, -1.5]])
    k3 = [math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1]
    check(losses.kl(logp, ref_logp, "unbiased", old_logp=logp - math.log(3)), [[3 * x for x in k3]])
    old_logp = logp.clone().requires_grad_()
    value = losses.kl(logp.requires_grad_(), ref_logp, "unbiased", old_logp=old_logp)
    check(value, [k3])
    value.sum().backward()
    assert old_logp.grad is None  # a constant
    with pytest.raises(AssertionError, match="unbiased needs old_logp"):
        losses.kl(logp, ref_logp, "unbiased")


def test_unbiased_kl_has_value_and_gradient_of_the_exact_kl_off_policy():
    """In expectation over tokens that another policy sampled; k3 alone has neither."""
    logits, *others = 0.5 * torch.randn(3, 5, dtype=torch.float64)  # no k3 reaches its bound of 10
    reference, old = (x.log_softmax(-1) for x in others)
    logits.requires_grad_()
    logp = logits.log_softmax(-1)
    exact = (logp.exp() * (logp - reference)).sum()
    sampled = (old.exp() * losses.kl(logp, reference, "unbiased", old_logp=old)).sum()
    torch.testing.assert_close(sampled, exact)
    slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (exact, sampled)]
    torch.testing.assert_close(*slopes)
    plain = (old.exp() * losses.kl(logp, reference, "k3")).sum()
    assert abs(plain - exact) > 1e-3
    assert (torch.autograd.grad(plain, logits)[0] - slopes[0]).abs().max() > 1e-3


def test_kl_estimators_agree_in_expectation():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((policy * losses.kl(policy.log(), reference.log(), kind)).sum(), exact)


def test_kl_k2_has_the_gradient_of_the_exact_kl_in_expectation():
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    exact = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)[0]
    for kind in ("k2", "k1+", "k3+", "abs+"):
        sampled = (logp.detach().exp() * losses.kl(logp, reference, kind)).sum()
        torch.testing.assert_close(torch.autograd.grad(sampled, logits, retain_graph=True)[0], exact)


# --- aggregation ---


def test_aggregate_matches_hand_values():
    x, mask = f64([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN] * 3]), f64([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    options = {"num_tokens": 10, "num_seqs": 4, "scale": 5.0}
    actual = [losses.aggregate(x, mask, mode, **options).item() for mode in MODES]
    assert actual == pytest.approx([0.9, 9 / 4, 7.5 / 4, 9 / 20], rel=1e-15)
    lone = [losses.aggregate(x[1:2], mask[1:2], m, num_tokens=1, num_seqs=1, scale=0.5).item() for m in MODES]
    assert lone == [6, 6, 6, 12]


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_of_nothing_is_zero(mode):
    args = torch.full((2, 3), NAN), torch.zeros(2, 3), mode
    assert losses.aggregate(*args, num_tokens=0, num_seqs=0, scale=3.0) == 0


@pytest.mark.parametrize("scale", [None, 0.0, -1.0])
def test_aggregate_needs_a_scale_for_the_norm_mode(scale):
    with pytest.raises(ValueError, match="seq-mean-token-sum-norm needs a positive scale"):
        losses.aggregate(torch.ones(1, 1), torch.ones(1, 1), MODES[3], num_tokens=1, num_seqs=1, scale=scale)


def test_aggregate_rejects_unknown_modes():
    with pytest.raises(ValueError, match="unknown aggregation 'mean'; known: " + ", ".join(MODES)):
        losses.aggregate(torch.ones(1, 1), torch.ones(1, 1), "mean", num_tokens=1, num_seqs=1)


def kl_loss(kind):
    return lambda logp, ref_logp, _, mask: (losses.kl(logp, ref_logp, kind), mask)


TRAINED = {name: lambda *batch, f=f: f(*batch, **CLIPS) for name, f in POLICY.items()}
TRAINED["ppo_clip_dual"] = lambda *batch: losses.ppo_clip(*batch, **CLIPS, clip_ratio_c=1.5)
TRAINED |= {f"kl_{kind}": kl_loss(kind) for kind in KL_KINDS}


def accumulated_gradient(function, batch, mode, *, size, order, padding):
    """Gradient of the sum over micro-batches of `size` rows in `order`, each with `padding` columns of rubbish."""
    leaf = batch[0].clone().requires_grad_()
    rows = [leaf, *batch[1:]]
    counts = {"num_tokens": batch[3].sum().item(), "num_seqs": len(leaf), "scale": 9.0}
    for start in range(0, len(leaf), size):
        micro = [x[order[start : start + size]] for x in rows]
        rubbish = 50 * torch.randn(len(micro[0]), padding, dtype=leaf.dtype)
        micro = [torch.cat([x, rubbish * (x is not micro[3])], dim=1) for x in micro]
        loss, _ = function(*micro)
        losses.aggregate(loss, micro[3], mode, **counts).backward()
    return leaf.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TRAINED)
def test_aggregate_is_invariant_to_micro_batches(name, mode):
    batch = token_batch()
    in_order = torch.arange(7)
    whole = accumulated_gradient(TRAINED[name], batch, mode, size=7, order=in_order, padding=0)
    assert (whole[batch[3] == 0] == 0).all() and (whole != 0).any()
    for size in (1, 2, 3, 7):
        for order in (in_order, torch.randperm(7)):
            for padding in (0, 5):
                split = accumulated_gradient(TRAINED[name], batch, mode, size=size, order=order, padding=padding)
                torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)


def test_aggregate_modes_weigh_tokens_differently():
    batch, order = token_batch(), torch.arange(7)
    grads = [accumulated_gradient(TRAINED["ppo_clip"], batch, m, size=7, order=order, padding=0) for m in MODES]
    for first, second in combinations(grads, 2):
        assert (first - second).abs().max() > 1e-3


# --- every public function ---

BT = torch.linspace(-1, 1, 30).reshape(5, 6)
MASK = (torch.arange(30) % 4 != 1).float().reshape(5, 6)
FOUR = [BT, BT.flip(0), BT.flip(1) + 0.1, MASK]
CALLS = {name: (f, FOUR, CLIPS) for name, f in POLICY.items()} | {
    "kl": (losses.kl, [BT, BT.flip(0)], {"kind": "k3+"}),
    "aggregate": (losses.aggregate, [BT, MASK], {"mode": MODES[2], "num_tokens": 22, "num_seqs": 5}),
}
MASKED = sorted(set(CALLS) - {"kl"})  # which takes no mask


def results(out):
    return out if isinstance(out, tuple) else (out,)


def test_calls_cover_every_public_function():
    public = [n for n, f in vars(losses).items() if callable(f) and f.__module__ == losses.__name__]
    assert sorted(CALLS) == sorted(n for n in public if not n.startswith("_"))


@pytest.mark.parametrize("name", CALLS)
def test_functions_do_not_mutate_inputs(name):
    function, tensors, options = CALLS[name]
    inputs = [x.clone() for x in tensors]
    for grad_mode in (False, True):
        for out in results(function(inputs[0].requires_grad_(grad_mode), *inputs[1:], **options)):
            if out.requires_grad:
                out.sum().backward()
        for old, new in zip(tensors, inputs, strict=True):
            assert torch.equal(old, new)


@pytest.mark.parametrize("name", CALLS)
def test_functions_keep_dtype_and_shape(name):
    function, tensors, options = CALLS[name]
    for dtype in (torch.float32, torch.float64):
        for out in results(function(*[x.to(dtype) for x in tensors], **options)):
            assert out.dtype == dtype
            assert out.shape == (() if name.startswith("masked") or name == "aggregate" else BT.shape)


@pytest.mark.parametrize("name", CALLS)
def test_functions_raise_on_shape_mismatch(name):
    function, tensors, options = CALLS[name]
    for i, tensor in enumerate(tensors):
        for wrong in (tensor[:, :-1], tensor[:1], tensor[0]):
            with pytest.raises(AssertionError, match=r"unexpected shapes: .*\(5, 6\)"):
                function(*tensors[:i], wrong, *tensors[i + 1 :], **options)


@pytest.mark.parametrize("name", MASKED)
def test_functions_accept_any_mask_dtype(name):
    function, tensors, options = CALLS[name]
    expected = results(function(*tensors, **options))
    for dtype in (torch.bool, torch.int64, torch.float64):
        for old, new in zip(expected, results(function(*tensors[:-1], MASK.to(dtype), **options)), strict=True):
            assert torch.equal(old, new)


@pytest.mark.parametrize("rubbish", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("name", MASKED)
def test_functions_ignore_masked_positions_in_value_and_gradient(name, rubbish):
    function, tensors, options = CALLS[name]
    dirty = [torch.where(MASK.bool(), x, rubbish) for x in tensors[:-1]]
    outcomes = []
    for inputs in (tensors[:-1], dirty):
        leaf = inputs[0].clone().requires_grad_()
        out = results(function(leaf, *inputs[1:], MASK, **options))
        grad = torch.autograd.grad(out[0].sum(), leaf)[0] if out[0].requires_grad else torch.zeros_like(leaf)
        outcomes.append([*out, grad])
        assert (grad[MASK == 0] == 0).all()
    for clean, spoiled in zip(*outcomes, strict=True):
        torch.testing.assert_close(spoiled, clean, rtol=0, atol=0)


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_ignore_each_spoiled_input_alone(name):
    for i in range(3):
        inputs = [torch.where(MASK.bool(), x, NAN) if k == i else x for k, x in enumerate(FOUR)]
        loss, clipped, grad = gradient(POLICY[name], *inputs, **CLIPS)
        for spoiled, clean in zip((loss, clipped, grad), gradient(POLICY[name], *FOUR, **CLIPS), strict=True):
            assert torch.equal(spoiled, clean)


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses_do_not_hide_a_valid_nan(name):
    logp = BT.clone()
    logp[0, 0] = NAN
    assert POLICY[name](logp, *FOUR[1:], **CLIPS)[0].sum().isnan()
