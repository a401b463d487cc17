"""Scripts with --lora-rank: they learn, continue as if nothing had happened, and leave what others can load."""

import json
import re
import signal
from pathlib import Path

import helpers_scripts as h
import launch
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import sft
import train_dapo
import train_grpo
import train_ppo
import train_reward
from extras.lora import adapters as lora
from rl.flags import build
from rl.model import load as models
from rl.model import sharding
from rl.run.checkpoint_files import list_steps
from rl.sampling import sampler

pytestmark = pytest.mark.usefixtures("runs_here")

PPO = dict(lora_rank=4, lora_alpha=8, use_kl_loss=True, kl_loss_coef=0.1, lr=1e-2, save_freq=1, total_training_steps=3)


@pytest.fixture(scope="module")
def unbroken(task, tmp_path_factory):
    """A PPO run of three steps with adapters on policy and critic, and a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("unbroken")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_ppo.main(build(train_ppo.Args, **h.ppo_settings(task, folder, **PPO)))
    h.leave_distributed()
    torch.set_num_threads(threads)
    return folder


def sum_by_hand(base, adapter, scaling):
    """The weights that an adapter's file and those it stands beside make together."""
    result = dict(base)
    for name, a in adapter.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").replace(".lora_A", "")
            result[layer] = base[layer] + scaling * adapter[name.replace("lora_A", "lora_B")] @ a
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.thorough
def test_a_killed_run_with_adapters_ends_as_if_nothing_had_happened(task, unbroken, tmp_path):
    settings = h.ppo_settings(task, tmp_path, **PPO)
    entry = {"script": "train_ppo", "settings": settings, "crash_at": [0, 3]}
    assert launch.run_in_turn(tmp_path / "runs.json", entry, nproc=0)[0] == -signal.SIGKILL
    assert list_steps(tmp_path) in ([1], [1, 2])
    train_ppo.main(build(train_ppo.Args, **settings))
    one, two = tmp_path / "global_step_3", unbroken / "global_step_3"
    h.assert_same(h.saved_state(one), h.saved_state(two))
    for folder in ("huggingface", "huggingface_critic"):
        h.assert_same(h.weights(one, folder), h.weights(two, folder))
    lines = [h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (tmp_path, unbroken)]
    assert lines[0] == lines[1] and [x["step"] for x in lines[0]] == [1, 2, 3]
    changed = h.distance(h.weights(unbroken / "global_step_1"), h.weights(two))
    assert changed > 1e-3  # the comparison means something


def test_a_checkpoint_holds_adapters_and_the_export_their_sum(task, unbroken):
    folder = unbroken / "global_step_3"
    state = h.saved_state(folder)
    parameters = {name.split("/")[2] for name in state if "/model/" in name}
    assert {name for name in parameters if not lora.is_adapter(name)} == {"score.weight"}  # the critic's head
    assert len(state) == 4 * (2 * 14 + 2 * 14 + 1)  # each with two moments and a step
    base = h.original(task)
    for suffix in ("", "_critic"):
        adapter = load_file(folder / f"adapter{suffix}" / "adapter_model.safetensors")
        exported = h.weights(folder, f"huggingface{suffix}")
        own = {name: x for name, x in base.items() if name != "lm_head.weight"}
        expected = sum_by_hand(own, adapter, 8 / 4)
        if suffix:
            expected["score.weight"] = adapter.pop("base_model.model.score.weight")
        assert exported.keys() == expected.keys() and len(adapter) == 28
        assert h.distance(exported, expected) < 2e-6
        assert h.distance({n: x for n, x in exported.items() if n in own}, own) > 1e-3
    written = json.loads((folder / "trainer_state.json").read_text())["lora"]
    policy = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    assert written["actor"] == {"base": task.model, "base_sha256": lora.hash_of(policy)}
    config = json.loads((folder / "adapter_critic" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "SEQ_CLS")
    assert config["base_model_name_or_path"] == task.model and config["modules_to_save"] == ["score"]


def test_adapters_are_not_continued_beside_other_weights_or_with_other_flags(task, unbroken, tmp_path):
    def resume(**changes):
        settings = PPO | dict(total_training_steps=4, resume_mode=str(unbroken / "global_step_3")) | changes
        return train_ppo.main(build(train_ppo.Args, **h.ppo_settings(task, tmp_path / "other", **settings)))

    for changes, words in (
        (dict(lora_rank=8), "--lora-rank: was 4, is 8"),
        (dict(lora_alpha=16), "--lora-alpha: was 8, is 16"),
        (dict(target_modules=("q_proj",)), r"--target-modules: was \['all-linear'\], is \['q_proj'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            resume(**changes)
        h.leave_distributed()
    file = Path(task.model) / "model.safetensors"
    kept = file.read_bytes()
    try:
        model = AutoModelForCausalLM.from_pretrained(task.model)
        with torch.no_grad():
            model.model.norm.weight[0] += 1e-3
        model.save_pretrained(task.model)
        with pytest.raises(ValueError, match=f"were trained beside other weights than those of {task.model} .sha256"):
            resume()
    finally:
        file.write_bytes(kept)
    h.leave_distributed()
    assert resume()["actor/grad_norm"] > 0


@pytest.mark.thorough
def test_two_ranks_save_what_one_rank_exports(task, tmp_path):
    settings = h.sft_settings(task, tmp_path, lora_rank=4, lr=1e-2, total_training_steps=2)
    launch.run_file("sft.py", *h.flags(settings), nproc=2)
    folder = tmp_path / "global_step_2"
    adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
    own = {name: x for name, x in h.original(task).items() if name != "lm_head.weight"}
    assert h.distance(h.weights(folder), sum_by_hand(own, adapter, 32 / 4)) < 2e-6
    assert {path.name for path in (folder / "state").iterdir()} == {"rank_0.safetensors", "rank_1.safetensors"}
    assert sft.main(build(sft.Args, **settings | dict(total_training_steps=3, force_resume=True)))["train/loss"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# What is learned


@pytest.mark.parametrize("rank", h.some([1, 8], 8))
def test_sft_learns_with_adapters(task, tmp_path, rank):
    """An untrained model, whose embeddings stay as they are: it learns which tokens there are."""
    settings = h.sft_settings(task, tmp_path, lora_rank=rank, lr=4e-2, total_training_steps=20, save_freq=0)
    metrics = sft.main(build(sft.Args, **settings))
    first, *_, last = (x["train/loss"] for x in h.read_jsonl(tmp_path / "metrics.jsonl"))
    assert last < first - 0.2 and metrics["train/loss"] == last


def test_a_reward_model_learns_with_adapters_and_can_score(task, tmp_path):
    settings = h.reward_settings(task, tmp_path / "judge", lora_rank=4, lr=1e-2, total_training_steps=12)
    train_reward.main(build(train_reward.Args, **settings))
    first, *_, last = (x["train/loss"] for x in h.read_jsonl(tmp_path / "judge" / "metrics.jsonl"))
    assert last < 0.8 * first
    h.leave_distributed()
    judge = str(tmp_path / "judge" / "global_step_12" / "huggingface")
    settings = h.dapo_settings(task, tmp_path / "run", lora_rank=2, reward_model=judge, total_training_steps=1)
    settings |= dict(reward_model_max_length=64)
    metrics = train_dapo.main(build(train_dapo.Args, **settings))
    assert metrics["actor/grad_norm"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# The push


@pytest.mark.parametrize("forgotten", h.some(["all", "half"], "half"))
def test_a_push_that_forgets_adapters_ends_the_run(task, tmp_path, monkeypatch, forgotten):
    """Only the base goes to the engine, or the sum for every second layer: as if that were the policy."""

    def push(policy, ranks, original=models.weights_for_engine):
        base = {name: x for name, x in sharding.full_tensors(policy) if not lora.is_adapter(name)}
        for i, (name, x) in enumerate(original(policy, ranks)):
            yield name, base[name] if forgotten == "all" or i % 2 else x

    monkeypatch.setattr(sampler, "weights_for_engine", push)
    settings = h.grpo_settings(task, tmp_path, lora_rank=4, lr=1e-2, total_training_steps=4)
    with pytest.raises(RuntimeError, match="does not hold the policy's weights") as error:
        train_grpo.main(build(train_grpo.Args, **settings))
    assert len(h.read_jsonl(tmp_path / "metrics.jsonl")) == 1  # until the first update both are the base
    assert float(re.search(r"\d\.?\d*e-\d+", str(error.value))[0]) > 1e-4
