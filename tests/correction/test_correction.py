"""Rollout correction against hand-computed values and plain Python loops."""

import math
from itertools import combinations

import pytest
import torch

from extras.correction import Correction, ratios

NAN = float("nan")
LEVELS = ["token", "sequence", "geometric"]
SETTINGS = {
    "token": dict(rollout_is="token", rollout_is_threshold=1.3),
    "token, two bounds": dict(rollout_is="token", rollout_is_threshold=1.3, rollout_is_threshold_lower=0.8),
    "sequence": dict(rollout_is="sequence", rollout_is_threshold=1.5),
    "IcePop": dict(rollout_is="token", rollout_is_threshold=9.0, rollout_mask="token"),
    "token mask": dict(rollout_mask="token", rollout_mask_threshold=1.25, rollout_mask_threshold_lower=0.8),
    "sequence mask": dict(rollout_mask="sequence"),
    "geometric mask": dict(rollout_mask="geometric", rollout_mask_threshold=1.1, rollout_mask_threshold_lower=0.9),
    "veto": dict(rollout_mask="veto", rollout_mask_threshold=1.6, rollout_mask_threshold_lower=0.6),
    "off-policy mask": dict(off_policy_mask_threshold=0.05),
    "probability mask": dict(probability_mask_threshold=0.1),
    "all": dict(
        rollout_is="sequence", rollout_mask="token", off_policy_mask_threshold=0.02, probability_mask_threshold=0.3
    ),
}


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def check(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, f64(expected).to(actual.dtype), rtol=tolerance, atol=tolerance)


def token_batch():
    """logp, old_logp, rollout_logp, advantages, mask: gaps, padding and an empty row."""
    generator = torch.Generator().manual_seed(0)

    def noise(spread):
        return spread * torch.randn(7, 9, dtype=torch.float64, generator=generator)

    logp = -3 * torch.rand(7, 9, dtype=torch.float64, generator=generator)
    old_logp = logp + noise(0.1) + 0.1 * noise(1)[:, :1]
    rollout_logp = old_logp + noise(0.25) + 0.1 * noise(1)[:, :1]
    advantages = f64([[1.3], [-0.7], [0.4], [0.9], [-1.1], [0.6], [-0.8]]).repeat(1, 9)
    mask = (torch.rand(7, 9, generator=generator) < 0.7).double()
    mask[0, 4:] = 0.0
    mask[2] = 0.0
    mask[3] = 1.0
    mask[4] = torch.eye(9)[5]  # one token
    return logp, old_logp, rollout_logp, advantages, mask


def loop_reference(args, logp, old_logp, rollout_logp, advantages, mask):
    """The definitions on Python floats, row by row, token by token."""
    result = [[1.0] * len(row) for row in mask.tolist()]
    for i, row in enumerate(mask.tolist()):
        valid = [t for t, m in enumerate(row) if m]
        x = {t: old_logp[i, t].item() - rollout_logp[i, t].item() for t in valid}
        moved = [rollout_logp[i, t].item() - logp[i, t].item() for t in valid]
        for t in valid:
            ratio = {"token": math.exp(x[t]), "sequence": math.exp(sum(x.values()))}
            ratio["geometric"] = math.exp(sum(x.values()) / len(x))
            weight = 1.0
            if args.rollout_is not in (None, "none"):
                low, high = args.rollout_is_threshold_lower, args.rollout_is_threshold
                weight *= max(low, min(high, ratio[args.rollout_is]))
            if args.rollout_mask != "none":
                low, high = args.rollout_mask_threshold_lower, args.rollout_mask_threshold
                of_tokens = [math.exp(y) for y in x.values()]
                looked_at = of_tokens if args.rollout_mask == "veto" else [ratio[args.rollout_mask]]
                weight *= float(all(low <= r <= high for r in looked_at))
            if args.off_policy_mask_threshold is not None and advantages[i, t] < 0:
                weight *= 0.0 if sum(moved) / len(moved) > args.off_policy_mask_threshold else 1.0
            if args.probability_mask_threshold is not None:
                probabilities = math.exp(logp[i, t].item()), math.exp(rollout_logp[i, t].item())
                weight *= float(abs(probabilities[0] - probabilities[1]) <= args.probability_mask_threshold)
            result[i][t] = weight
    return result


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_match_loop_reference(name):
    args, batch = Correction(**SETTINGS[name]), token_batch()
    weights, mask = args.weights(*batch), batch[-1].bool()
    check(weights[mask], torch.tensor(loop_reference(args, *batch))[mask].tolist(), 1e-6)
    assert len(weights[mask].unique()) > 1  # the setting does something here


def test_settings_differ():
    batch = token_batch()
    results = {name: Correction(**x).weights(*batch) * batch[-1] for name, x in SETTINGS.items()}
    for first, second in combinations(results, 2):
        assert (results[first] - results[second]).abs().max() > 1e-3, (first, second)


def test_without_a_flag_every_weight_is_exactly_one():
    assert (Correction().weights(*token_batch()) == 1).all()


@pytest.mark.parametrize("name", [x for x in SETTINGS if "off-policy" not in x])
def test_where_engine_and_trainer_agree_every_weight_is_exactly_one(name):
    logp, _, _, advantages, mask = token_batch()
    assert (Correction(**SETTINGS[name]).weights(logp, logp, logp, advantages, mask) == 1).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_do_not_depend_on_how_rows_are_batched(name):
    args, batch = Correction(**SETTINGS[name]), token_batch()
    whole = args.weights(*batch)
    for rows in ([3], [6, 0], [5, 2, 1, 4]):
        part = [torch.cat([x[rows], NAN * x[rows][:, :3]], dim=1) for x in batch[:-1]]  # wider, with rubbish
        mask = torch.cat([batch[-1][rows], torch.zeros(len(rows), 3)], dim=1)
        torch.testing.assert_close(args.weights(*part, mask)[:, :9], whole[rows], rtol=1e-12, atol=0)


def test_rollout_ratio_matches_hand_values():
    # x = log 2 and log 8; a gap with nonsense; a row without tokens; one with a single token
    old_logp, rollout_logp = f64([[2.0, NAN, 8.0], [5.0] * 3, [3.0] * 3]).log(), torch.zeros(3, 3).double()
    mask = f64([[1, 0, 1], [0, 0, 0], [1, 0, 0]])
    expected = {"token": [2, 1, 8], "sequence": [16, 1, 16], "geometric": [4, 1, 4]}
    for level, row in expected.items():
        check(ratios.rollout_ratio(old_logp, rollout_logp, mask, level=level), [row, [1, 1, 1], [3, 1, 1]])


@pytest.mark.parametrize("level", LEVELS)
def test_rollout_ratio_is_bounded_and_detached(level):
    old_logp = f64([[900.0, 900.0], [-900.0, -900.0]]).requires_grad_()
    ratio = ratios.rollout_ratio(old_logp, torch.zeros(2, 2), torch.ones(2, 2), level=level)
    assert not ratio.requires_grad
    check(ratio[:, 0], [math.exp(20), math.exp(-20)])


def test_rollout_ratio_rejects_an_unknown_level():
    with pytest.raises(ValueError, match="unknown level 'geo'; known: token, sequence, geometric"):
        ratios.rollout_ratio(*torch.zeros(3, 1, 1), level="geo")


def test_bounds_match_hand_values():
    ratio = f64([[0.25, 0.5, 1.0, 2.0, 2.5]])
    check(ratios.truncated(ratio, low=0.0, high=2.0), [[0.25, 0.5, 1, 2, 2]])
    check(ratios.truncated(ratio, low=0.5, high=2.0), [[0.5, 0.5, 1, 2, 2]])
    check(ratios.within(ratio, low=0.5, high=2.0), [[0, 1, 1, 1, 0]])  # both bounds are within


def test_off_policy_mask_matches_hand_values():
    # rows have moved by 0.3 on average (0.5 and 0.1; nonsense between), 0.3, and -0.3 nats a token
    rollout = f64([[-1.0, NAN, -1.0], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    logp = f64([[-1.5, 9.0, -1.1], [-1.3, -1.3, -1.3], [-0.7, -0.7, -0.7]]).requires_grad_()
    mask, advantages = f64([[1, 0, 1], [1, 1, 1], [1, 1, 1]]), f64([[-1.0] * 3, [0.0, 1.0, -2.0], [-1.0] * 3])
    actual = ratios.off_policy_mask(logp, rollout, advantages, mask, threshold=0.2)
    check(actual, [[0, 1, 0], [1, 1, 0], [1, 1, 1]])
    assert not actual.requires_grad
    assert (ratios.off_policy_mask(logp, rollout, advantages, mask, threshold=0.4) == 1).all()
    logp, short = f64([[-1.5, NAN], [-1.25, NAN], [NAN, NAN]]), f64([[1, 0], [1, 0], [0, 0]])
    actual = ratios.off_policy_mask(logp, -torch.ones(3, 2).double(), logp, short, threshold=0.25)
    check(actual, [[0, 1], [1, 1], [1, 1]])  # have moved by 0.5, by exactly 0.25, and a row without tokens


def test_probability_mask_matches_hand_values():
    # from 0.01 to 0.09, a ratio of 9; from 0.9 to 0.5 and back; nonsense; a token that was not sampled
    rollout, logp = f64([[0.01, 0.9, 0.5, NAN]]).log(), f64([[0.09, 0.5, 0.9, 0.5]]).log().requires_grad_()
    actual = ratios.probability_mask(logp, rollout, f64([[1, 1, 1, 0]]), threshold=0.3)
    check(actual, [[1, 0, 0, 1]])
    assert not actual.requires_grad
    check(ratios.probability_mask(logp, rollout, f64([[1, 1, 1, 0]]), threshold=0.41), [[1, 1, 1, 1]])


# --- every public function ---

BT = torch.linspace(-1, 1, 30).reshape(5, 6)
MASK = (torch.arange(30) % 4 != 1).float().reshape(5, 6)
FIVE = [BT, BT.flip(0), BT.flip(1) + 0.1, BT - 0.3, MASK]
CALLS = {
    "rollout_ratio": (ratios.rollout_ratio, [BT, BT.flip(0), MASK], {"level": "geometric"}),
    "truncated": (ratios.truncated, [BT], {"low": 0.1, "high": 0.5}),
    "within": (ratios.within, [BT], {"low": 0.1, "high": 0.5}),
    "all_within": (ratios.all_within, [BT, MASK], {"low": 0.1, "high": 0.5}),
    "off_policy_mask": (ratios.off_policy_mask, FIVE[1:], {"threshold": 0.1}),
    "probability_mask": (ratios.probability_mask, [BT, BT.flip(0), MASK], {"threshold": 0.5}),
    "weights": (lambda *x: ratios.weights(Correction(**SETTINGS["all"]), *x), FIVE, {}),
}


def test_calls_cover_every_public_function():
    public = [n for n, f in vars(ratios).items() if callable(f) and f.__module__ == ratios.__name__]
    assert sorted(CALLS) == sorted(n for n in public if not n.startswith("_"))


@pytest.mark.parametrize("name", CALLS)
def test_functions_keep_dtype_and_shape_and_change_no_input(name):
    function, tensors, options = CALLS[name]
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype, copy=True) for x in tensors]
        result = function(*inputs, **options)
        assert result.dtype == dtype and result.shape == BT.shape
        for old, new in zip(tensors, inputs, strict=True):
            assert torch.equal(old.to(dtype), new)


@pytest.mark.parametrize("name", ["rollout_ratio", "off_policy_mask", "probability_mask", "weights"])
def test_functions_raise_on_shape_mismatch_and_ignore_what_is_masked(name):
    function, tensors, options = CALLS[name]
    for i, tensor in enumerate(tensors):
        with pytest.raises(AssertionError, match=r"unexpected shapes: .*\(5, 6\)"):
            function(*tensors[:i], tensor[:, :-1], *tensors[i + 1 :], **options)
    for rubbish in (NAN, math.inf, -math.inf, 1e30):
        dirty = [torch.where(MASK.bool(), x, rubbish) for x in tensors[:-1]]
        for mask in (MASK, MASK.bool(), MASK.long()):
            assert torch.equal(function(*dirty, mask, **options), function(*tensors, **options))
