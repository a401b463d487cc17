"""Adapters: what they compute and learn, what engines and files get of them, and what is refused."""

import weakref
from dataclasses import replace

import helpers_families as families
import helpers_scripts as h
import launch
import pytest
import torch
from helpers_families import FAMILIES, load_with_adapters, make_them_count
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config
from workers.objectives import largest_error, packed_backward, plain_gradients

import train_grpo
from extras.lora import adapters as lora
from rl.data.types import Sampling
from rl.flags import build
from rl.model import load as models
from rl.model import sharding
from rl.model.logprobs import run_packed, token_logprobs
from rl.run import export
from rl.run.training import check

CASE = ("ppo_clip", "token-mean")
SCALING = 32 / 4


@pytest.fixture(scope="module")
def policy(tiny_model, world):
    return make_them_count(load_with_adapters(tiny_model, world))


def whole(model):
    return {name: x.clone() for name, x in sharding.full_tensors(model)}


def sum_by_hand(parameters):
    """W + B A alpha / r for every layer that has an adapter, and what else is there."""
    result = {name: x for name, x in parameters.items() if "lora" not in name}
    for name, a in parameters.items():
        if ".lora_A." in name:
            b, layer = parameters[name.replace("lora_A", "lora_B")], name.replace(".lora_A", "")
            result[layer] = result[layer] + SCALING * sum(b[:, i, None] * a[None, i] for i in range(len(a)))
    return result


def merged_plain(path, weights):
    """transformers' own model with these weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    model.load_state_dict(weights, strict=False)
    return model


@torch.no_grad()
def logprobs(model, batch):
    return token_logprobs(model, batch, sampling=Sampling(temperature=0.7))[0]


# ---------------------------------------------------------------------------------------------------------------------
# What they compute


def test_a_model_with_new_adapters_is_its_base_and_has_them_in_every_linear_layer_but_the_head(
    tiny_model, batch, world
):
    fresh = load_with_adapters(tiny_model, world)
    base = load_with_adapters(tiny_model, world, lora_rank=0)
    assert torch.equal(logprobs(fresh, batch), logprobs(base, batch))
    names = {name for name, x in fresh.named_modules() if isinstance(x, lora.Adapted)}
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.rpartition(".")[2] for name in names} == set(kinds)
    assert len(names) == len(kinds) * base.config.num_hidden_layers
    learns = {name for name, x in fresh.named_parameters() if x.requires_grad}
    assert learns == {f"{name}.{part}.weight" for name in names for part in ("lora_A", "lora_B")}
    by_name = whole(fresh)
    assert not any(x.any() for name, x in by_name.items() if "lora_B" in name)
    a = [x for name, x in by_name.items() if "lora_A" in name]
    assert len({float(x.flatten()[0]) for x in a}) == len(a)  # no two alike
    assert all(x.abs().max() <= x.shape[1] ** -0.5 and x.abs().mean() > 0.3 * x.shape[1] ** -0.5 for x in a)
    assert not any(x._forward_hooks for x in fresh.modules() if isinstance(x, lora.Adapted))  # those that watched


def test_the_seed_of_the_run_decides_where_adapters_begin():
    first, again, other = (AutoModelForCausalLM.from_config(TINY) for _ in range(3))
    for model, seed in ((first, 3), (again, 3), (other, 4)):
        lora.add(model, lora.LoRA(lora_rank=4), path="", seed=seed)
    for name, x in first.named_parameters():
        if "lora_A" in name:
            assert torch.equal(x, again.get_parameter(name)) and not torch.equal(x, other.get_parameter(name))


@pytest.mark.parametrize("name", h.some([name for name in FAMILIES if name != "a state"], *families.FEW))
def test_every_family_computes_with_its_adapters_what_the_merged_model_computes(name, batch, world, tmp_path):
    """No family reads the weight of a layer without asking the layer."""
    path = families.save(name, tmp_path)
    model = make_them_count(load_with_adapters(path, world))
    base = logprobs(lora.Base(model), batch)
    found = logprobs(model, batch)
    weights = dict(models.weights_for_engine(model, world))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    plain.load_state_dict(weights, strict=False)
    plain.save_pretrained(tmp_path / "merged")
    merged = logprobs(families.load(str(tmp_path / "merged"), world), batch)
    torch.testing.assert_close(found, merged, rtol=0, atol=5e-5)
    assert (found - base).abs().max() > 1e-2


def test_gradients_are_those_of_the_chain_rule(tiny_model, policy, batch):
    """L(W + s B A): dL/dB = s G A', dL/dA = s B' G, where G is the gradient of the merged weight."""
    policy.zero_grad()
    packed_backward(policy, batch, range(8), CASE, max_tokens=60)
    parameters = whole(policy)
    _, of_sum = plain_gradients(merged_plain(tiny_model, sum_by_hand(parameters)), batch, range(8), CASE)
    expected = {}
    for name in parameters:
        g = of_sum.get(name.replace(".lora_A", "").replace(".lora_B", ""))
        if ".lora_A." in name:
            expected[name] = SCALING * parameters[name.replace("lora_A", "lora_B")].T @ g
        elif ".lora_B." in name:
            expected[name] = SCALING * g @ parameters[name.replace("lora_B", "lora_A")].T
    assert largest_error(families.gradients(policy), expected) < 5e-4


@pytest.mark.parametrize(
    "changes", [dict(activation_checkpointing="none"), dict(activation_checkpointing="full")], ids=str
)
def test_memory_flags_do_not_change_log_probs_or_gradients(changes, tiny_model, policy, batch, world):
    other = make_them_count(load_with_adapters(tiny_model, world, **changes))
    assert torch.equal(logprobs(other, batch), logprobs(policy, batch))
    found = []
    for model, max_tokens in ((policy, 1000), (other, 1000), (other, 30)):
        model.zero_grad()
        packed_backward(model, batch, range(8), CASE, max_tokens=max_tokens)
        found.append(families.gradients(model))
    assert all(largest_error(x, found[0]) < 1e-4 for x in found[1:])


def test_switched_off_they_leave_the_base_bit_by_bit_also_after_an_error(tiny_model, policy, batch, world):
    base = load_with_adapters(tiny_model, world, lora_rank=0, frozen=True)
    with_adapters = logprobs(policy, batch)
    assert torch.equal(logprobs(lora.Base(policy), batch), logprobs(base, batch))

    def fail(*_):
        raise KeyError

    with pytest.raises(KeyError):
        run_packed(lora.Base(policy), batch, torch.ones_like(batch.input_ids, dtype=torch.bool), fail)
    assert torch.equal(logprobs(policy, batch), with_adapters)
    assert (with_adapters - logprobs(base, batch)).abs().max() > 0.1
    reference = models.load_reference(tiny_model, world, policy)
    assert isinstance(reference, lora.Base) and torch.equal(logprobs(reference, batch), logprobs(base, batch))
    assert isinstance(models.load_reference(tiny_model, world, base), torch.nn.Module)


@pytest.mark.parametrize("world_size", h.some([1, 2], 2))
def test_ranks_have_the_gradients_and_weights_of_one(tiny_model, policy, batch, tmp_path, world_size):
    torch.save(batch, tmp_path / "batch.pt")
    worker = launch.TESTS / "model" / "workers" / "adapters.py"
    launch.run_file(worker, tiny_model, tmp_path / "batch.pt", tmp_path, nproc=world_size)
    merged, base = sum_by_hand(whole(policy)), logprobs(lora.Base(policy), batch)
    expected = {}
    for rows in (8, 1):
        policy.zero_grad()
        packed_backward(policy, batch, range(rows), CASE, max_tokens=1000)
        expected[rows] = families.gradients(policy)
    for rank in range(world_size):
        for (dtype, _), found in torch.load(tmp_path / f"rank{rank}.pt").items():
            exact = dtype == torch.float32
            assert all(x == (torch.float32 if "lora" in name else dtype) for name, x in found["dtypes"].items())
            assert found["merged"].keys() == merged.keys()
            for name, x in found["merged"].items():
                assert x.dtype == dtype
                torch.testing.assert_close(
                    x.float(), merged[name], rtol=0 if exact else 0.02, atol=2e-6 if exact else 0.02
                )
            for rows in (8, 1):
                assert largest_error(found[rows], expected[rows]) < (5e-4 if exact else 0.3)
            torch.testing.assert_close(found["policy"], logprobs(policy, batch), rtol=0, atol=2e-5 if exact else 0.3)
            torch.testing.assert_close(found["base"], base, rtol=0, atol=2e-5 if exact else 0.3)


def test_layers_whose_weights_are_taken_without_a_call_are_refused(world, tmp_path):
    path = families.save("a state", tmp_path)
    with pytest.raises(ValueError, match="takes the weights of dt_proj without .* such as in_proj out_proj x_proj$"):
        load_with_adapters(path, world)
    others = ("in_proj", "x_proj", "out_proj")
    assert load_with_adapters(path, world, target_modules=others).packed.families[-1].targets == others


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_no_layer_is_whole_on_the_device_while_a_model_is_sharded(lora_rank, tiny_model, world, monkeypatch):
    """Or a model that fits a GPU in shards only would not get there. The host lets go of each weight that was read."""
    model, whole, alive, devices = models.load_pretrained(tiny_model, world), [], [], set()
    if lora_rank:
        lora.add(model, lora.LoRA(lora_rank=lora_rank), path=tiny_model, seed=0)
    learning = sum(x.requires_grad for x in model.parameters())

    def swapped(x, other, swap=torch.utils.swap_tensors):
        swap(x, other)
        if x.device.type == "meta":
            whole.append(weakref.ref(other))
        else:
            alive.append(sum(x() is not None for x in whole))

    def watched(module, shard=sharding.fsdp.fully_shard, **options):
        devices.update(x.device.type for x in module.parameters() if x.requires_grad)
        shard(module, **options)

    monkeypatch.setattr(torch.utils, "swap_tensors", swapped)
    monkeypatch.setattr(sharding.fsdp, "fully_shard", watched)
    sharding.shard(model, world)
    assert devices == {"meta"} and learning >= 26
    assert len(whole) == learning and alive == [*range(learning)][::-1]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_save_holds_one_whole_weight_at_a_time_on_the_device_of_every_rank(rank, policy, world, monkeypatch):
    given, most = [], []

    def counted(model, dtype):
        for name, x in sharding.full_tensors(model, dtype):
            whole = x.clone()
            given.append(weakref.ref(whole))
            yield name, whole
            del whole
            most.append(sum(x() is not None for x in given))

    monkeypatch.setattr(export, "full_tensors", counted)
    found = export.frozen_weights(policy, replace(world, rank=rank))
    assert len(found) == (0 if rank else sum(not x.requires_grad for x in policy.parameters()))
    assert len(most) > 40 and max(most) == 1


# ---------------------------------------------------------------------------------------------------------------------
# What engines and files get


def test_merged_weights_are_the_sum_by_hand(policy, world):
    expected = sum_by_hand(whole(policy))
    found = dict(models.weights_for_engine(policy, world))
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=2e-6)
    assert sum(not torch.equal(x, whole(policy)[name]) for name, x in found.items()) == 14


def test_the_sum_is_taken_in_float32_before_it_is_rounded():
    """1 + 0.003 + 0.003: in bfloat16, whose next number after 1 is 1.0078, each step alone would be lost."""
    layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model = torch.nn.Sequential(lora.Adapted(layer, 2, 1.0, torch.Generator()))
    parts = {"0.weight": torch.ones(1, 1).bfloat16(), "0.lora_A.weight": torch.full((2, 1), 0.003)}
    [(name, x)] = lora.merged(model, [*parts.items(), ("0.lora_B.weight", torch.ones(1, 2))])
    assert (name, x.dtype, x.item()) == ("0.weight", torch.bfloat16, 1.0078125)
    # -1 and 1 + 2 ** -9, which bfloat16 would make 1
    parts = [("0.weight", -parts["0.weight"]), ("0.lora_A.weight", torch.tensor([[1 + 2**-9], [0.0]]))]
    [(_, x)] = lora.merged(model, [*parts, ("0.lora_B.weight", torch.ones(1, 2))])
    assert x.item() == 2**-9


def test_rounding_by_hand():
    """bfloat16 has the upper 16 of float32's 32 bits: what is below 1/2 + i * 0.618... of their last one is cut."""
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    expected = []
    for i, bits in enumerate(x.flatten().view(torch.int32).tolist()):
        below, rest = divmod(bits & 0x7FFFFFFF, 2**16)
        fraction = (2**15 + (i * 2654435769 % 2**32) // 2**16) % 2**16
        expected.append((below + (rest + fraction >= 2**16)) * (-1 if bits < 0 else 1))
    found = lora.rounded(x)
    bits = found.abs().view(torch.int16).to(torch.int64) * x.sign().to(torch.int64)
    assert found.dtype == torch.bfloat16 and bits.flatten().tolist() == expected
    assert torch.equal(lora.rounded(x.bfloat16().float()), x.bfloat16())  # nothing to round
    for nan in (0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001):  # the first is CUDA's; bits that carry into the sign
        assert lora.rounded(torch.full((8,), nan, dtype=torch.int32).view(torch.float32)).isnan().all()
    ends = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0] * 4)
    assert torch.equal(lora.rounded(ends).view(torch.int16), ends.bfloat16().view(torch.int16))
    assert torch.equal(lora.rounded(x.t()), lora.rounded(x.t().contiguous()))
    nearest = x.bfloat16()
    assert 0.2 < (found != nearest).float().mean() < 0.3  # a quarter goes the other way: the mean of min(p, 1 - p)
    assert (found.float() - x).mean().abs() < 2e-5


@pytest.mark.parametrize("sign", [1, -1])
def test_changes_too_small_for_bfloat16_reach_the_engine_on_average(sign):
    """1 + 0.001 * (1 + j / 8) in 512 rows; the next number after 1 is 1.0078, that below 0.9961."""
    model = torch.nn.Sequential(lora.Adapted(torch.nn.Linear(8, 512, bias=False), 1, 1.0, torch.Generator()))
    a = 0.001 * (1 + torch.arange(8.0) / 8)[None] * sign
    parts = {"lora_A": a, "lora_B": torch.ones(512, 1), "weight": torch.ones(512, 8).bfloat16()}
    parts = {"0.weight" if name == "weight" else f"0.{name}.weight": x for name, x in parts.items()}
    [(_, x)] = lora.merged(model, parts.items())
    above, below = (1.0078125, 1.0) if sign > 0 else (1.0, 0.99609375)
    assert set(x.float().unique().tolist()) == {above, below}
    torch.testing.assert_close(x.float().mean(0), 1 + a[0], rtol=0, atol=1e-4)
    assert torch.equal((1 + a).bfloat16().float(), torch.ones(1, 8))  # rounded to the nearest, all would be lost


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_what_an_adapter_adds_is_not_lost_in_the_rounding_of_a_layers_own_product(bias):
    """Outputs around 1.5, where bfloat16 goes in steps of 0.0078, and an adapter that adds 0.001."""
    g = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 4096, bias=bias)
    linear.weight.copy_(1.5 / 64 + 0.01 * torch.randn(4096, 64, generator=g))
    layer = lora.Adapted(linear, 1, 2.0, g).bfloat16()
    layer.lora_A.weight.fill_(1 / 64)
    layer.lora_B.weight.fill_(0.0005)
    x = torch.ones(3, 64).bfloat16()
    y = layer(x).float()
    layer.is_on = False
    base = layer(x).float()
    layer.lora_B.weight.fill_(torch.inf)
    assert torch.equal(layer(x).float(), base)  # which the adapter has no part in
    assert (y - base).mean().item() == pytest.approx(0.001, rel=0.1)
    assert (y != base).float().mean() < 0.5
    assert torch.equal((base + 0.001).bfloat16().float()[base > 0.6], base[base > 0.6])  # added after it, all is lost


@pytest.mark.parametrize("lost", ["all", "half", "one"])
def test_weights_that_come_without_their_adapters_are_an_error(policy, world, lost):
    named = list(sharding.full_tensors(policy))
    adapters = [name for name, _ in named if lora.is_adapter(name)]
    gone = {"all": adapters, "half": adapters[: len(adapters) // 2], "one": adapters[-1:]}[lost]
    layers = {"all": 14, "half": 7, "one": 1}[lost]
    kept = [(name, x) for name, x in named if name not in gone]
    with pytest.raises(RuntimeError, match=f"{layers} weights came without their adapters"):
        dict(models.exported(policy, kept))


# ---------------------------------------------------------------------------------------------------------------------
# What the base was, and what is refused


def test_the_hash_of_a_base_is_of_names_and_values(tiny_model, world):
    model = models.load_pretrained(tiny_model, world).bfloat16()
    first = lora.hash_of(model)
    assert lora.hash_of(model.float()) == first  # the same values in more bits
    with torch.no_grad():
        model.model.norm.weight[3] += 2**-7
    changed = lora.hash_of(model)
    with torch.no_grad():
        model.model.norm.weight[3] -= 2**-7
    assert changed != first == lora.hash_of(model)
    layer = torch.nn.Linear(2, 2)
    names = [torch.nn.ModuleDict({name: layer}) for name in "aab"]
    assert len({lora.hash_of(x) for x in names}) == 2


TINY = Qwen2Config(**families.SIZES)


def layers(targets, config=TINY):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return lora.layers_of(model, targets)


def test_targets_are_ends_of_names():
    every = layers(["all-linear"])
    assert len(every) == 14 and "lm_head" not in every
    assert layers(["q_proj", "v_proj"]) == [x for x in every if x.endswith(("q_proj", "v_proj"))]
    assert set(layers(["0.mlp.up_proj", "1.self_attn.k_proj"])) == {
        "model.layers.0.mlp.up_proj",
        "model.layers.1.self_attn.k_proj",
    }


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_prj"], "--target-modules q_prj: no linear layer .* down_proj gate_proj k_proj o_proj"),
        (["q_proj", "proj"], "--target-modules proj: no linear layer"),
        (["lm_head"], "--target-modules lm_head: no linear layer of --model, apart from its head"),
        (["embed_tokens"], "--target-modules embed_tokens: no linear layer"),
        (["all-linear", "q_proj"], "--target-modules all-linear: .* give all-linear alone"),
        ([], "--target-modules names no layer; give all-linear, or some of down_proj"),
    ],
    ids=str,
)
def test_targets_that_mean_no_layer_are_refused(targets, words):
    with pytest.raises(ValueError, match=words):
        layers(targets)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="--lora-rank: --model, a GPT2LMHeadModel, has no linear layers"):
        layers(["all-linear"], GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=80))


def test_bad_flags_are_refused_before_weights_are_read(world, tmp_path):
    TINY.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"--target-modules no: no linear layer of --model {tmp_path}"):
        load_with_adapters(str(tmp_path), world, target_modules=("no",))  # there are no weights
    for changes, words in (
        (dict(lora_alpha=16), "--lora-alpha 16 has no effect without --lora-rank"),
        (dict(target_modules=("q_proj",)), r"--target-modules \('q_proj',\) has no effect without"),
    ):
        with pytest.raises(ValueError, match=words):
            check(build(train_grpo.Args, lora_rank=0, **changes))
    for changes, words in (
        (dict(lora_rank=-1), "--lora-rank -1 must be at least 0"),
        (dict(lora_alpha=0), "--lora-alpha 0 must be"),
    ):
        with pytest.raises(ValueError, match=words):
            check(build(train_grpo.Args, **changes))
