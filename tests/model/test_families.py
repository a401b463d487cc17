"""Whatever a model is made of, it is trained on the log-probs of its own forward, packed if that is right."""

import json
import re
import shutil
from dataclasses import replace

import helpers_families as families
import helpers_scripts as h
import launch
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from helpers_families import BORDERS_OWN_HEAD, FAMILIES, OWN_HEAD, PACKED, PADDED
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
)
from workers.objectives import largest_error, make_batch, packed_backward, plain_gradients, plain_logprobs

import sft
from extras import judges
from extras.demonstrations import load_demonstrations
from extras.engines import hf
from extras.judges import critic, scalar_models
from extras.lora import LoRA
from rl.data.template import load_tokenizer
from rl.data.types import Sampling
from rl.flags import build
from rl.model import load as models
from rl.model.attention import packed_sdpa
from rl.model.checks import check_context, check_trainable
from rl.model.logprobs import token_logprobs
from rl.model.self_test import random_batch
from rl.model.sharding import Memory, shard

CASE = ("all terms", "token-mean")
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Name of a family -> folder of its model."""
    root = tmp_path_factory.mktemp("families")
    return families.Made(lambda name: families.save(name, root / name.replace(" ", "_")))


@pytest.fixture(scope="module")
def batch(tiny_model):
    return make_batch(families.plain(tiny_model).double())


def close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers as one sequence at a time


@pytest.mark.parametrize("name", h.some(FAMILIES, *families.FEW))
def test_every_family_gets_the_log_probs_and_gradients_of_its_own_forward(name, folder_of, batch, world, capsys):
    plain, model = families.plain(folder_of[name]), families.load(folder_of[name], world)
    way = FAMILIES[name][2]
    assert families.way_of(model) == way and (model in world.not_sharing) == (way not in (PACKED, OWN_HEAD))
    line = "".join(x for x in capsys.readouterr().out.splitlines() if not x.startswith("start | "))
    assert line.startswith(f"--model: {model.config.model_type} runs padded") if way == PADDED else line == ""
    rows = [plain_logprobs(plain, ids[:n].tolist()) for ids, n in zip(batch.input_ids, batch.lengths, strict=True)]
    expected = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in zip(*rows, strict=True)]
    results = token_logprobs(model, batch, sampling=Sampling(temperature=TEMPERATURE))
    for x, y in zip(results, expected, strict=True):
        close(x, y * batch.response_mask)
    for x, y in zip(token_logprobs(model, batch, sampling=Sampling(temperature=TEMPERATURE)), results, strict=True):
        assert torch.equal(x, y)  # nothing is drawn
    single = families.in_float32(batch)
    _, expected = plain_gradients(plain, single, range(8), CASE)
    for max_tokens in (1000, 30):
        model.zero_grad()
        packed_backward(model, single, range(8), CASE, max_tokens=max_tokens)
        assert largest_error(families.gradients(model), expected) < 5e-4


@pytest.mark.parametrize("name", h.some(FAMILIES, *families.FEW))
def test_every_family_runs_the_same_way_in_bfloat16(name, folder_of, world):
    """Rounding must not hide what is wrong, nor be taken for it."""
    model = families.load(folder_of[name], replace(world, dtype=torch.bfloat16))
    assert families.way_of(model) == FAMILIES[name][2]


def test_every_rank_reads_the_same_types_of_numbers(world, tmp_path):
    """Also of what a model in half precision keeps in float32, such as the bias of a router."""
    sizes = families.SIZES | families.EXPERTS | dict(n_routed_experts=6, moe_shared_expert_intermediate_size=24)
    config = transformers.NemotronHConfig(**sizes, layers_block_type=["attention", "moe"], n_group=1, topk_group=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = []
    for ranks in (world, replace(world, rank=1)):
        model = models.load_pretrained(str(tmp_path), ranks, dtype=torch.bfloat16, shards=2)
        found.append({k: (x.shape, x.dtype) for k, x in [*model.named_parameters(), *model.named_buffers()]})
    assert found[0] == found[1]
    in_float32 = {k for k, x in found[0].items() if x[1] == torch.float32 and "inv_freq" not in k}
    gate = "model.layers.1.mixer.gate"  # some versions of transformers keep its weight in float32 as well
    assert {f"{gate}.e_score_correction_bias"} == in_float32 - {f"{gate}.weight"}


TWO_RANKS = ("scaled logits", "capped scores", "delta nets", "experts")


@pytest.mark.parametrize("world_size", h.some([1, 2], 2))
def test_gradients_of_padded_models_and_experts_do_not_depend_on_the_world_size(folder_of, batch, tmp_path, world_size):
    torch.save(batch, tmp_path / "batch.pt")
    worker = launch.TESTS / "model" / "workers" / "families.py"
    named = [f"{name}={folder_of[name]}" for name in TWO_RANKS]
    launch.run_file(worker, tmp_path / "batch.pt", tmp_path, *named, nproc=world_size)
    for rank in range(world_size):
        for name, (is_padded, found) in torch.load(tmp_path / f"rank{rank}.pt").items():
            plain = families.plain(folder_of[name]).double()
            _, expected = plain_gradients(plain, batch, range(8), ("ppo_clip", "token-mean"))
            assert is_padded == (FAMILIES[name][2] == PADDED)
            assert largest_error(found, expected) < 5e-4


@pytest.fixture
def judge(folder_of, tmp_path):
    """A model with a scalar head whose attention scores are capped, so that it runs padded."""
    options = dict(num_labels=1, dtype=torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(folder_of["capped scores"], **options)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(2))
    model.save_pretrained(tmp_path)
    return str(tmp_path)


def test_critics_and_reward_models_run_padded_too(judge, batch, world, capsys):
    memory = Memory(activation_checkpointing="none", compile=False)
    model = judges.load_critic(judge, world, LoRA(), memory, longest=50, seed=0)
    assert model.packed.layout is not None and "--critic-model: gemma2 runs padded" in capsys.readouterr().out
    plain = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    plain.config.pad_token_id = None  # so that it scores the last token

    def score(row, n):
        return plain(input_ids=batch.input_ids[row : row + 1, :n]).logits[0, 0].detach()

    ends = batch.lengths.tolist()
    close(scalar_models.sequence_scores(model, batch).detach(), torch.stack([score(i, n) for i, n in enumerate(ends)]))
    values = critic.token_values(model, batch).detach()
    for row, position in ((0, 5), (0, 13), (7, 2), (3, 17)):
        close(values[row, position], score(row, position))


# ---------------------------------------------------------------------------------------------------------------------
# How the way is found


def test_a_window_counts_only_if_a_run_has_longer_sequences(world, tmp_path):
    """Its test sequence is longer than the window, else a model that forgets it would pass."""
    config = LlamaConfig(**families.SIZES, sliding_window=40)
    config.text_window = 300
    assert random_batch(config, 64, torch.device("cpu")).lengths.tolist() == [9, 24, 3, 40, 40, 64]
    assert random_batch(config, 512, torch.device("cpu")).lengths.tolist() == [9, 24, 3, 40, 40, 324]
    assert random_batch(config, 12, torch.device("cpu")).lengths.tolist() == [9, 12, 3, 12, 12, 12]


def test_a_model_that_is_wrong_packed_and_padded_is_refused(tiny_model, world):
    """Here every hidden state depends on how many tokens are computed at once."""
    model = shard(models.load_pretrained(tiny_model, world), world)

    def shift(module, arguments, output):
        return output + 0.01 * output[..., 0].numel()

    model.base_model.embed_tokens.register_forward_hook(shift)
    with pytest.raises(ValueError, match=r"--critic-model: qwen2 gives other numbers.*packed \(its log-probs.*padded"):
        models.choose_forward(model, world, longest=64, flag="--critic-model")


@pytest.mark.parametrize("also_capped", [False, True])
def test_a_build_of_flash_attn_that_gives_wrong_numbers_is_not_used(tiny_model, world, capsys, also_capped):
    """One with kernels for bfloat16 alone reads the bits of float16 as such. Here the kernel halves what it gives.

    A model that is wrong with torch's own attention too keeps flash-attn, and runs padded.
    """

    def wrong_kernel(*arguments, **options):
        out, _ = packed_sdpa(*arguments, **options)
        return out / 2, None

    model = shard(models.load_pretrained(tiny_model, world), world)
    AttentionInterface.register("packed_fa2", wrong_kernel)
    model.packed = replace(model.packed, attention="packed_fa2")
    if also_capped:
        model.base_model.layers[0].self_attn.register_forward_pre_hook(
            lambda module, arguments, options: (arguments, options | {"softcap": 50.0}), with_kwargs=True
        )
    way = models.choose_forward(model, world, longest=64)
    said, used = capsys.readouterr().out, model.packed.attention
    if also_capped:
        assert way == PADDED and used == "packed_fa2" and "flash-attn" not in said
    else:
        assert way == PACKED and used == model.config._attn_implementation == "packed_sdpa"
        assert "in the place of flash-attn, with which its log-probs would differ by" in said
        assert "kernels for float32?" in said


def test_a_failure_of_the_first_call_alone_changes_nothing(tiny_model, world, capsys):
    """torch fails once if it finds another cuDNN than its own."""
    failures = iter([RuntimeError("cuDNN version incompatibility")])

    def fails_once(*arguments, **options):
        for failure in failures:
            raise failure
        return packed_sdpa(*arguments, **options)

    model = shard(models.load_pretrained(tiny_model, world), world)
    AttentionInterface.register("packed_fails_once", fails_once)
    model.packed = replace(model.packed, attention="packed_fails_once")
    assert models.choose_forward(model, world, longest=64) == PACKED
    said = capsys.readouterr().out
    assert said.endswith("--model: qwen2 failed once, and not again: RuntimeError: cuDNN version incompatibility\n")


@pytest.mark.parametrize("name", ["qwen2", "convolutions"])
@pytest.mark.parametrize("is_error", [True, False])
def test_a_run_says_that_the_fastest_way_fails(name, is_error, tiny_model, folder_of, world, capsys):
    """An error says that something is broken, and numbers that are none do too."""

    def broken(source, hidden, targets, *way):
        if is_error:
            raise RuntimeError("no kernel image")
        return (torch.full(hidden.shape[:1], torch.nan),) * 2

    model = shard(models.load_pretrained(tiny_model if name == "qwen2" else folder_of[name], world), world)
    model.packed = replace(model.packed, head_chunk=broken)
    way = models.choose_forward(model, world, longest=64)
    assert way == (OWN_HEAD if name == "qwen2" else BORDERS_OWN_HEAD)
    why = "RuntimeError: no kernel image" if is_error else "its log-probs would differ by inf"
    plain = way.removesuffix(", with the logits of its own forward")
    assert f"runs {way}, which takes more time, since {plain} it failed: {why}\n" in capsys.readouterr().out


def test_files_that_contradict_a_tie_of_the_config_are_refused(tiny_model, world, tmp_path):
    """transformers would leave the weights untied, although the config says that they are one."""
    shutil.copytree(tiny_model, folder := tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] and "lm_head.weight" not in weights
    for more, is_right in ((0.0, True), (0.1, False)):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + more
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        if is_right:
            models.load_pretrained(str(folder), world)
            continue
        with pytest.raises(ValueError, match=r"config ties lm_head\.weight to another .* set tie_word_embed"):
            models.load_pretrained(str(folder), world)


def test_layers_get_angles_in_the_precision_that_the_model_gives_them(world, tmp_path):
    """OLMo turns positions in float32 whatever the compute precision; FSDP2 would round the angles for its units."""
    ranks, seen = replace(world, dtype=torch.bfloat16), set()
    model = families.load(families.save("delta nets of OLMo", tmp_path), ranks)
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, given: seen.update(
                    (given["hidden_states"].dtype, x.dtype) for x in given["position_embeddings"]
                ),
                with_kwargs=True,
            )
    token_logprobs(model, make_batch(families.plain(model.name_or_path)))
    assert seen == {(torch.bfloat16, torch.float32)}


def test_weights_keep_the_precision_of_their_files_until_they_are_sharded(tiny_model, world, tmp_path):
    """Or a rank would hold its share twice, once more on the host. The numbers are the same bit by bit."""
    shutil.copytree(tiny_model, folder := tmp_path / "model")
    weights = {name: x.bfloat16() for name, x in load_file(folder / "model.safetensors").items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].float() * 1.001  # which no bfloat16 is
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    read = dict(models.load_pretrained(str(folder), world, dtype=None).named_parameters())
    assert {name: x.dtype for name, x in read.items()} == {name: x.dtype for name, x in weights.items()}
    policy = dict(models.load_model(str(folder), world, longest=64).named_parameters())
    assert policy.keys() == weights.keys()
    for name, x in policy.items():
        assert x.dtype == torch.float32 and torch.equal(x.full_tensor(), weights[name].float()), name
    frozen = models.load_model(str(folder), replace(world, dtype=torch.bfloat16), longest=64, learning=None)
    assert {x.dtype for x in frozen.parameters()} == {torch.bfloat16}
    assert not any(x.requires_grad for x in frozen.parameters())


def test_the_lines_of_a_start_call_a_reference_by_its_role(tiny_model, world, capsys):
    policy = models.load_model(tiny_model, world, longest=64)
    models.load_reference(tiny_model, world, policy, longest=64)
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("start | ")]
    phases = [re.match(r"start \| (.*?) [\d.]+ s \|", x)[1] for x in lines]
    both = ("--model", "the reference")
    assert phases == [f"{name} {phase}" for name in both for phase in ("read", "on the device", "tested")]


def test_the_test_draws_from_no_generator_that_a_run_uses(tiny_model, world):
    model = shard(models.load_pretrained(tiny_model, world), world)
    before = torch.get_rng_state()
    assert models.choose_forward(model, world, longest=64) == PACKED
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------------------------------------------------
# Refused from the config alone


REFUSED = {
    "experts past the loaders": (GptOssConfig(**families.SIZES, head_dim=8), 64, "--model .*: gpt_oss cannot be"),
    "longrope": (
        Phi3Config(
            **families.SIZES,
            original_max_position_embeddings=16,
            rope_parameters=dict(
                rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=16,
                short_factor=[1.0] * 4, long_factor=[4.0] * 4,
            ),
        ),
        17,
        "turns positions by another angle as soon as a sequence has more than 16 tokens.* = 17, lower it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_is_refused_before_anything_is_loaded(kind, tmp_path):
    """The folder has no weights that could be loaded."""
    config, tokens, message = REFUSED[kind]
    config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_trainable(config, "--model x", tokens)
    if kind == "longrope":
        check_trainable(config, "--model x", 16)


def test_positions_count_under_every_name_that_a_config_has_for_them(tmp_path):
    GPT2Config(vocab_size=80, n_embd=32, n_layer=1, n_head=2, n_positions=32).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    check_context(config, "--model x", 32)
    with pytest.raises(ValueError, match="33 tokens, but --model x has 32 positions; lower it"):
        check_context(config, "--model x", 33)


# ---------------------------------------------------------------------------------------------------------------------
# What engines and files get


def test_buffers_and_published_names_reach_engines(folder_of, world):
    for name, known in (
        ("constants in its files", "act_fn.beta"),
        ("other names in its files", "embed_out.weight"),
        ("experts in groups", "e_score_correction_bias"),
    ):
        policy = families.load(folder_of[name], world)
        with torch.no_grad():
            for x in [*policy.parameters(), *(x for _, x in models.buffers_in_files(policy))]:
                x.mul_(1.5)
        pushed = dict(models.weights_for_engine(policy, world))
        assert any(key.endswith(known) for key in pushed)
        engine = hf.Engine(folder_of[name], world, longest=64)
        engine.update_weights(iter(pushed.items()))
        theirs = dict(engine.model.named_parameters()) | dict(models.buffers_in_files(engine.model))
        ours = {key: p.full_tensor() for key, p in policy.named_parameters()} | dict(models.buffers_in_files(policy))
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], x) for key, x in ours.items())
        without = {key: x for key, x in pushed.items() if not key.endswith(known)}
        with pytest.raises(RuntimeError, match=rf"untouched: .*{re.escape(known)}"):
            engine.update_weights(iter(without.items()))


EXPORTED = ("constants in its files", "other names in its files", "convolutions", "experts")


@pytest.mark.parametrize("name", h.some(EXPORTED, *EXPORTED[::3]))
def test_an_export_is_whole_and_has_the_loss_that_training_saw(name, folder_of, tmp_path, runs_here):
    """sft.py's own export gives transformers the loss on the held-out rows that sft.py reported."""
    task = h.make_task(tmp_path)
    config = AutoConfig.from_pretrained(folder_of[name])
    config.save_pretrained(task.model)
    families.plain(folder_of[name]).save_pretrained(task.model)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in pq.read_table(task.sft).to_pylist()[:8]))
    settings = h.sft_settings(task, tmp_path / "run", total_training_steps=2, val_files=(str(few),), test_freq=2)
    metrics = sft.main(build(sft.Args, **settings))
    export = tmp_path / "run" / "global_step_2" / "huggingface"
    model, info = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = load_tokenizer(str(export))
    rows = load_demonstrations([few], tokenizer, max_length=settings["max_length"], filter_overlong=False)
    total = count = 0
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
            logp = model.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            mask = torch.tensor([0] * len(row.prompt_ids) + list(row.response_mask))[1:]
            total, count = total - (logp * mask).sum(), count + mask.sum()
    assert metrics["val/loss"] == pytest.approx(float(total / count), abs=1e-4)
