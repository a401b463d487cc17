"""rl/formulas/distillation.py: distances by loops, by their limits, and as TRL's generalized_jsd_loss gave them."""

import math

import pytest
import torch

from rl.formulas import distillation

STUDENT = torch.tensor([[2.0, 0.5, -1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64).log_softmax(-1)
TEACHER = torch.tensor([[1.0, 1.0, 0.0, -2.0], [3.0, 0.0, 0.0, 0.0]], dtype=torch.float64).log_softmax(-1)
TRL = {  # beta -> what it returned
    0.0: [0.363712742, 0.857233567],
    0.1: [0.031739635, 0.075964321],
    0.5: [0.082127006, 0.211609134],
    0.9: [0.029275192, 0.085148729],
    1.0: [0.328180163, 1.002911953],
}


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def both():
    return zip(STUDENT.exp().tolist(), TEACHER.exp().tolist(), strict=True)


def test_the_three_distances_are_those_of_their_definitions():
    assert distillation.forward_kl(STUDENT, TEACHER).tolist() == pytest.approx([kl(t, s) for s, t in both()])
    assert distillation.reverse_kl(STUDENT, TEACHER).tolist() == pytest.approx([kl(s, t) for s, t in both()])
    for beta in (0.1, 0.5, 0.8):
        expected = []
        for s, t in both():
            mixture = [beta * b + (1 - beta) * a for a, b in zip(s, t, strict=True)]
            expected.append(beta * kl(t, mixture) + (1 - beta) * kl(s, mixture))
        assert distillation.jsd(STUDENT, TEACHER, beta=beta).tolist() == pytest.approx(expected)


def test_distances_are_those_of_trl():
    """`GKDTrainer.generalized_jsd_loss` of TRL 1.16.0, summed over the vocabulary; beta 0 and 1 are the KLs there."""
    assert distillation.forward_kl(STUDENT, TEACHER).tolist() == pytest.approx(TRL[0.0], abs=1e-9)
    assert distillation.reverse_kl(STUDENT, TEACHER).tolist() == pytest.approx(TRL[1.0], abs=1e-9)
    for beta in (0.1, 0.5, 0.9):
        assert distillation.jsd(STUDENT, TEACHER, beta=beta).tolist() == pytest.approx(TRL[beta], abs=1e-9)


def test_jsd_lies_between_the_kls_and_is_bounded():
    near_0, near_1 = (distillation.jsd(STUDENT, TEACHER, beta=beta) for beta in (1e-7, 1 - 1e-7))
    assert torch.allclose(near_0 / 1e-7, distillation.forward_kl(STUDENT, TEACHER), rtol=1e-5)
    assert torch.allclose(near_1 / 1e-7, distillation.reverse_kl(STUDENT, TEACHER), rtol=1e-5)
    apart = torch.tensor([[0.0, -60.0]]), torch.tensor([[-60.0, 0.0]])
    assert distillation.jsd(*apart, beta=0.5).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("distance", [distillation.forward_kl, distillation.reverse_kl, distillation.jsd])
def test_the_rest_makes_a_distance_that_is_never_more_than_the_real_one(distance):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(50, 9, generator=generator).double().log_softmax(-1) for _ in range(2))
    real = distance(student, teacher, beta=0.3)
    before = torch.zeros(50, dtype=torch.float64)
    for k in (1, 3, 6, 8):  # 8 of 9 and the rest are all 9
        best = teacher.topk(8).indices[:, :k]
        coarse = distance(*(distillation.with_rest(x.gather(1, best)) for x in (student, teacher)), beta=0.3)
        assert (coarse >= before - 1e-12).all() and (coarse <= real + 1e-12).all()
        before = coarse
    assert torch.allclose(before, real)
    same = distillation.with_rest(student[:, :3])
    assert distance(same, same, beta=0.3).abs().max() < 1e-12


def test_the_rest_of_tokens_that_have_it_all_is_small_and_finite():
    full = torch.tensor([[0.7, 0.3]]).log()
    found = distillation.with_rest(full)
    assert found.shape == (1, 3) and found[0, 2].item() <= math.log(1e-6) and found.isfinite().all()
    some = distillation.with_rest(torch.tensor([[0.5, 0.3]], dtype=torch.float64).log())
    assert some.exp().tolist() == [pytest.approx([0.5, 0.3, 0.2])]


def test_gradient_of_the_distances_reaches_the_student_and_not_by_more_than_the_formula_says():
    """By the student's logits: softmax - teacher for the forward KL, p (d - mean of d) for the reverse one."""
    for distance in (distillation.forward_kl, distillation.reverse_kl):
        logits = STUDENT.clone().requires_grad_()
        distance(logits.log_softmax(-1), TEACHER).sum().backward()
        p, gap = STUDENT.exp(), STUDENT - TEACHER
        expected = p - TEACHER.exp()
        if distance is distillation.reverse_kl:
            expected = p * (gap - (p * gap).sum(-1, keepdim=True))
        assert torch.allclose(logits.grad, expected)


def test_the_advantage_of_train_distill_has_the_gradient_of_the_reverse_kl_on_average():
    """log p_T - log p_S, as the script has it: sum over the vocabulary of p_S times the policy gradient of a token."""
    logits = STUDENT.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    advantage = TEACHER - logp.detach()
    (-(STUDENT.exp() * advantage * logp)).sum().backward()
    exact = STUDENT.clone().requires_grad_()
    distillation.reverse_kl(exact.log_softmax(-1), TEACHER).sum().backward()
    assert torch.allclose(logits.grad, exact.grad)
