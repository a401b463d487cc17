"""float16: when the scale of the loss changes, and what it does to gradients."""

import math
from dataclasses import replace
from types import SimpleNamespace

import helpers_families as families
import helpers_scripts as h
import pytest
import torch
from transformers import AutoModelForCausalLM
from workers.objectives import make_batch, packed_backward, plain_model

from extras.loss_scale import GROWTH_INTERVAL, LossScale, load_state, state_of
from rl.data.batching import collate, plan_update
from rl.data.types import Sample, take_rows
from rl.model import load as models
from rl.model import sharding
from rl.model.logprobs import token_logprobs
from rl.ranks import compute_dtype

CASE = ("ppo_clip", "token-mean")


# ---------------------------------------------------------------------------------------------------------------------
# The scale


def test_the_scale_grows_and_shrinks_as_computed_by_hand():
    scale = LossScale()
    assert scale == LossScale(65536.0, 0, 0)
    assert not any(scale.overflowed(1.0) for _ in range(399)) and scale == LossScale(65536.0, 399, 0)
    assert not scale.overflowed(0.0) and scale == LossScale(131072.0, 0, 0)  # the 400th clean update
    assert scale.overflowed(math.inf) and scale == LossScale(65536.0, 0, 1)
    assert not any(scale.overflowed(1.0) for _ in range(399)) and scale == LossScale(65536.0, 399, 1)
    assert scale.overflowed(math.nan) and scale == LossScale(32768.0, 0, 2)  # which begins to count anew
    assert not any(scale.overflowed(1.0) for _ in range(400)) and scale == LossScale(65536.0, 0, 2)
    assert all(scale.overflowed(math.inf) for _ in range(16)) and scale == LossScale(1.0, 0, 18)
    assert not scale.overflowed(math.inf) and scale == LossScale(1.0, 0, 18)  # the smallest: there is another cause


def test_the_scale_is_that_of_torch():
    """torch's own function, which has no smallest scale. Nearly every update is clean."""
    generator, scale, skipped = torch.Generator().manual_seed(0), LossScale(2.0**60), 0
    theirs, tracker = torch.tensor(2.0**60), torch.zeros((), dtype=torch.int32)
    for clean in (torch.rand(20_000, generator=generator) > 0.002).tolist():
        found_inf = torch.tensor(0.0 if clean else 1.0)
        torch._amp_update_scale_(theirs, tracker, found_inf, 2.0, 0.5, GROWTH_INTERVAL)
        assert scale.overflowed(1.0 if clean else math.inf) is not clean
        skipped += not clean
        assert scale == LossScale(theirs.item(), tracker.item(), skipped)
    assert skipped > 20 and scale.scale > 1


@pytest.mark.parametrize(
    "saved",
    [{}, {"scale": 0.5, "clean": 0, "skipped": 0}, {"scale": math.inf, "clean": 0, "skipped": 0}, {"scale": 2.0}],
)
def test_a_damaged_scale_is_refused(saved):
    models_of_run = {
        "actor": (SimpleNamespace(loss_scale=LossScale(8.0, 3, 1)), None),
        "ref": (SimpleNamespace(), None),
    }
    state = state_of(models_of_run)
    assert state == {"loss_scales": {"actor": {"scale": 8.0, "clean": 3, "skipped": 1}}}
    actor = SimpleNamespace(loss_scale=LossScale())
    load_state({"actor": (actor, None)}, {})
    assert actor.loss_scale == LossScale()
    load_state({"actor": (actor, None)}, state)
    assert actor.loss_scale == LossScale(8.0, 3, 1)
    with pytest.raises(ValueError, match="the checkpoint's loss scale of actor is .*; continue from an earlier one"):
        load_state({"actor": (actor, None)}, {"loss_scales": {"actor": saved}})


def test_auto_is_what_the_device_computes_with():
    def dtype(precision, *device):
        return compute_dtype(precision, on_gpu=device != (), has_bfloat16=device != ("V100",))

    assert dtype("auto") == torch.float32 and dtype("bfloat16") == torch.bfloat16 and dtype("float16") == torch.float16
    assert dtype("auto", "H100") == torch.bfloat16 and dtype("auto", "V100") == torch.float16
    assert dtype("float16", "H100") == dtype("float16", "V100") == torch.float16
    with pytest.raises(ValueError, match="--dtype bfloat16: this GPU does not compute in bfloat16; leave it out"):
        dtype("bfloat16", "V100")


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


@pytest.fixture(scope="module")
def batch(tiny_model):
    return make_batch(plain_model(tiny_model))


@pytest.fixture
def gradients(tiny_model, batch, world, monkeypatch):
    """gradients(dtype, factor, scale) -> norm and gradients (n,) of a loss times a factor, and the model."""
    own = sharding.backward

    def compute(dtype, factor=1.0, **scale):
        policy = models.load_model(tiny_model, replace(world, dtype=dtype), longest=64)
        policy.loss_scale = scale.get("scale", policy.loss_scale)
        monkeypatch.setattr(sharding, "backward", lambda model, loss, **last: own(model, factor * loss, **last))
        packed_backward(policy, batch, range(8), CASE, max_tokens=40)
        scaled = {name: x.grad.full_tensor().clone() for name, x in policy.named_parameters()}
        norm = sharding.clip_grad_norm(policy, 1e30)
        grads = [torch.zeros(x.shape) if x.grad is None else x.grad.full_tensor() for x in policy.parameters()]
        return norm, torch.cat([x.flatten() for x in grads]), policy, scaled

    return compute


def test_gradients_are_those_of_float32_up_to_rounding(gradients):
    """float16 has 11 binary digits, and rounds a number by at most 2 ** -11 of it. Sums add up such errors."""
    norm, expected, policy, _ = gradients(torch.float32)
    assert policy.loss_scale is None
    half_norm, half, policy, scaled = gradients(torch.float16, scale=LossScale(256.0))
    assert half.dtype == torch.float32 and policy.loss_scale == LossScale(256.0, 1, 0)
    assert half_norm == pytest.approx(norm, rel=1e-3) == pytest.approx(half.double().norm().item(), rel=1e-3)
    assert (half - expected).norm() < 10 * 2**-11 * expected.norm()
    assert torch.equal(torch.cat([x.flatten() for x in scaled.values()]), 256 * half)  # by a power of two, exactly
    coarse = gradients(torch.bfloat16)[1]
    assert (coarse - expected).norm() > 4 * (half - expected).norm()  # bfloat16 has 8 digits


def test_small_gradients_vanish_without_the_scale_and_survive_with_it(gradients):
    norm, expected, _, _ = gradients(torch.float32)
    lost, without, _, _ = gradients(torch.float16, 1e-8, scale=None)
    assert lost == 0 and not without.any()
    found, survived, _, _ = gradients(torch.float16, 1e-8)
    assert found == pytest.approx(1e-8 * norm, rel=0.01)
    assert torch.nn.functional.cosine_similarity(survived, expected, dim=0) > 0.99


def test_gradients_are_clipped_to_the_norm_without_the_scale(tiny_model, batch, world):
    policy = models.load_model(tiny_model, replace(world, dtype=torch.float16), longest=64)
    policy.loss_scale = LossScale(256.0)
    packed_backward(policy, batch, range(8), CASE, max_tokens=40)
    norm = sharding.clip_grad_norm(policy, 0.5)
    clipped = torch.cat([x.grad.full_tensor().flatten() for x in policy.parameters()])
    assert norm > 1 and clipped.norm().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_an_update_that_overflows_changes_nothing(gradients, optimizer):
    norm, grads, policy, scaled = gradients(torch.float16, scale=LossScale(2.0**40, 7, 2))
    assert not all(x.isfinite().all() for x in scaled.values())
    assert norm == 0 and all(x.grad is None for x in policy.parameters()) and not grads.any()
    assert policy.loss_scale == LossScale(2.0**39, 0, 3)
    before = {name: x.full_tensor().clone() for name, x in policy.named_parameters()}
    adamw = torch.optim.AdamW(policy.parameters(), lr=1.0, weight_decay=0.5, fused=optimizer == "fused")
    adamw.step()
    h.assert_same({name: x.full_tensor() for name, x in policy.named_parameters()}, before)
    assert not adamw.state


def test_at_the_smallest_scale_a_norm_that_is_not_finite_is_returned(gradients):
    norm, _, policy, _ = gradients(torch.float16, math.inf, scale=LossScale(1.0))
    assert not math.isfinite(norm) and policy.loss_scale == LossScale(1.0)


def test_the_auxiliary_loss_of_experts_gets_the_scale_too(tmp_path, world):
    folder, found = families.save("experts", tmp_path / "experts"), {}
    ids = torch.randint(3, 80, (12,), generator=torch.Generator().manual_seed(3)).tolist()
    rows = collate([Sample(ids[:2], ids[2:], [1] * 10, [0.0] * 10, "stop", 0)])
    update = plan_update([12], max_tokens=14, ranks=world)
    for dtype in (torch.float32, torch.float16):
        policy = models.load_model(folder, replace(world, dtype=dtype), longest=64)
        next(x for x in policy.packed.families if hasattr(x, "balance")).balance = 0.5
        [micro] = update.micro_batches
        logp, _ = token_logprobs(policy, take_rows(rows, micro))
        sharding.backward(policy, 0.0 * logp.sum(), is_last=True)
        found[dtype] = sharding.clip_grad_norm(policy, 1e30)
    assert found[torch.float32] > 1 and found[torch.float16] == pytest.approx(found[torch.float32], rel=0.01)


def test_a_model_whose_activations_overflow_is_refused_when_it_is_loaded(tiny_model, tmp_path, world):
    """With layers whose outputs are beyond 65,504: the LM head norms them, so float32 has no trouble with it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1e6)
    model.save_pretrained(tmp_path)
    models.load_model(str(tmp_path), world, longest=64)
    with pytest.raises(ValueError, match="are not finite; leave out --dtype float16, whose numbers end at 65,504"):
        models.load_model(str(tmp_path), replace(world, dtype=torch.float16), longest=64)
