"""Models that see images train on what their own forward gives for one sequence at a time."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import helpers_engines as e
import helpers_families as families
import helpers_scripts as h
import helpers_vision as vision
import launch
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText
from workers.vision import measure, responses, weights_of

import eval
import sft
import train_grpo
import train_ppo
from data import dots, files
from extras import images
from extras.demonstrations import encode_conversation
from extras.engines import hf
from extras.families.vision import Vision
from extras.judges.second_model import check_same_tokens
from extras.lora import LoRA
from extras.lora import adapters as lora
from rl.data.batching import collate, plan_update
from rl.data.rows import read_rows
from rl.data.template import load_tokenizer
from rl.data.types import Sampling, take_rows
from rl.flags import build
from rl.model import load as models
from rl.model.logprobs import fixed_logprobs
from rl.model.sharding import Memory
from rl.run.task import load_task
from rl.sampling.engines import vllm
from rl.sampling.engines.flags import EngineFlags
from rl.sampling.groups import sample_groups
from rl.sampling.verify import check_engine

FEW = ["qwen3_vl", "qwen3_5", "gemma3"]
PADDED = ["gemma3"]  # attention to both sides within an image
FAMILIES = [name for name in dots.FAMILIES if name != "smolvlm" or find_spec("num2words")]  # its processor wants that


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Name of a family -> folder of its model."""
    root = tmp_path_factory.mktemp("sees")
    return families.Made(lambda name: vision.save_lively(root / name, name))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """A file of three images, whose prompts are the same text, and a row without an image."""
    return vision.write_rows(tmp_path_factory.mktemp("rows"), 3)


@pytest.fixture(scope="module", autouse=True)
def own_images():
    vision.forget()
    yield
    vision.forget()


@pytest.fixture(scope="module")
def expected(folder_of, rows):
    """Name of a family -> log-probs of all responses, and gradients of the loss, one sequence at a time."""

    def measured(name):
        folder = folder_of[name]
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        samples = responses(vision.encoded(folder, rows))
        width = max(s.num_tokens for s in samples)
        weight, logps = weights_of(torch.Size((len(samples), width))), []
        for i, s in enumerate(samples):
            inputs, ids = vision.as_processed(folder, rows, i // 2), s.response_ids.tolist()
            logp = vision.logits(model, inputs, ids).log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
            (logp * weight[i, len(s.prompt_ids) : s.num_tokens]).sum().backward()
            logps.append(logp.detach())
        grads = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        return samples, logps, grads

    return families.Made(measured)


def close(found, wanted, tolerance):
    size = max(float(wanted.norm()), 1e-6)
    assert float((found - wanted).norm()) / size < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_the_tokens_of_the_processor(folder_of, rows, family):
    for i, row in enumerate(vision.encoded(folder_of[family], rows)):
        wanted, ids = vision.as_processed(folder_of[family], rows, i)["input_ids"], torch.tensor([row["prompt_ids"]])
        assert torch.equal(images.of_process().expanded(ids)[0], wanted)
        marks = {"gemma3": 2, "smolvlm": 3}.get(family, 0)  # that stand around the others
        assert (ids >= images.FIRST).sum() == (vision.TOKENS + marks if i < 3 else 0)


@pytest.mark.parametrize("family", h.some(FAMILIES, *FEW))
def test_packed_as_one_sequence_at_a_time(world, folder_of, rows, expected, family):
    samples, wanted, gradients = expected[family]
    is_padded, logp, found = measure(folder_of[family], rows, world, LoRA(freeze_vision_tower=False))
    assert is_padded == (family in PADDED)
    for i, s in enumerate(samples):
        torch.testing.assert_close(logp[i, len(s.prompt_ids) : s.num_tokens], wanted[i], rtol=0, atol=1e-5)
    assert found.keys() == gradients.keys()
    for name, x in gradients.items():
        if not name.endswith("k_proj.bias"):  # which changes nothing, so that its gradient is rounding
            close(found[name], x, 1e-3 if "A_log" in name or "dt_bias" in name else 2e-4)
    # The same text before another image: were its hidden states shared, these would be equal.
    assert (wanted[0][:1] - wanted[2][:1]).abs() > 1e-3 or (wanted[0][:1] - wanted[4][:1]).abs() > 1e-3


def test_two_ranks_of_which_one_has_no_image(folder_of, rows, expected, tmp_path):
    folder = folder_of["qwen3_vl"]
    named = [f"{name}={folder}" for name in ("learns", "frozen")]
    launch.run_file(launch.TESTS / "model/workers/vision.py", rows, tmp_path, *named, nproc=2)
    own = [torch.load(tmp_path / f"rank{i}.pt", weights_only=False) for i in (0, 1)]
    samples, wanted, gradients = expected["qwen3_vl"]
    for name in ("learns", "frozen"):
        logp = own[0][name][1] + own[1][name][1]
        for i, s in enumerate(samples):
            torch.testing.assert_close(logp[i, len(s.prompt_ids) : s.num_tokens], wanted[i], rtol=0, atol=1e-5)
        learned = {key: x for key, x in gradients.items() if name == "learns" or ".visual." not in key}
        for part in own:
            assert part[name][2].keys() == learned.keys()
            for key, x in learned.items():
                close(part[name][2][key], x, 2e-4)


@pytest.mark.parametrize("family", h.some(FAMILIES, *FEW))
def test_the_engine_samples_what_the_policy_would(world, folder_of, rows, family):
    """Prompts with and without an image side by side, before and after a push of other weights, also of the tower."""
    folder, sampling, places = folder_of[family], Sampling(n=3, max_tokens=16), 0
    prompts = vision.encoded(folder, rows)
    policy = models.load_model(folder, world, LoRA(freeze_vision_tower=False), Memory(compile=False), longest=64)
    engine = hf.Engine(folder, world, longest=64)
    for seed in range(2):
        samples = sample_groups(engine, prompts, sampling, seed=seed)
        gap = check_engine(policy, samples, sampling, EngineFlags(), world, num_probe=len(samples))
        assert gap < 5e-6
        places += sum((s.response_ids == policy.config.image_token_id).sum() for s in samples)
        e.change(policy, scale=0.02, seed=seed)
        engine.update_weights(models.weights_for_engine(policy, world))
    assert places > 0  # the policy has sampled some, and they were text


@pytest.mark.parametrize("family", sorted({"qwen3_vl", "qwen2_5_vl", "smolvlm"} & set(FAMILIES)))
def test_vllm_samples_what_the_policy_would(family, world, folder_of, rows):
    """Needs torchvision, which vLLM imports for them. On a CPU: PyPI's wheel, unzipped to a folder on PYTHONPATH,
    without the two lines `@torch.library.register_fake` of its _meta_registrations.py.
    """
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    folder = folder_of[family]
    sampling, prompts = Sampling(n=3, max_tokens=16), vision.encoded(folder, rows)
    policy = models.load_model(folder, world, LoRA(freeze_vision_tower=False), Memory(compile=False), longest=64)
    engine = vllm.Engine(folder, world, EngineFlags(max_num_seqs=8), longest=64)

    def gap(seed: int) -> float:
        samples = sample_groups(engine, prompts, sampling, seed=seed)
        return check_engine(policy, samples, sampling, EngineFlags(max_logprob_gap=9.0), world, num_probe=len(samples))

    for seed in range(3):
        e.change(policy, scale=0.02, seed=seed)
        engine.update_weights(models.weights_for_engine(policy, world))
        assert gap(seed) < 5e-6
    e.change(policy, scale=0.02, seed=3)
    with mock.patch.object(engine.core, "reset_encoder_cache"):  # what a push would leave without it
        engine.update_weights(models.weights_for_engine(policy, world))
    assert gap(3) > 1e-3
    engine.llm.llm_engine.engine_core.shutdown()


def test_vllm_refuses_images_to_which_it_would_add_text(world, folder_of, rows):
    vision.encoded(folder_of["gemma3"], rows)
    with pytest.raises(ValueError, match=r"gemma3 puts text around an image \(Gemma 3: line breaks\).*use --engine hf"):
        vllm.Engine(folder_of["gemma3"], world, EngineFlags(), longest=64)


def test_adapters_stand_in_the_text_unless_the_tower_learns(folder_of, rows):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder_of["qwen3_vl"]))
    vision.forget()
    unseen = lora.layers_of(model, ["all-linear"], freeze_vision_tower=False)  # the data has no images
    vision.encoded(folder_of["qwen3_vl"], rows)
    names = [lora.layers_of(model, ["all-linear"], freeze_vision_tower=x) for x in (True, False)]
    assert len(names[0]) == 14 and not any("visual" in x for x in names[0]) and unseen == names[0]
    assert set(names[0]) < set(names[1]) and "model.visual.blocks.0.attn.qkv" in names[1]


def test_layers_of_the_text_may_run_compiled_and_those_of_the_tower_not(folder_of, world, rows):
    """Images have other dimensions that vary, for each of which torch would compile a layer again."""
    vision.encoded(folder_of["qwen3_vl"], rows)  # the data has images
    model = models.load_pretrained(folder_of["qwen3_vl"], world)
    units = {name: x for name, x in model.named_modules() if type(x).__name__ in model._no_split_modules}
    compiled = {name for name, x in units.items() if all(y.may_compile(x) for y in model.packed.families)}
    assert compiled and compiled == {name for name in units if ".visual." not in name} < units.keys()


def test_a_reference_without_its_adapters_sees_images_too(world, folder_of, rows):
    samples = responses(vision.encoded(folder_of["qwen3_vl"], rows))
    batch = collate(samples)
    update = plan_update([s.num_tokens for s in samples], max_tokens=200, ranks=world)
    kept = dict(ranks=world, memory=Memory(compile=False), longest=128)
    policy = families.make_them_count(models.load_model(folder_of["qwen3_vl"], learning=LoRA(lora_rank=4), **kept))
    reference = models.load_reference(folder_of["qwen3_vl"], world, policy)
    first = models.load_model(folder_of["qwen3_vl"], learning=None, **kept)
    found, wanted, now = (fixed_logprobs(x, batch, [update]) for x in (reference, first, policy))
    assert torch.equal(found, wanted) and (now - found).abs().max() > 0.1
    # A micro-batch without an image, as a mixture of experts has it with --router-aux-loss-coef
    without = replace(take_rows(batch, [6, 7]), share=torch.tensor([0.25, 0.5]))
    assert Vision(policy).with_image(without).share.sum() == 0.75


def test_who_reads_text_only_refuses_images(rows, folder_of, tiny_model, monkeypatch):
    monkeypatch.setenv("SGLANG_PYTHON", "python")  # which is not started
    settings = dict(model=folder_of["qwen3_vl"], train_files=(str(rows),), val_before_train=False, test_freq=-1)
    settings |= dict(max_prompt_length=64, max_response_length=64, train_batch_size=2, engine="hf")
    for args, what in (
        (build(train_ppo.Args, **settings), "the critic of train_ppo.py"),
        (build(train_grpo.Args, **settings, reward_model=tiny_model), "--reward-model"),
        (build(train_grpo.Args, **settings | dict(engine="sglang")), "--engine sglang"),
    ):
        with pytest.raises(ValueError, match=rf"train\.parquet: row 0: has images, and {what} reads text only"):
            load_task(args)
    tokenizer = load_tokenizer(folder_of["qwen3_vl"])
    with pytest.raises(ValueError, match="the data has images, which it may not read as --model"):
        path, policy = folder_of["qwen2_5_vl"], folder_of["qwen3_vl"]
        check_same_tokens(path, tokenizer, tokenizer, policy=policy, flag="--teacher-model")
    with pytest.raises(ValueError, match="row 0: has images, and reward models read text only"):
        encode_conversation(tokenizer, read_rows(rows)[0], "#### 1")


def test_a_run_from_demonstrations_to_evaluation(runs_here, tmp_path):
    """sft.py, train_grpo.py with LoRA and without, and eval.py, with half of the rows without an image."""
    dots.main(dots.Args(tmp_path, num_sft=8, num_train=4, num_test=4))
    for name in ("sft", "train", "test"):
        table = files.read(tmp_path / f"{name}.parquet")
        for row in table[::2]:
            row |= {"images": None, "prompt": [{"role": "user", "content": "how many?"}]}
        files.write(tmp_path, {name: table})
    (tmp_path / "reward.py").write_text(h.REWARD)
    reward, base = (str(tmp_path / "reward.py"),), str(tmp_path / "model")
    found = sft.main(
        build(
            sft.Args, model=base, train_files=(str(tmp_path / "sft.parquet"),), max_length=64, train_batch_size=8,
            total_training_steps=2, lr=1e-3, freeze_vision_tower=False, default_local_dir=str(tmp_path / "sft"),
        )
    )  # fmt: skip
    assert found["train/grad_norm"] > 0
    start = str(tmp_path / "sft/global_step_2/huggingface")
    tower = {key: x for key, x in load_file(f"{start}/model.safetensors").items() if "visual" in key}
    before = load_file(f"{base}/model.safetensors")
    assert tower and any(not torch.equal(x, before[key]) for key, x in tower.items())
    for rank in (0, 4):
        folder = tmp_path / f"grpo{rank}"
        settings = dict(
            model=start, train_files=(str(tmp_path / "train.parquet"),), val_files=(str(tmp_path / "test.parquet"),),
            engine="hf", max_prompt_length=64, max_response_length=8, train_batch_size=4, rollout_n=2, lr=1e-2,
            total_training_steps=2, test_freq=2, val_before_train=False, lora_rank=rank, reward_workers=1,
            custom_reward_function=reward, default_local_dir=str(folder),
        )  # fmt: skip
        train_grpo.main(build(train_grpo.Args, **settings))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        gaps = [x["rollout/logprob_gap_mean"] for x in lines if "rollout/logprob_gap_mean" in x]
        assert len(gaps) == 2 and max(gaps) < 1e-5
        export = folder / "global_step_2/huggingface"
        after = load_file(export / "model.safetensors")
        assert all(torch.equal(after[key], x) for key, x in tower.items())  # frozen
        assert any(not torch.equal(after[key], x) for key, x in load_file(f"{start}/model.safetensors").items())
        plain = AutoModelForImageTextToText.from_pretrained(export, dtype=torch.float32)
        assert type(plain).__name__ == "Qwen3VLForConditionalGeneration"
    found = eval.main(
        build(
            eval.Args, model=str(export), val_files=(str(tmp_path / "test.parquet"),), engine="hf",
            max_prompt_length=64, max_response_length=8, reward_workers=1,
        )
    )  # fmt: skip
    assert found["num_prompts"] == 4
