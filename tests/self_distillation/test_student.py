"""extras/self_distillation/student.py for each way in which models run, beside transformers, a row at a time."""

import helpers_families as families
import helpers_scripts as h
import pytest
import torch
from transformers import AutoModelForCausalLM

from extras.self_distillation import student, teacher_states, token_divergences, with_hints
from rl.data.batching import collate
from rl.data.types import Sample, Sampling
from rl.formulas import distillation
from rl.model.sharding import backward

PROMPTS = {0: ([5, 9, 3], [5, 9, 30, 31, 32, 3]), 1: ([7, 2], [40, 7, 2, 8, 6])}  # without and with a hint
RESPONSES = [(0, [4, 11, 6, 13]), (0, [4, 11, 9]), (1, [21]), (1, [22, 3, 3, 3, 19])]
T = 0.1  # some families scale logits down, so that at 1 all tokens would be about equally likely
MASKS = [[1, 1, 1, 1], [1, 1, 1], [1], [1, 0, 0, 1, 1]]  # the last one was told something in between


@pytest.fixture
def batches():
    samples = [
        Sample(PROMPTS[row][0], ids, mask, [-1.0] * len(ids), "stop", row)
        for (row, ids), mask in zip(RESPONSES, MASKS, strict=True)
    ]
    batch = collate(samples, rows=range(len(samples)))
    return batch, with_hints(batch, samples, [PROMPTS[row][1] for row, _ in RESPONSES])


def by_the_book(path, formula):
    """For each sampled token the student's log-prob, its entropy, the distance and the teacher's log-prob, and the
    gradient of the sum of all distances by the weights.
    """
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    found, loss = [], 0.0
    for (row, ids), mask in zip(RESPONSES, MASKS, strict=True):
        plain, hinted = PROMPTS[row]
        n = len(ids)
        own = (model(torch.tensor([plain + ids])).logits[0, -n - 1 : -1] / T).log_softmax(-1)
        with torch.no_grad():
            other = (model(torch.tensor([hinted + ids])).logits[0, -n - 1 : -1] / T).log_softmax(-1)
        for t in [t for t in range(n) if mask[t]]:
            distance = formula(own[t][None], other[t][None], beta=0.3)[0]
            loss = loss + distance
            entropy = -(own[t].exp() * own[t]).sum()
            found.append([x.item() for x in (own[t, ids[t]], entropy, distance, other[t, ids[t]])])
    loss.backward()
    return torch.tensor(found), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("name", h.some(families.FEW, "short windows", "scaled logits", "capped scores", "delta nets"))
def test_values_and_gradients_are_those_of_a_loop(name, kind, batches, world, tmp_path, monkeypatch):
    monkeypatch.setattr(student, "CHUNK", 3)
    (batch, hinted), formula = batches, getattr(distillation, kind)
    path = families.save(name, tmp_path / "model")
    expected, gradients = by_the_book(path, formula)
    policy = families.load(path, world)
    states = teacher_states(policy, hinted)
    assert not states.requires_grad and len(states) == sum(map(sum, MASKS)) == 11
    found = token_divergences(policy, batch, states, formula, beta=0.3, sampling=Sampling(temperature=T))
    assert all(x.shape == batch.input_ids.shape and not x[batch.response_mask == 0].any() for x in found)
    rows = torch.stack([x[batch.response_mask > 0] for x in found], 1).detach()
    assert torch.allclose(rows, expected, rtol=1e-4, atol=1e-4)
    assert expected[:, 2].min() >= 0 and expected[:, 2].max() > 0.01
    backward(policy, found[2].sum(), is_last=True)
    own = {name: x.grad.full_tensor() for name, x in policy.named_parameters() if x.grad is not None}
    biggest = max(x.abs().max().item() for x in gradients.values())
    assert len(own) >= len(gradients) > 5 and biggest > 0.01
    for name, expected_gradient in gradients.items():
        found_gradient = next(x for other, x in own.items() if other.endswith(name))
        assert torch.allclose(found_gradient, expected_gradient, rtol=1e-3, atol=1e-4 * biggest), name
