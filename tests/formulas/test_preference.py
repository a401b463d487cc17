"""rl/formulas/preference.py and the losses of train_dpo.py: values by hand, by loops in plain Python, and TRL's own."""

import math

import pytest
import torch

import train_dpo
from rl.formulas import preference

NAN = math.nan
ROWS = [[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5], [NAN, 0.2, NAN, 0.9], [NAN, NAN, 0.3, NAN], [NAN] * 4]
SCORES = torch.tensor(ROWS)

# ---------------------------------------------------------------------------------------------------------------------
# Pairs


@pytest.mark.parametrize(
    ("margin", "expected"), [(0.0, [[0, 1], [11, 9]]), (0.7, [[0, 1]]), (0.5, [[0, 1], [11, 9]]), (1.0, [])]
)
def test_the_best_response_is_paired_with_the_worst_if_they_differ_by_more_than_the_margin(margin, expected):
    assert preference.best_against_worst(SCORES, margin).tolist() == expected


@pytest.mark.parametrize("margin", [0.0, 0.35, 0.7, 2.0])
def test_all_pairs_are_those_that_a_loop_finds(margin):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (6, 4), generator=generator).double() / 4
    scores[torch.rand(6, 4, generator=generator) < 0.2] = NAN
    expected = [
        [4 * p + i, 4 * p + j]
        for p, group in enumerate(scores.tolist())
        for i, s in enumerate(group)
        for j, t in enumerate(group)
        if s - t > margin  # false with NaN
    ]
    assert preference.all_pairs(scores, margin).tolist() == expected
    assert len(expected) > 3 or margin == 2.0


def test_the_solution_is_paired_with_every_other_response_whatever_they_score():
    assert preference.first_against_all(SCORES[:2, :3], 0.5).tolist() == [[0, 1], [0, 2], [3, 4], [3, 5]]
    assert preference.first_against_all(torch.zeros(2, 1), 0.0).shape == (0, 2)


@pytest.mark.parametrize("pairs", [preference.best_against_worst, preference.all_pairs])
def test_no_scores_make_no_pair(pairs):
    assert pairs(torch.full((3, 4), NAN), 0.0).shape == (0, 2)
    assert pairs(torch.ones(3, 4), 0.0).shape == (0, 2)
    assert pairs(torch.ones(3, 1), 0.0).shape == (0, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Losses

RATIOS = torch.tensor([[2.0, -1.0], [-3.0, 4.0], [0.0, 0.0], [30.0, -25.0]], dtype=torch.float64)
LENGTHS = torch.tensor([[4.0, 2.0], [1.0, 8.0], [5.0, 5.0], [10.0, 5.0]], dtype=torch.float64)
KL = torch.tensor([0.5, -0.25], dtype=torch.float64)


def loss_of(name, ratios, lengths, kl, *, beta, e=0.0):
    """The loss of each pair, from (N, 2) log-ratios and lengths of chosen and rejected, and the means (2,)."""
    (h_w, h_l), (T_w, T_l), (k_w, k_l) = ratios.unbind(1), lengths.unbind(1), kl
    return train_dpo.LOSSES[name](h_w=h_w, h_l=h_l, T_w=T_w, T_l=T_l, k_w=k_w, k_l=k_l, beta=beta, e=e)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def by_hand(name, w, lo, w_tokens, l_tokens, beta):
    """The loss of one pair, as the papers write it."""
    match name:
        case "dpo":
            return -math.log(sigmoid(beta * (w - lo)))
        case "ipo":
            return (w / w_tokens - lo / l_tokens - 1 / (2 * beta)) ** 2
        case "sppo":
            return (w - 1 / (2 * beta)) ** 2 + (lo + 1 / (2 * beta)) ** 2
        case "hinge":
            return max(0.0, 1 - beta * (w - lo))
        case "kto_pair":  # the KL of the rejected half is negative here, and counts as 0
            return (1 - sigmoid(beta * w) + 1 - sigmoid(beta * (0.5 - lo))) / 2


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", train_dpo.LOSSES)
def test_losses_are_those_of_the_papers(name, beta):
    loss = loss_of(name, RATIOS, LENGTHS, KL, beta=beta)
    rows = zip(RATIOS.tolist(), LENGTHS.tolist(), strict=True)
    expected = [by_hand(name, *ratios, *lengths, beta) for ratios, lengths in rows]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12) and loss.dtype == torch.float64


def test_values_that_one_can_check_in_the_head():
    one = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, 4.0]]), torch.zeros(2)
    assert loss_of("dpo", torch.zeros(1, 2), *one[1:], beta=0.1).item() == pytest.approx(math.log(2))
    assert loss_of("ipo", *one, beta=0.5).item() == pytest.approx((0.5 + 0.25 - 1) ** 2)
    assert loss_of("sppo", *one, beta=0.5).item() == 0  # exactly where it wants to be
    assert loss_of("hinge", *one, beta=0.5).item() == 0
    assert loss_of("hinge", *one, beta=0.25).item() == 0.5
    assert loss_of("kto_pair", torch.zeros(1, 2), *one[1:], beta=0.1).item() == 0.5
    moved = torch.tensor([0.25, 0.5])  # h_w is 0.5 above that of the rejected half, h_l 1.25 below that of the chosen
    expected = 1 - (sigmoid(0.2 * 0.5) + sigmoid(0.2 * 1.25)) / 2
    assert loss_of("kto_pair", *one[:2], moved, beta=0.2).item() == pytest.approx(expected)
    nothing = loss_of("ipo", torch.tensor([[0.0, -1.0]]), torch.tensor([[0.0, 4.0]]), one[2], beta=0.5)
    assert nothing.item() == pytest.approx((0.25 - 1) ** 2)  # an empty response has a mean of 0


def test_label_smoothing_by_hand():
    """A tenth of the pairs may be the wrong way round: the loss of the pair and that of its reverse, 9 to 1."""
    loss = loss_of("dpo", RATIOS, LENGTHS, KL, beta=0.1, e=0.1).tolist()
    right, reverse = (loss_of("dpo", x, LENGTHS, KL, beta=0.1).tolist() for x in (RATIOS, RATIOS.flip(1)))
    assert loss == pytest.approx([0.9 * a + 0.1 * b for a, b in zip(right, reverse, strict=True)], rel=1e-12)
    assert loss[0] == pytest.approx(-0.9 * math.log(sigmoid(0.3)) - 0.1 * math.log(sigmoid(-0.3)))


def test_losses_are_those_of_trl():
    """What the branches of DPOTrainer in TRL 1.16.0 returned for these numbers, and `dpo_loss` of 0.8.6 for KTO."""
    expected = {
        "dpo": [0.554355244, 1.103186049, 0.693147181, 0.004078443],
        "ipo": [16.000000000, 72.250000000, 25.000000000, 9.000000000],
        "sppo": [25.000000000, 145.000000000, 50.000000000, 1025.000000000],
        "hinge": [0.700000000, 1.700000000, 1.000000000, 0.000000000],
        "kto_pair": [0.377434667, 0.496950106, 0.413146450, 0.042830782],
    }
    for name, values in expected.items():
        loss = loss_of(name, RATIOS, LENGTHS, RATIOS.mean(0), beta=0.1)
        assert loss.tolist() == pytest.approx(values, abs=1e-9), name


@pytest.mark.parametrize("name", train_dpo.LOSSES)
def test_a_step_along_the_gradient_tells_the_pair_further_apart(name):
    ratios = torch.tensor([[0.1, 0.2]], dtype=torch.float64, requires_grad=True)
    kl = torch.tensor([0.3, 0.4], dtype=torch.float64, requires_grad=True)
    loss = loss_of(name, ratios, torch.tensor([[3.0, 5.0]], dtype=torch.float64), kl, beta=0.2)
    loss.sum().backward()
    assert ratios.grad[0, 0] < 0 < ratios.grad[0, 1]
    assert kl.grad is None  # a constant


def test_gradient_of_dpo_is_the_papers():
    """-beta * sigmoid(r_l - r_w) on the chosen log-prob, its opposite on the rejected one; r = beta * h."""
    ratios = RATIOS.clone().requires_grad_()
    loss_of("dpo", ratios, LENGTHS, KL, beta=0.3).sum().backward()
    weight = torch.sigmoid(0.3 * (RATIOS[:, 1] - RATIOS[:, 0]))
    assert torch.allclose(ratios.grad, torch.stack([-0.3 * weight, 0.3 * weight], 1), rtol=1e-12)


@pytest.mark.parametrize("name", train_dpo.LOSSES)
def test_a_rank_without_pairs_has_a_loss_of_zero_that_gradients_flow_through(name):
    row = torch.zeros(1, requires_grad=True)
    empty = row[:0].view(-1, 2)
    loss = loss_of(name, empty, torch.zeros(0, 2), torch.zeros(2), beta=0.1).sum()
    loss.backward()
    assert loss.item() == 0 and row.grad.tolist() == [0]
