"""Models with recurrent layers: borders for their kernels, and Qwen3.5, whose text is a part of a larger model."""

import inspect
import json
import sys
from pathlib import Path

import helpers_families as families
import helpers_scripts as h
import launch
import pytest
import torch
from helpers_families import BORDERS
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import l2norm
from workers.objectives import largest_error, make_batch, packed_backward, plain_gradients

import sft
import train_grpo
import train_reward
from extras.engines import hf
from extras.families import delta_rule, recurrent
from extras.families.ways import family
from extras.judges.scalar_models import ScalarModel
from rl.flags import build
from rl.model import load as models

CASE = ("all terms", "token-mean")


@pytest.mark.parametrize("name", ["delta nets", "delta nets and experts", "delta nets of OLMo"])
def test_kernels_that_know_borders_get_them(name, world, monkeypatch, tmp_path, capsys):
    """flash-linear-attention's run on GPUs only. In its place stands torch's, one sequence after the other."""
    folder = families.save(name, tmp_path)
    batch = make_batch(families.plain(folder).double())
    model = families.load(folder, world)
    space = sys.modules[type(family(model, "recurrent").mixers[0]).__module__]
    own, calls = space.torch_chunk_gated_delta_rule.__wrapped__, []

    def kernel(*states, borders):
        calls.append(len(borders) - 1)
        parts = zip(*(x.split(borders.diff().tolist(), 1) for x in states), strict=True)
        return torch.cat([own(q, k, v, g=g, beta=beta)[0] for q, k, v, g, beta in parts], 1)

    for name in ("causal_conv1d_fn", recurrent.DELTA_RULE):
        monkeypatch.setattr(space, name, getattr(space, name))  # put back in the end
    monkeypatch.setattr(delta_rule, "kernel", kernel)
    monkeypatch.setattr(recurrent, "_has_kernels", lambda package, device: package == "fla")
    assert "trying out the kernels" not in capsys.readouterr().out  # none were there when the model was loaded
    assert models.choose_forward(model, world, longest=64) == BORDERS
    assert "trying out the kernels of the recurrent layers" in capsys.readouterr().out
    calls.clear()
    single = families.in_float32(batch)
    _, expected = plain_gradients(families.plain(folder), single, range(8), CASE)
    packed_backward(model, single, range(8), CASE, max_tokens=1000)
    assert set(calls) == {8} and len(calls) == 2 and largest_error(families.gradients(model), expected) < 5e-4


@pytest.mark.parametrize("name", ["Mamba-2 of Granite", "Mamba-2 beside attention"])
def test_a_scan_that_knows_borders_gets_them(name, world, monkeypatch, tmp_path):
    """mamba-ssm's runs on GPUs only. In its place stands torch's, one sequence after the other."""
    folder = families.save(name, tmp_path)
    batch = make_batch(families.plain(folder).double())
    model = families.load(folder, world)
    space = sys.modules[type(family(model, "recurrent").mixers[0]).__module__]
    own, calls = inspect.unwrap(space.mamba2_chunk_scan), []

    def scan(hidden, dt, A, B, C, *, seq_idx=None, **options):
        if seq_idx is None:
            return own(hidden, dt, A, B, C, **options)
        counts = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        calls.append(len(counts))
        parts = zip(*(x.split(counts, 1) for x in (hidden, dt, B, C)), strict=True)
        return torch.cat([own(x, step, A, b, c, **options) for x, step, b, c in parts], 1)

    for function in ("causal_conv1d_fn", "mamba2_chunk_scan"):
        monkeypatch.setattr(space, function, getattr(space, function))  # put back in the end
    monkeypatch.setattr(space, "mamba2_chunk_scan", scan)
    monkeypatch.setattr(recurrent, "_has_kernels", lambda package, device: package == "mamba_ssm")
    way = {families.ROWS: BORDERS, families.ROWS_OWN_HEAD: families.BORDERS_OWN_HEAD}[families.FAMILIES[name][2]]
    assert models.choose_forward(model, world, longest=64) == way
    calls.clear()
    single = families.in_float32(batch)
    _, expected = plain_gradients(families.plain(folder), single, range(8), CASE)
    packed_backward(model, single, range(8), CASE, max_tokens=1000)
    assert set(calls) == {8} and largest_error(families.gradients(model), expected) < 5e-4


def test_layers_of_a_kind_are_compiled_once():
    """torch.compile gives up after 64 graphs of one function, by default 8, so each layer must not be code of its own.
    A delta rule in plain torch is not compiled: its loops would be unrolled anew for every length.
    """
    output = launch.run_file(launch.TESTS / "model" / "workers" / "compiled_kinds.py")
    assert launch.objects(output, "kinds") == [{"kinds": 12}]  # checkpointed layers are one function, of any kind
    operation, plain = launch.objects(output, "difference")
    assert (operation["rule"], plain["rule"]) == ("operation", "plain")
    assert operation["graphs"][:4] == [0, 0, 0, 3]  # one for each kind of layer, and one for the head
    assert plain["graphs"][:3] == [0, 0, 0] and 0 < plain["graphs"][3] < 11  # layers
    assert operation["convolutions"] == 0  # inductor would compile torch's own for each length again
    for found in (operation, plain):
        assert found["graphs"][4] == found["graphs"][5]  # nothing is compiled for one more length
        assert found["difference"] < 1e-5 < found["largest"]


@pytest.mark.parametrize("problem", ["refused", "a wrong gradient"])
def test_kernels_without_a_right_gradient_are_not_used(problem, world, monkeypatch, tmp_path):
    """As flash-linear-attention's on Hopper GPUs with some versions of Triton."""
    folder = families.save("delta nets", tmp_path)
    model = families.load(folder, world)
    space = sys.modules[type(family(model, "recurrent").mixers[0]).__module__]
    own = inspect.unwrap(space.torch_chunk_gated_delta_rule)

    def kernel(q, k, v, g, beta, *, borders):
        if problem == "refused" and q.requires_grad:
            raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")
        parts = zip(*(x.split(borders.diff().tolist(), 1) for x in (q, k.detach(), v, g, beta)), strict=True)
        outs = [own(*x[:3], g=x[3], beta=x[4])[0] for x in parts]
        return torch.cat(outs, 1) + 0 * k.sum()

    monkeypatch.setattr(space, recurrent.DELTA_RULE, space.torch_chunk_gated_delta_rule)  # put back in the end
    monkeypatch.setattr(delta_rule, "kernel", kernel)
    monkeypatch.setattr(recurrent, "_has_kernels", lambda package, device: package == "fla")
    delta_rule.what_is_wrong.cache_clear()
    assert models.choose_forward(model, world, longest=64) == families.ROWS
    said = {"refused": "RuntimeError: Triton >= 3.4.0", "a wrong gradient": "outputs or gradients differ by 100%"}
    assert recurrent.know_borders(family(model, "recurrent").mixers, world.device).startswith(said[problem])
    delta_rule.what_is_wrong.cache_clear()
    rule, states = space.torch_chunk_gated_delta_rule, torch.rand(5, 1, 9, 4, 8).unbind()
    given = dict(g=-states[3][..., 0], beta=states[4][..., 0], use_qk_l2norm_in_kernel=True)
    assert torch.equal(rule(*states[:3], **given, seq_idx=None)[0], own(*states[:3], **given)[0])  # without kernels
    monkeypatch.setattr(delta_rule, "what_is_wrong", lambda *args: "")  # of a second model, of other sizes
    assert recurrent.know_borders(family(model, "recurrent").mixers, world.device).startswith(said[problem])
    assert space.torch_chunk_gated_delta_rule.problem.startswith(said[problem])


def test_kernels_of_one_model_that_are_wrong_for_another(world, monkeypatch, tmp_path):
    """The rule stands in the module of their class, so one model cannot have it and the other one not."""
    mixers = family(families.load(families.save("delta nets", tmp_path), world), "recurrent").mixers
    space = sys.modules[type(mixers[0]).__module__]
    monkeypatch.setattr(space, recurrent.DELTA_RULE, space.torch_chunk_gated_delta_rule)  # put back in the end
    monkeypatch.setattr(recurrent, "_has_kernels", lambda package, device: True)
    monkeypatch.setattr(delta_rule, "what_is_wrong", lambda *args: "")
    assert recurrent.know_borders(mixers, world.device) == ""
    monkeypatch.setattr(delta_rule, "what_is_wrong", lambda *args: "gradients differ by 50%")
    with pytest.raises(ValueError, match="right for one model and wrong for another: gradients differ by 50%"):
        recurrent.know_borders(mixers, world.device)


def test_unit_vectors():
    """[3, 4] has length 5; a vector of zeros stays one; of a small one 1e-6 counts: 1e-3 / sqrt(1e-6 + 1e-6)."""
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], dtype=torch.float64, requires_grad=True)
    expected = [[0.6, 0.8], [0.0, 0.0], [2**-0.5, 0.0]]
    torch.testing.assert_close(delta_rule.unit(x), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=3e-8)
    x = torch.randn(2, 5, 3, 128, dtype=torch.float64, requires_grad=True)  # as transformers does
    found = torch.autograd.grad((delta_rule.unit(x) ** 3).sum(), x)[0]
    torch.testing.assert_close(found, torch.autograd.grad((l2norm(x) ** 3).sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[7, 2, 1, 5], [3], [1]], ids=str)
def test_the_convolution_of_a_packed_row_is_that_of_each_sequence(dtype, lengths):
    """In float64 to the last digits, also where a sequence is shorter than the kernel."""
    random = torch.Generator().manual_seed(0)

    def own(x, weight, bias=None, activation=None):
        out = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])
        return torch.nn.functional.silu(out[..., : x.shape[-1]])

    x, weight, bias = (torch.randn(*n, generator=random).to(dtype) for n in ((1, 6, sum(lengths)), (6, 4), (6,)))
    row = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    found = recurrent._knowing_borders(own)(x, weight, bias, activation="silu", seq_idx=row)
    expected = torch.cat([own(part, weight, bias) for part in x.split(lengths, -1)], -1)
    assert found.dtype == dtype
    assert (found - expected).abs().max() < {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.03}[dtype]


# ---------------------------------------------------------------------------------------------------------------------
# A published folder of Qwen3.5


def save_qwen3_5(folder, config_class=Qwen3_5Config, **text):
    """A tiny model as Qwen publishes them: text and a vision tower, and weights for guessing several tokens ahead."""
    sizes = families.SIZES | families.DELTA | text
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0, mrope_section=[2, 1, 1])
    tower = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    tower["num_position_embeddings"] = 16
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = dict(zip(names, range(sizes["vocab_size"] - 4, sizes["vocab_size"]), strict=True))
    config = config_class(text_config=sizes | dict(rope_parameters=rope), vision_config=tower, **special)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn(x.shape))
    model.save_pretrained(folder)
    return model.eval()


def test_the_text_of_a_model_with_a_vision_tower_is_trained_and_its_export_is_whole(tmp_path, world, runs_here):
    task = h.make_task(tmp_path)
    folder = Path(task.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    whole = save_qwen3_5(folder, vocab_size=vocabulary)
    before = load_file(folder / "model.safetensors")
    policy = families.load(task.model, world)
    assert families.way_of(policy) == families.ROWS

    pushed = dict(models.weights_for_engine(policy, world))
    assert pushed.keys() == {name for name in before if ".visual." not in name}
    engine = hf.Engine(task.model, world, longest=64)
    engine.update_weights((name, 1.5 * x) for name, x in pushed.items())
    assert all(torch.equal(x, 1.5 * policy.get_parameter(n).full_tensor()) for n, x in engine.model.named_parameters())

    settings = h.sft_settings(task, tmp_path / "run", total_training_steps=1)
    sft.main(build(sft.Args, **settings))
    export = tmp_path / "run" / "global_step_1" / "huggingface"
    after = load_file(export / "model.safetensors")
    assert after.keys() == before.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if ".visual." in name}
    config, ours = (json.loads((x / "config.json").read_text()) for x in (folder, export))
    assert config.pop("text_config").items() <= ours.pop("text_config").items() and config.items() <= ours.items()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    found = []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        model, info = kind.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        found.append(model.eval()(input_ids=ids).logits)
    assert torch.equal(*found) and not torch.allclose(found[0], whole(input_ids=ids).logits, atol=1e-3)

    settings = h.grpo_settings(task, tmp_path / "grpo", model=str(export), total_training_steps=1)
    metrics = train_grpo.main(build(train_grpo.Args, **settings))
    assert metrics["rollout/logprob_gap_mean"] < 1e-5
    assert load_file(tmp_path / "grpo" / "global_step_1" / "huggingface" / "model.safetensors").keys() == before.keys()


def test_an_export_has_no_old_experts(tmp_path, world, runs_here):
    """Qwen3.5's experts are published as one tensor a layer; transformers writes them one by one."""
    task = h.make_task(tmp_path)
    folder = Path(task.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    sizes = families.EXPERTS | dict(shared_expert_intermediate_size=9, vocab_size=vocabulary)
    whole = save_qwen3_5(folder, Qwen3_5MoeConfig, **sizes)
    published = whole.state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in published)
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})
    sft.main(build(sft.Args, **h.sft_settings(task, tmp_path / "run", total_training_steps=1)))
    export = tmp_path / "run" / "global_step_1" / "huggingface"
    after = load_file(export / "model.safetensors")
    kept = {name for name in after.keys() & published.keys() if torch.equal(after[name], published[name])}
    assert kept == {name for name in published if ".visual." in name}
    ids, found = torch.tensor([[5, 6, 7, 8, 9, 10]]), []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        model, info = kind.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        found.append(model.eval()(input_ids=ids).logits)
    assert torch.equal(*found) and not torch.allclose(found[0], whole(input_ids=ids).logits, atol=1e-3)


def test_a_reward_model_of_it_is_exported_as_one(tmp_path, world, runs_here):
    task = h.make_task(tmp_path)
    save_qwen3_5(Path(task.model), vocab_size=json.loads((Path(task.model) / "config.json").read_text())["vocab_size"])
    train_reward.main(
        build(train_reward.Args, **h.reward_settings(task, tmp_path / "run", total_training_steps=1, lora_rank=4))
    )
    export = tmp_path / "run" / "global_step_1" / "huggingface"
    ScalarModel().check(AutoConfig.from_pretrained(export), "--reward-model")
    model, info = AutoModelForSequenceClassification.from_pretrained(export, num_labels=1, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.score.weight.any()
