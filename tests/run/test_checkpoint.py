"""A run that was interrupted ends exactly where the unbroken one does; what it exports is what it trained."""

import collections
import dataclasses
import hashlib
import itertools
import json
import pickle
import re
import shutil
import signal
import sys
import threading
from functools import partial

import helpers_scripts as h
import launch
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import sft
import train_dapo
import train_grpo
import train_ppo
import train_reinforce
import train_reward
from extras.judges.scalar_models import ScalarModel
from rl import flags
from rl.data.types import Batch
from rl.flags import build
from rl.model import load as models
from rl.model.sharding import full_tensors, shard
from rl.ranks import init_ranks
from rl.run import checkpoint, checkpoint_tensors, loop_state, resume, run_folder
from rl.run import checkpoint_files as files

pytestmark = pytest.mark.usefixtures("runs_here")

SCRIPTS = (train_grpo, train_ppo, train_dapo, train_reinforce, sft, train_reward)
STEPS = 5
# Several updates per step, a reference, a moving learning rate: everything that a resumed run could get wrong.
BUSY = dict(
    total_training_steps=STEPS,
    save_freq=1,
    ppo_mini_batch_size=2,
    ppo_epochs=2,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    lr_scheduler_type="cosine",
    lr_warmup_steps=2,
    val_before_train=True,
    test_freq=2,
)


@pytest.fixture(scope="module")
def unbroken(task, tmp_path_factory):
    """A GRPO run of five steps that was never interrupted, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("unbroken")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, folder, **BUSY)))
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def policy_of():
    """(model folder, dtype of the export) -> policy, optimizer and Ranks of a world of one."""

    def make(model, dtype=torch.float32):
        ranks = dataclasses.replace(init_ranks(), dtype=dtype)
        policy = shard(models.load_pretrained(model, ranks), ranks)
        return policy, torch.optim.AdamW(policy.parameters(), lr=1e-3), ranks

    return make


def open_run(task, root, ranks, tokenizer=None, **changes):
    """What train_grpo.py saves ten steps on the task's prompts with, in the run folder `root`."""
    args = build(train_grpo.Args, model=task.model, train_files=(task.train,), **changes)
    tokenizer, folder = tokenizer or AutoTokenizer.from_pretrained(task.model), run_folder.RunFolder(root, ranks, 10)
    found, _, record = resume.choose_checkpoint(args, tokenizer, folder)
    return checkpoint.Saver(folder, record, tokenizer, keep=args.checkpoints.max_ckpt_to_keep, resume_from=found)


def save(saver, step, trained, **state):
    saver.save(step, trained, loop_state.encode(state))


def leave(saver, step, trained, **state):
    saver.leave(step, trained, loop_state.encode(state))


def save_and_wait(saver, step, trained, **state):
    """The folder of a checkpoint, when it is on disk."""
    save(saver, step, trained, **state)
    saver.settle()
    assert saver.failures == 0
    return saver.folder.root / f"global_step_{step}"


def assert_same_run(run_dir, unbroken, last):
    """Weights, optimizer and metrics of two runs: equal to the last bit, each line of metrics.jsonl there once."""
    h.assert_same(h.weights(run_dir / f"global_step_{last}"), h.weights(unbroken / f"global_step_{last}"))
    h.assert_same(h.saved_state(run_dir / f"global_step_{last}"), h.saved_state(unbroken / f"global_step_{last}"))
    lines, expected = (h.timeless(h.read_jsonl(folder / "metrics.jsonl")) for folder in (run_dir, unbroken))
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    assert lines == expected


# ---------------------------------------------------------------------------------------------------------------------
# Exact continuation


def test_a_crashed_grpo_run_continues_as_if_nothing_had_happened(task, unbroken, tmp_path):
    # Scores are collected by the check, an evaluation, two steps, an evaluation, and then in step 3.
    settings = h.grpo_settings(task, tmp_path, **BUSY)
    entry = {"script": "train_grpo", "settings": settings, "crash_at": [0, 5]}
    status, output = launch.run_in_turn(tmp_path / "runs.json", entry, nproc=0)
    assert status == -signal.SIGKILL, output
    assert files.list_steps(tmp_path) in ([1], [1, 2])  # it may have died while step 2 was written
    assert [line["step"] for line in h.read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 2]  # evaluated twice

    metrics = train_grpo.main(build(train_grpo.Args, **settings))

    assert_same_run(tmp_path, unbroken, STEPS)
    steps = [line["step"] for line in h.read_jsonl(tmp_path / "metrics.jsonl") if "actor/loss" in line]
    assert steps == [1, 2, 3, 4, 5]
    last = h.read_jsonl(unbroken / "metrics.jsonl")[-2]
    assert {k: v for k, v in metrics.items() if k.startswith(("actor/", "critic/"))} == {
        k: v for k, v in last.items() if k.startswith(("actor/", "critic/"))
    }
    assert (tmp_path / "generations.jsonl").read_text() == (unbroken / "generations.jsonl").read_text()
    # The comparison means something: training moved the weights, and every step moved them further.
    first, final = h.weights(unbroken / "global_step_1"), h.weights(unbroken / f"global_step_{STEPS}")
    assert all(not torch.equal(first[name], final[name]) for name in first)


def test_a_run_continues_from_a_folder_that_is_named(task, unbroken, tmp_path):
    settings = h.grpo_settings(task, tmp_path, **BUSY, resume_mode=str(unbroken / "global_step_2"))
    train_grpo.main(build(train_grpo.Args, **settings))
    h.assert_same(h.weights(tmp_path / "global_step_5"), h.weights(unbroken / "global_step_5"))
    lines = [line for line in h.read_jsonl(tmp_path / "metrics.jsonl") if "actor/loss" in line]
    whole = [line for line in h.read_jsonl(unbroken / "metrics.jsonl") if "actor/loss" in line]
    assert h.timeless(lines) == h.timeless(whole)[2:]


@pytest.mark.thorough
def test_resume_mode_disable_starts_over_but_never_mixes_two_runs(task, unbroken, tmp_path):
    for name in ("metrics.jsonl", "generations.jsonl"):  # of a run that ended before its first checkpoint
        shutil.copy(unbroken / name, tmp_path / name)
    settings = h.grpo_settings(task, tmp_path, **BUSY, resume_mode="disable")
    train_grpo.main(build(train_grpo.Args, **settings))
    assert_same_run(tmp_path, unbroken, STEPS)
    assert (tmp_path / "generations.jsonl").read_text() == (unbroken / "generations.jsonl").read_text()


def test_resume_mode_disable_does_not_train_where_checkpoints_are(task, unbroken, tmp_path):
    shutil.copytree(unbroken / "global_step_2", tmp_path / "global_step_2")
    settings = h.grpo_settings(task, tmp_path, **BUSY, resume_mode="disable")
    with pytest.raises(ValueError, match=f"--resume-mode disable, but {tmp_path} holds checkpoints up to step 2"):
        train_grpo.main(build(train_grpo.Args, **settings))


def test_a_finished_run_trains_no_further(task, unbroken, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    before = (run_dir / "global_step_5" / "trainer_state.json").stat().st_mtime_ns
    metrics = train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, run_dir, **BUSY)))
    assert metrics.keys() == {"val-core/arithmetic/reward/mean@1", "val/accuracy", "val/response_length"}
    assert metrics.items() <= h.read_jsonl(unbroken / "metrics.jsonl")[-1].items()
    assert files.list_steps(run_dir) == [1, 2, 3, 4, 5]
    assert (run_dir / "global_step_5" / "trainer_state.json").stat().st_mtime_ns == before
    assert [x["step"] for x in h.read_jsonl(run_dir / "metrics.jsonl") if "actor/loss" in x] == [1, 2, 3, 4, 5]


KILLED_WHILE_SAVING = """
import os, signal
from rl import flags
from rl.run import arguments
from rl.run import export
import sft

def write(exporter, path, *rest, original=export.Exporter.write_huggingface):
    if "global_step_3" in str(path):  # this is the writing thread: training goes on
        os.kill(os.getpid(), signal.SIGKILL)
    original(exporter, path, *rest)

export.Exporter.write_huggingface = write
sft.main(arguments.parse(sft.Args, None))
"""


def test_sft_killed_in_the_middle_of_a_checkpoint_continues_from_the_one_before(task, tmp_path):
    few = h.few_rows(task.sft, tmp_path)
    changes = dict(save_freq=1, total_training_steps=5, val_files=(few,), test_freq=2, train_batch_size=12)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    sft.main(build(sft.Args, **h.sft_settings(task, whole, **changes)))
    settings = h.sft_settings(task, broken, **changes)
    (tmp_path / "killed.py").write_text(KILLED_WHILE_SAVING)
    killed = launch.fork_file(tmp_path / "killed.py", *h.flags(settings), log=tmp_path / "log")
    assert killed.ends() == [-signal.SIGKILL], killed.log.read_text()
    [left] = broken.glob(".tmp-global_step_3-*")
    assert (left / "state" / "rank_0.safetensors").is_file()  # half of it was there
    assert files.list_steps(broken) == [1, 2]
    assert [line["step"] for line in h.read_jsonl(broken / "metrics.jsonl")][:5] == [0, 1, 2, 2, 3]

    sft.main(build(sft.Args, **settings))

    assert_same_run(broken, whole, 5)
    assert not list(broken.glob(".tmp*"))


def test_a_vllm_run_continues_as_if_nothing_had_happened(task, tmp_path):
    h.needs_vllm()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    changes = dict(engine="vllm", save_freq=1, total_training_steps=2, test_freq=2)
    launch.run_file("train_grpo.py", *h.flags(h.grpo_settings(task, whole, **changes)))
    lines = h.read_jsonl(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert all(line["actor/grad_norm"] > 0.1 and line["rollout/logprob_gap_mean"] < 1e-5 for line in lines[:2])
    shutil.copytree(whole, broken)  # as if it had crashed while saving step 2, with more in its log
    shutil.rmtree(broken / "global_step_2")

    launch.run_file("train_grpo.py", *h.flags(h.grpo_settings(task, broken, **changes)))

    assert_same_run(broken, whole, 2)


def test_two_ranks_continue_exactly_and_their_checkpoint_loads_on_one(task, policy_of, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    # Five prompts on two ranks: 8 responses per step for one, 12 for the other, which dies in step 2, after the check.
    changes = dict(total_training_steps=2, save_freq=1, train_batch_size=5, ppo_mini_batch_size=2)
    entries = [
        {"script": "train_grpo", "settings": h.grpo_settings(task, whole, **changes)},
        {"script": "train_grpo", "settings": h.grpo_settings(task, broken, **changes), "crash_at": [1, 2]},
    ]
    status, output = launch.run_in_turn(tmp_path / "runs.json", *entries, nproc=2)
    assert status != 0 and files.list_steps(whole) == [1, 2], output
    assert files.list_steps(broken) in ([], [1]), output  # it may have died while step 1 was written

    launch.run_file("train_grpo.py", *h.flags(entries[1]["settings"]), nproc=2)

    assert_same_run(broken, whole, 2)
    # Loaded and saved again by a single rank, it is the same checkpoint, and the single rank trains on.
    policy, optimizer, ranks = policy_of(task.model)
    trained = {"actor": (policy, optimizer)}
    checkpoint.load(broken / "global_step_2", trained)
    again = save_and_wait(open_run(task, tmp_path / "again", ranks), 2, trained)
    h.assert_same(h.saved_state(again), h.saved_state(broken / "global_step_2"))
    h.assert_same(h.weights(again), h.weights(broken / "global_step_2"))
    state = h.saved_state(again)
    assert state["actor/optimizer/model.norm.weight/step"] == 6  # three updates per step
    train_grpo.main(build(train_grpo.Args, **entries[1]["settings"] | {"total_training_steps": 3}))
    assert files.list_steps(broken) == [1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------------
# The exported model


def test_transformers_loads_exactly_the_trained_weights(task, unbroken):
    folder = unbroken / "global_step_5" / "huggingface"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    trained = {
        name.removeprefix("actor/model/"): tensor
        for name, tensor in h.saved_state(unbroken / "global_step_5").items()
        if name.startswith("actor/model/")
    }
    h.assert_same(dict(model.named_parameters()), trained)  # tied weights once
    original = AutoModelForCausalLM.from_pretrained(task.model).state_dict()
    assert all(not torch.equal(tensor, original[name]) for name, tensor in trained.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in h.weights(unbroken / "global_step_5")
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(task.model).eos_token_id
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["Qwen2ForCausalLM"] and config.tie_word_embeddings
    assert config.dtype == torch.float32


def test_the_tokenizer_survives_the_round_trip(task, unbroken):
    before = AutoTokenizer.from_pretrained(task.model)
    after = AutoTokenizer.from_pretrained(unbroken / "global_step_5" / "huggingface")
    chat = [{"role": "user", "content": "4+3-5=?"}, {"role": "assistant", "content": "4+3=7\n#### 2"}]
    assert after.apply_chat_template(chat, tokenize=False) == before.apply_chat_template(chat, tokenize=False)
    text = before.apply_chat_template(chat, tokenize=False)
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.decode(after(text)["input_ids"]) == text
    assert (after.eos_token, after.pad_token) == (before.eos_token, before.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_all_files_of_a_tokenizer_are_exported(task, policy_of, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "short": "{{ messages[0]['content'] }}"}
    saver = open_run(task, tmp_path / "run", ranks, tokenizer=tokenizer)
    saved = save_and_wait(saver, 1, {"actor": (policy, optimizer)}) / "huggingface"
    tokenizer.save_pretrained(tmp_path / "expected")
    expected = [p for p in (tmp_path / "expected").rglob("*") if p.is_file()]
    assert len(expected) == 4  # one of them in a folder
    for path in expected:
        assert (saved / path.relative_to(tmp_path / "expected")).read_bytes() == path.read_bytes()


def test_a_generation_config_that_transformers_would_not_save_is_exported(task, policy_of, tmp_path):
    """Published models have such: transformers refuses or warns of sampling settings beside greedy decoding."""
    policy, optimizer, ranks = policy_of(task.model)
    own = dict(temperature=0.9, top_p=0.6, num_return_sequences=3)
    vars(policy.generation_config).update(own)
    with pytest.raises(ValueError):
        policy.generation_config.save_pretrained(tmp_path / "refused")
    saved = save_and_wait(open_run(task, tmp_path / "run", ranks), 1, {"actor": (policy, optimizer)}) / "huggingface"
    written = json.loads((saved / "generation_config.json").read_text())
    assert own.items() <= written.items() and written["eos_token_id"] == policy.generation_config.eos_token_id


def test_untied_weights_and_bfloat16_compute(task, policy_of, tmp_path):
    config = AutoConfig.from_pretrained(task.model)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    untied = AutoModelForCausalLM.from_config(config)
    untied.generation_config.eos_token_id = [2, 0]  # two ways to end, as instruction-tuned models have
    untied.save_pretrained(tmp_path / "untied")
    policy, optimizer, ranks = policy_of(str(tmp_path / "untied"), torch.bfloat16)
    master = {name: tensor.clone() for name, tensor in full_tensors(policy)}
    saved = save_and_wait(open_run(task, tmp_path / "run", ranks), 7, {"actor": (policy, optimizer)})
    exported = h.weights(saved)
    h.assert_same(exported, {name: tensor.bfloat16() for name, tensor in master.items()})
    assert not torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])
    state = h.saved_state(saved)
    fp32 = {n.removeprefix("actor/model/"): x for n, x in state.items() if n.startswith("actor/model/")}
    h.assert_same(fp32, master)
    model = AutoModelForCausalLM.from_pretrained(saved / "huggingface")
    assert model.dtype == AutoConfig.from_pretrained(saved / "huggingface").dtype == torch.bfloat16
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == [2, 0]
    written = json.loads((saved / "trainer_state.json").read_text())
    assert (written["step"], written["world_size"], written["args"]["rollout_n"]) == (7, 1, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Which checkpoints there are


@pytest.mark.parametrize(
    ("save_freq", "keep", "expected"),
    h.some_rows(
        [(0, None, []), (-1, None, [5]), (2, None, [2, 4, 5]), (1, 2, [4, 5]), (1, 9, [1, 2, 3, 4, 5])], (1, 2, [4, 5])
    ),
)
def test_save_freq_and_max_ckpt_to_keep(task, tmp_path, save_freq, keep, expected):
    changes = dict(total_training_steps=5, save_freq=save_freq, max_ckpt_to_keep=keep)
    train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, tmp_path, **changes)))
    assert files.list_steps(tmp_path) == expected
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {f"global_step_{step}" for step in expected}


def change_record(folder, **fields):
    """Give a checkpoint other fields in trainer_state.json, and a manifest that fits."""
    written = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps(written | fields))
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest["files"]["trainer_state.json"] = files.size_and_hash(folder / "trainer_state.json")
    manifest.pop("sha256")
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": files.hash_of(manifest)}))


def test_auto_finds_the_newest_intact_checkpoint(task, unbroken, policy_of, tmp_path, capsys):
    ranks = policy_of(task.model)[2]
    assert resume.find_checkpoint("auto", tmp_path, ranks) is None
    for name in ("global_step_9", "global_step_10", "global_step_2", ".tmp-global_step_12-0a", "global_step_13_backup"):
        shutil.copytree(unbroken / "global_step_2", tmp_path / name)
    for step in (9, 10):
        change_record(tmp_path / f"global_step_{step}", step=step)
    (tmp_path / "global_step_11" / "state").mkdir(parents=True)
    (tmp_path / "global_step_x").mkdir()
    assert files.list_steps(tmp_path) == [2, 9, 10, 11]  # as numbers, not as text
    assert resume.find_checkpoint("auto", tmp_path, ranks) == tmp_path / "global_step_10"
    assert f"passed over: {tmp_path}/global_step_11: no MANIFEST.json" in capsys.readouterr().out
    assert resume.find_checkpoint("disable", tmp_path / "nowhere", ranks) is None


def test_a_named_checkpoint_is_refused_where_it_would_mix_two_runs(task, unbroken, policy_of, tmp_path):
    ranks = policy_of(task.model)[2]
    for folder, steps in (("one", (1, 2, 3)), ("other", (1,)), ("last", (3,))):
        for step in steps:
            shutil.copytree(unbroken / f"global_step_{step}", tmp_path / folder / f"global_step_{step}")
    one, named = tmp_path / "one", tmp_path / "one" / "global_step_2"
    for root in (one, tmp_path / "other", tmp_path / "last"):  # a later one; one of another run; both
        with pytest.raises(ValueError, match=f"holds checkpoints up to step {1 if root.name == 'other' else 3}, of"):
            resume.find_checkpoint(str(named), root, ranks)
    assert resume.find_checkpoint(str(named), tmp_path / "fresh", ranks) == named
    shutil.rmtree(one / "global_step_3")
    assert resume.find_checkpoint(str(named), one, ranks) == named
    other_way = one / ".." / "one" / "global_step_2"
    assert resume.find_checkpoint(str(other_way), one, ranks) == other_way


def test_a_checkpoint_that_was_renamed_in_the_folder_of_its_run_is_continued(unbroken, task, policy_of, tmp_path):
    ranks, renamed = policy_of(task.model)[2], tmp_path / "keep_2"
    shutil.copytree(unbroken / "global_step_2", renamed)
    assert resume.find_checkpoint(str(renamed), tmp_path, ranks) == renamed
    shutil.copytree(unbroken / "global_step_2", tmp_path / "global_step_2")
    assert resume.find_checkpoint(str(renamed), tmp_path, ranks) == renamed
    shutil.copytree(unbroken / "global_step_3", tmp_path / "global_step_3")
    with pytest.raises(ValueError, match="holds checkpoints up to step 3, of"):
        resume.find_checkpoint(str(renamed), tmp_path, ranks)


def test_a_run_that_goes_on_from_elsewhere_has_saved_nothing_itself(task, policy_of, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    trained = {"actor": (policy, optimizer)}
    saver = open_run(task, tmp_path / "one", ranks)
    path = save_and_wait(saver, 3, trained)
    leave(saver, 3, trained)
    saver = open_run(task, tmp_path / "two", ranks, resume_mode=str(path))
    leave(saver, 3, trained)
    assert files.list_steps(tmp_path / "two") == files.list_steps(tmp_path / "one") == [3]


@pytest.mark.thorough
def test_auto_passes_over_an_incomplete_checkpoint(task, unbroken, tmp_path):
    shutil.copytree(unbroken / "global_step_3", tmp_path / "global_step_3")
    for name in ("global_step_4", ".tmp-global_step_5-0a"):
        shutil.copytree(unbroken / "global_step_4", tmp_path / name)
    (tmp_path / "global_step_4" / "trainer_state.json").unlink()
    (tmp_path / ".tmp-global_step_5-0a" / "litter").write_text("of a run that was killed")
    train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, tmp_path, **BUSY)))
    lines = [line["step"] for line in h.read_jsonl(tmp_path / "metrics.jsonl") if "actor/loss" in line]
    assert lines == [4, 5]
    assert files.list_steps(tmp_path) == [3, 4, 5]
    h.assert_same(h.weights(tmp_path / "global_step_5"), h.weights(unbroken / "global_step_5"))
    assert not list(tmp_path.glob(".tmp*")) and not list(tmp_path.glob(".old*")) and not list(tmp_path.rglob("litter"))


@pytest.mark.parametrize("name", ["global_step_2", "global_step_77", ""])
def test_an_incomplete_checkpoint_is_refused_by_path(task, unbroken, tmp_path, name):
    shutil.copytree(unbroken / "global_step_2", tmp_path / "global_step_2")
    (tmp_path / "global_step_2" / "MANIFEST.json").unlink()
    path = tmp_path / name
    with pytest.raises(ValueError, match="not a complete checkpoint") as error:
        train_grpo.main(build(train_grpo.Args, **h.grpo_settings(task, tmp_path / "run", resume_mode=str(path))))
    assert f"--resume-mode {path}" in str(error.value) and "no MANIFEST.json" in str(error.value)


def test_saving_a_step_again_replaces_it(task, policy_of, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    first = h.weights(save_and_wait(saver, 1, trained))
    (tmp_path / "global_step_1" / "stale").write_text("")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    second = h.weights(save_and_wait(saver, 1, trained))
    h.assert_same(second, {name: tensor + 1.0 for name, tensor in first.items()})
    assert {p.name for p in tmp_path.iterdir()} == {"run.lock", "STATUS.json", "global_step_1"}
    assert not (tmp_path / "global_step_1" / "stale").exists()


def test_what_the_loop_carries_comes_back(task, policy_of, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    carried = {"kl_coef": 1 / 3, "groups": [{"ids": [1, 2], "logp": [-0.1, None]}] * 1000}  # no float loses a bit
    changing, counts = [1], np.int64([1, 2])
    save(saver, 1, trained, changing=changing, nested={"counts": [counts]})
    changing.append(2)
    counts += 1
    others = {"tensor": torch.tensor([[1], [2]]), "number": np.int64(3), "tuple": (4,), "keys": {7: None}}
    second = save_and_wait(saver, 2, trained, **carried | others)
    [then] = checkpoint.load_states(tmp_path / "global_step_1")
    assert then["changing"] == [1] and then["nested"]["counts"][0].tolist() == [1, 2]  # as they were
    plain = {"tensor": [[1], [2]], "number": 3, "tuple": [4], "keys": {"7": None}}
    assert checkpoint.load_states(second) == [carried | plain]
    assert checkpoint.load_states(save_and_wait(saver, 3, trained)) == [{}]
    assert checkpoint.load_states(None) == []


def test_a_run_that_leaves_saves_what_the_loop_carried_when_its_step_began(task, policy_of, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    mean, counts, seen = torch.zeros(2), {"7": [1]}, np.zeros((2, 3), np.int16)
    state = loop_state.encode(dict(mean=mean, counts=counts, seen=seen))
    mean += 1  # by a step that does not get to its end
    counts["7"].append(2)
    seen += 1
    saver.leave(3, trained, state)
    [then] = checkpoint.load_states(tmp_path / "global_step_3")
    assert then.pop("seen").tolist() == [[0, 0, 0], [0, 0, 0]] and then == {"mean": [0, 0], "counts": {"7": [1]}}


@pytest.mark.parametrize("dtype", [*loop_state.DTYPES, ">i4", ">f8"])
def test_arrays_come_back_as_they_were(tmp_path, dtype):
    """At any depth, of any shape and order in memory, and two with the same name are two."""
    whole = np.arange(24).reshape(2, 3, 4).astype(dtype)
    kept = [whole, whole.T, whole[:, ::2, 1], whole[1, 1, 1:1], np.array(whole[1, 2, 3])]
    state = {"a": kept[0], "deep": [{"a": kept[1]}, [kept[2], {"a": kept[3]}]], "number": kept[4], "word": "__array__"}
    loop_state.write(tmp_path, 0, loop_state.encode(state))
    loop_state.write(tmp_path, 1, loop_state.encode({}))
    loop_state.write(tmp_path, 2, loop_state.encode({"of": "nobody"}))
    [read, nothing] = loop_state.read(tmp_path, 2)
    assert nothing == {} and read.keys() == state.keys() and read["word"] == "__array__"
    found = [read["a"], read["deep"][0]["a"], read["deep"][1][0], read["deep"][1][1]["a"], read["number"]]
    for before, after in zip(kept, found, strict=True):
        assert isinstance(after, np.ndarray) and after.dtype == np.dtype(dtype).newbyteorder("=")
        assert after.shape == before.shape and np.array_equal(after, before)
        after += after.dtype.type(1)  # they may be written to, as before


class Counter:
    """What a user may carry around."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, "has a set in it"),
        (b"bytes", "has a bytes in it"),
        (Counter(), "has a Counter in it"),
        (collections.deque([1]), "has a deque in it"),
        (1j, "has a complex in it"),
        (np.array(["a", "bc"]), "has a ndarray of <U2 in it"),
        (np.array([None, {}]), "has a ndarray of object in it"),
        (np.array([1j]), "has a ndarray of complex128 in it"),
        (np.ma.masked_array([1, 2], [True, False]), "has a MaskedArray of int64 in it"),
        ({"__array__": "0"}, "has a dict with the key '__array__' in it"),
        ({(1, 2): 3}, "keys must be str, int, float, bool or None, not tuple"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_type_at_any_depth(value, words):
    for state in ({"seen": value}, {"deep": [{"inner": (np.zeros(2), value)}]}):
        with pytest.raises(TypeError, match=re.escape(words)):
            loop_state.encode(state)


@pytest.mark.parametrize("change", ["no array", "no JSON", "a pickle", "nothing"])
def test_a_state_that_does_not_fit_together_is_refused_by_file(tmp_path, change):
    loop_state.write(tmp_path, 0, loop_state.encode({"x": np.zeros(3), "y": np.ones(2)}))
    if change == "no array":
        save_file({"0": torch.zeros(3)}, tmp_path / "rank_0.safetensors")
    if change == "no JSON":
        (tmp_path / "rank_0.json").write_text('{"x": ')
    if change == "a pickle":
        (tmp_path / "rank_0.safetensors").write_bytes(pickle.dumps({"0": np.zeros(3)}))
    if change == "nothing":
        (tmp_path / "rank_0.json").unlink()
    words = "an older version has written it" if change == "nothing" else r"rank_0\.json is not loaded: \w+Error\("
    with pytest.raises(ValueError, match=words):
        loop_state.read(tmp_path, 1)


def test_loading_brings_back_weights_moments_and_step(task, policy_of, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    for k in range(3):
        for i, parameter in enumerate(policy.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (i + 1) * (-1) ** k)
        optimizer.step()
    saved = save_and_wait(open_run(task, tmp_path, ranks), 3, {"actor": (policy, optimizer)})
    expected = {name: tensor.clone() for name, tensor in full_tensors(policy)}
    fresh, fresh_optimizer, _ = policy_of(task.model)
    checkpoint.load(saved, {"actor": (fresh, fresh_optimizer)})
    h.assert_same(dict(full_tensors(fresh)), expected)
    for old, new in zip(policy.parameters(), fresh.parameters(), strict=True):
        before, after = optimizer.state[old], fresh_optimizer.state[new]
        assert before.keys() == after.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert after["step"] == before["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(after[name].full_tensor(), before[name].full_tensor())
            assert before[name].full_tensor().abs().min() > 0


def test_rows_are_found_in_whichever_files_have_them(task, policy_of, tmp_path):
    """Three ranks have written 60 %, 40 % and nothing of the rows of each tensor, another order than torch's."""
    policy, optimizer, ranks = policy_of(task.model)
    step_by(optimizer, 0.1)
    expected = state_of({"actor": (policy, optimizer)})
    saved = save_and_wait(open_run(task, tmp_path, ranks), 1, {"actor": (policy, optimizer)})
    parts, shards = [{}, {}, {}], [{}, {}, {}]
    for name, x in load_file(saved / "state" / "rank_0.safetensors").items():
        cuts = (0, len(x) * 6 // 10, len(x), len(x)) if x.ndim else (0, 1)
        for rank, (start, end) in enumerate(itertools.pairwise(cuts)):
            parts[rank][name] = x[start:end].clone() if x.ndim else x
            shards[rank][name] = [start, list(x.shape)]
    for rank in range(3):
        metadata = {"shards": json.dumps(shards[rank])}
        save_file(parts[rank], saved / "state" / f"rank_{rank}.safetensors", metadata=metadata)
    written = json.loads((saved / "trainer_state.json").read_text())
    (saved / "trainer_state.json").write_text(json.dumps(written | {"world_size": 3}))
    shutil.copy(saved / "state" / "rank_0.safetensors", saved / "state" / "rank_3.safetensors")  # of nobody
    fresh, fresh_optimizer, _ = policy_of(task.model)
    checkpoint.load(saved, {"actor": (fresh, fresh_optimizer)})
    h.assert_same(state_of({"actor": (fresh, fresh_optimizer)}), expected)
    (saved / "state" / "rank_1.safetensors").unlink()
    with pytest.raises(ValueError, match="is not there as a whole, which has the shape"):
        checkpoint.load(saved, {"actor": (fresh, fresh_optimizer)})


def test_an_optimizer_that_has_not_stepped_yet_is_saved_as_such(task, policy_of, tmp_path):
    """As the policy's, while only the critic learns; its moments come between two saves."""
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    first = save_and_wait(saver, 1, trained)
    assert {name.split("/")[1] for name in h.saved_state(first)} == {"model"} and not optimizer.state
    step_by(optimizer, 0.1)
    expected = state_of(trained)
    h.assert_same(h.saved_state(save_and_wait(saver, 2, trained)), expected)
    fresh, fresh_optimizer, _ = policy_of(task.model)
    checkpoint.load(first, {"actor": (fresh, fresh_optimizer)})
    assert not fresh_optimizer.state
    step_by(fresh_optimizer, 0.1)  # as if it had never been away
    h.assert_same(state_of({"actor": (fresh, fresh_optimizer)}), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Saved while training goes on


class SlowDisk:
    """A `_write` that waits for `go_on`, and remembers what it was given."""

    def __init__(self, write=checkpoint.Saver._write):
        self.write, self.go_on, self.copies, self.steps = write, threading.Event(), [], []

    def __get__(self, saver, owner):
        return partial(self, saver)

    def __call__(self, saver, step, *rest):
        assert self.go_on.wait(600)
        self.copies.append(saver.host.tensors)
        self.steps.append(step)
        self.write(saver, step, *rest)


@pytest.fixture
def slow_disk(monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(checkpoint.Saver, "_write", disk)
    yield disk
    disk.go_on.set()


def step_by(optimizer, size):
    """One optimizer step with gradients of `size`."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, size)
    optimizer.step()


def state_of(trained):
    """What `h.saved_state` should find: a copy of all parameters and moments."""
    result = {}
    for name, (module, optimizer) in trained.items():
        for key, parameter in module.named_parameters():
            result[f"{name}/model/{key}"] = parameter.full_tensor().clone()
            for kind, x in optimizer.state[parameter].items():
                whole = x.full_tensor() if isinstance(x, DTensor) else x
                result[f"{name}/optimizer/{key}/{kind}"] = whole.clone()
    return result


def test_what_is_saved_is_of_the_moment_of_the_call(task, policy_of, slow_disk, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    step_by(optimizer, 0.1)
    expected = state_of(trained), {name: x.clone() for name, x in full_tensors(policy)}
    save(saver, 1, trained)
    assert files.list_steps(tmp_path) == []  # nothing is written yet, and training goes on
    saver.wait_until_copied()  # as `Run` does before each optimizer step
    step_by(optimizer, -0.2)
    changed = state_of(trained)
    assert not any(torch.equal(x, changed[name]) for name, x in expected[0].items())
    slow_disk.go_on.set()
    save(saver, 2, trained)  # waits for the first one
    assert files.list_steps(tmp_path)[0] == 1
    saver.close("completed", 10)
    for step, (state, weights) in {1: expected, 2: (changed, dict(full_tensors(policy)))}.items():
        h.assert_same(h.saved_state(tmp_path / f"global_step_{step}"), state)
        h.assert_same(h.weights(tmp_path / f"global_step_{step}"), weights)
    # The second copy was made in the memory of the first.
    first, second = (x["actor/model/model.norm.weight"] for x in slow_disk.copies)
    assert first.data_ptr() == second.data_ptr() != policy.model.norm.weight.to_local().data_ptr()


def test_a_copy_that_fails_costs_one_checkpoint_and_stops_nobody(task, policy_of, monkeypatch, tmp_path, capsys):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}

    def no_memory(like, *, pinned):
        raise RuntimeError("cannot allocate memory")

    monkeypatch.setattr(checkpoint_tensors, "make_host", no_memory)
    save(saver, 1, trained)
    step_by(optimizer, 0.1)
    saver.settle()
    assert saver.failures == 1 and files.list_steps(tmp_path) == []
    assert sys.getswitchinterval() == pytest.approx(0.005)
    assert "CHECKPOINT OF STEP 1 NOT WRITTEN (1 in a row): rank 0: RuntimeError: cannot allo" in capsys.readouterr().out
    monkeypatch.undo()
    h.assert_same(h.saved_state(save_and_wait(saver, 2, trained)), state_of(trained))
    saver.close("completed", 10)


def test_a_copy_goes_through_a_small_buffer_and_lets_go_of_what_it_copied(task, policy_of, monkeypatch, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    given, copy = [], checkpoint.Saver._copy

    def noting_copy(saver, own, stream):
        given.append((own, [len(piece) for piece in own.pieces]))
        copy(saver, own, stream)

    monkeypatch.setattr(checkpoint.Saver, "_copy", noting_copy)
    monkeypatch.setattr(checkpoint_tensors, "STAGING", 1001)  # no multiple of any tensor's item
    for step in (1, 2):
        step_by(optimizer, 0.1 * step)
        h.assert_same(h.saved_state(save_and_wait(saver, step, trained)), state_of(trained))
    saver.close("completed", 10)
    size = sum(x.numel() * x.element_size() for x in state_of(trained).values())
    for own, lengths in given:
        assert own.tensors == {} and own.pieces == []  # a tensor that the main thread gives up is not kept by the save
        assert max(lengths) == 1001 == len(saver.host.staging)
        assert sum(lengths) == size


def test_while_a_save_is_written_threads_hand_on_pythons_lock_sooner(task, policy_of, slow_disk, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    saver = open_run(task, tmp_path, ranks)
    save(saver, 1, {"actor": (policy, optimizer)})
    saver.wait_until_copied()
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    slow_disk.go_on.set()
    saver.settle()
    assert sys.getswitchinterval() == pytest.approx(0.005)
    saver.close("completed", 10)


def test_several_modules_make_the_round_trip(task, policy_of, tmp_path):
    """A policy and a critic."""

    def make():
        _, _, ranks = policy_of(task.model)
        policy = models.load_pretrained(task.model, ranks)
        torch.manual_seed(0)
        modules = policy, models.load_pretrained(task.model, ranks, ScalarModel(torch.nn.init.normal_))
        trained = {}
        for name, module in zip(("actor", "critic"), modules, strict=True):
            module = shard(module, ranks)
            trained[name] = module, torch.optim.AdamW(module.parameters(), lr=1e-3)
        return trained, ranks

    trained, ranks = make()
    for _, optimizer in trained.values():
        step_by(optimizer, 0.1)
    expected = state_of(trained)
    assert {"actor/model/model.norm.weight", "critic/model/score.weight"} < expected.keys()
    saved = save_and_wait(open_run(task, tmp_path / "run", ranks), 3, trained)
    assert {p.name for p in saved.iterdir() if p.is_dir()} == {"state", "loop", "huggingface", "huggingface_critic"}
    h.assert_same(h.saved_state(saved), expected)

    fresh, _ = make()
    assert not torch.equal(
        state_of(trained)["critic/model/score.weight"], fresh["critic"][0].score.weight.full_tensor()
    )
    checkpoint.load(saved, fresh)
    h.assert_same(state_of(fresh), expected)

    model, info = AutoModelForCausalLM.from_pretrained(saved / "huggingface", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    critic, info = AutoModelForSequenceClassification.from_pretrained(
        saved / "huggingface_critic", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, exported in (("actor", model), ("critic", critic)):
        parameters = dict(exported.named_parameters())
        h.assert_same(parameters, {n: x for n, x in full_tensors(fresh[name][0]) if n in parameters})
    assert AutoTokenizer.from_pretrained(saved / "huggingface_critic").eos_token == "<|im_end|>"

    with pytest.raises(ValueError, match=r"critic/model/model\.embed_tokens\.weight is not part of the model"):
        checkpoint.load(saved, {"actor": fresh["actor"]})


def status_of(root):
    """state and step of STATUS.json."""
    status = json.loads((root / "STATUS.json").read_text())
    assert status["total_steps"] == 10
    return status["state"], status["step"]


def test_the_status_says_how_a_run_stands(task, policy_of, slow_disk, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    assert status_of(tmp_path) == ("running", 0)
    save(saver, 4, trained)
    assert status_of(tmp_path) == ("running", 0)  # not on disk
    slow_disk.go_on.set()
    saver.settle()
    assert status_of(tmp_path) == ("running", 4)
    del saver  # it dies, and its lock with it
    saver = open_run(task, tmp_path, ranks)
    assert status_of(tmp_path) == ("running", 4) and saver.saved == 4
    save(saver, 6, trained)
    saver.close("completed", 10)
    assert status_of(tmp_path) == ("completed", 10)
    assert files.list_steps(tmp_path) == [4, 6]


def test_whatever_a_save_fails_of_nothing_is_left_of_it(task, policy_of, tmp_path, monkeypatch, capsys):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}

    def no_memory(*_, **__):
        raise MemoryError("no memory to hash with")

    monkeypatch.setattr(files, "size_and_hash", no_memory)
    save(saver, 1, trained)
    saver.settle()
    assert saver.failures == 1 and {p.name for p in tmp_path.iterdir()} == {"run.lock", "STATUS.json"}
    assert (
        "CHECKPOINT OF STEP 1 NOT WRITTEN (1 in a row): rank 0: MemoryError: no memory to hash"
        in capsys.readouterr().out
    )
    monkeypatch.undo()
    save_and_wait(saver, 2, trained)


def test_leaving_saves_what_is_not_saved(task, policy_of, slow_disk, tmp_path):
    policy, optimizer, ranks = policy_of(task.model)
    trained = {"actor": (policy, optimizer)}
    slow_disk.go_on.set()
    leave(open_run(task, tmp_path, ranks), 0, trained)
    assert (slow_disk.steps, status_of(tmp_path)) == ([], ("stopped", 0))  # nothing to save

    saver = open_run(task, tmp_path, ranks)
    save(saver, 2, trained)
    leave(saver, 3, trained, kl_coef=0.5)
    assert (slow_disk.steps, status_of(tmp_path)) == ([2, 3], ("stopped", 3))
    assert checkpoint.load_states(tmp_path / "global_step_3") == [{"kl_coef": 0.5}]

    saver = open_run(task, tmp_path, ranks)
    assert saver.saved == 3
    leave(saver, 3, trained)
    assert (slow_disk.steps, status_of(tmp_path)) == ([2, 3], ("stopped", 3))  # it is what the run began with

    saver = open_run(task, tmp_path, ranks)
    slow_disk.go_on.clear()
    save(saver, 5, trained)
    threading.Timer(0.2, slow_disk.go_on.set).start()
    leave(saver, 5, trained)  # it is being written: not a second time, but to its end
    assert (slow_disk.steps, status_of(tmp_path)) == ([2, 3, 5], ("stopped", 5))
    assert resume.find_checkpoint("auto", tmp_path, ranks) == tmp_path / "global_step_5"


def test_leaving_tries_again_what_has_failed_and_never_says_stopped_if_nothing_was_saved(
    task, policy_of, monkeypatch, tmp_path
):
    policy, optimizer, ranks = policy_of(task.model)
    saver, trained = open_run(task, tmp_path, ranks), {"actor": (policy, optimizer)}
    monkeypatch.setattr(checkpoint, "FREE_SPACE", 1e9)
    save(saver, 2, trained)
    saver.settle()
    assert saver.failures == 1
    monkeypatch.undo()
    leave(saver, 2, trained)
    assert status_of(tmp_path) == ("stopped", 2) and files.list_steps(tmp_path) == [2]

    saver = open_run(task, tmp_path, ranks)
    monkeypatch.setattr(checkpoint, "FREE_SPACE", 1e9)
    with pytest.raises(RuntimeError, match="the last checkpoint could not be written"):
        leave(saver, 3, trained)
    assert status_of(tmp_path) == ("running", 2) and files.list_steps(tmp_path) == [2]


def test_a_batch_is_kept_for_another_look(task, policy_of, tmp_path):
    ranks = policy_of(task.model)[2]
    saver = open_run(task, tmp_path, ranks)
    mask = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    logp = torch.tensor([[0.0, float("nan"), -2.0], [0.0, -0.5, 0.0]])
    batch = Batch(torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([3, 2]), mask, logp, advantages=mask)
    name = saver.folder.save_batch(7, batch)
    assert name == str(tmp_path / "bad_batch_step_7_rank_*.safetensors")
    read = load_file(tmp_path / "bad_batch_step_7_rank_0.safetensors")
    assert read.keys() == {"input_ids", "lengths", "response_mask", "rollout_logp", "advantages"}
    assert read["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]] and read["lengths"].tolist() == [3, 2]
    assert torch.allclose(read["rollout_logp"], logp, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(read["response_mask"], mask) and torch.equal(read["advantages"], mask)


# ---------------------------------------------------------------------------------------------------------------------
# What may change when a run is resumed


@pytest.fixture(scope="module")
def finished(task, tmp_path_factory):
    """An SFT run of two steps at a constant learning rate."""
    folder = tmp_path_factory.mktemp("finished")
    sft.main(build(sft.Args, **h.sft_settings(task, folder, total_training_steps=2, lr_scheduler_type="constant")))
    h.leave_distributed()
    return folder


def go_on(task, finished, tmp_path, **changes):
    """The run again, for two more steps and with changed arguments, in a copy of its folder."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    settings = h.sft_settings(task, run_dir, total_training_steps=4, lr_scheduler_type="constant")
    sft.main(build(sft.Args, **settings | changes))
    return run_dir


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(lr=5e-3), "--lr: was 0.004, is 0.005"),
        (dict(train_batch_size=8), "--train-batch-size: was 16, is 8"),
        (dict(seed=1), "--seed: was 0, is 1"),
        (dict(max_length=127), "--max-length: was 128, is 127"),
        (dict(lr_scheduler_type="cosine"), "steps that shape the learning rate: were 2, are 4"),
    ],
)
def test_settings_that_decide_what_is_learned_must_stay(task, finished, tmp_path, changes, words):
    with pytest.raises(ValueError, match="comes from a run with other settings") as error:
        go_on(task, finished, tmp_path, **changes)
    assert words in str(error.value) and "--force-resume" in str(error.value)
    assert files.list_steps(tmp_path / "run") == [2]


def test_force_resume_goes_on_and_says_what_has_changed(task, finished, tmp_path, capsys):
    run_dir = go_on(task, finished, tmp_path, lr=5e-3, seed=1, force_resume=True)
    assert files.list_steps(run_dir) == [2, 4]
    assert "--lr: was 0.004, is 0.005\n--seed: was 0, is 1\n" in capsys.readouterr().out
    assert [x["train/lr"] for x in h.read_jsonl(run_dir / "metrics.jsonl")] == [4e-3, 4e-3, 5e-3, 5e-3]


def test_other_settings_may_change(task, finished, tmp_path):
    moved = shutil.copy(task.sft, tmp_path / "moved.parquet")  # the same rows under another name
    changes = dict(
        train_files=(moved,),
        val_files=(h.few_rows(task.sft, tmp_path),),
        test_freq=1,
        save_freq=1,
        max_ckpt_to_keep=2,
        max_token_len_per_gpu=512,
        activation_checkpointing="none",
        log_freq=1,
        experiment_name="renamed",
        resume_mode=str(tmp_path / "run" / "global_step_2"),
    )
    assert files.list_steps(go_on(task, finished, tmp_path, **changes)) == [3, 4]


def test_another_script_and_flags_that_one_side_lacks_are_differences(task):
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    args = build(train_grpo.Args, model=task.model, train_files=(task.train,))
    then = resume.record_of(args, tokenizer, 10)
    assert then["script"] == "train_grpo"
    free, defaults = flags.marked(args, flags.FREE), then["args"]
    assert resume.differences(then, then, defaults, free) == []
    own = {"new_flag": 3, **then["args"]}
    assert resume.differences(then, then | {"args": own}, defaults | {"new_flag": 3}, free) == []
    changed = resume.differences(then, then | {"args": own}, defaults | {"new_flag": 4}, free)
    assert changed == ["--new-flag: was 4, is 3"]  # it was given when the script got it
    now = then | {"script": "train_dapo", "args": own}
    assert resume.differences(then, now, defaults | {"new_flag": 3}, free) == [
        "script: was train_grpo.py, is train_dapo.py"
    ]


def test_flags_that_a_script_no_longer_has_are_named_in_one_sentence(task, finished, tmp_path, capsys):
    """Whatever they were: their default of that time is not known. Free or not, too."""
    folder = shutil.copytree(finished, tmp_path / "run") / "global_step_2"
    args = json.loads((folder / "trainer_state.json").read_text())["args"]
    change_record(folder, args=args | {"adv_estimator": "grpo", "loss_mode": "vanilla"})
    settings = h.sft_settings(task, tmp_path / "run", total_training_steps=4, lr_scheduler_type="constant")
    words = (
        "sft.py does not have these flags; --force-resume continues without them: --adv-estimator grpo, "
        "--loss-mode vanilla"
    )
    with pytest.raises(ValueError, match="comes from a run with other settings") as error:
        sft.main(build(sft.Args, **settings))
    assert str(error.value).splitlines()[1:] == [words]
    h.leave_distributed()
    sft.main(build(sft.Args, **settings, force_resume=True))
    assert files.list_steps(tmp_path / "run") == [2, 4] and words in capsys.readouterr().out


def test_a_tokenizer_that_gives_other_ids_is_another_one(task):
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    args = build(train_grpo.Args, model=task.model, train_files=(task.train,))
    before = resume.record_of(args, tokenizer, 10)["tokenizer_sha256"]
    template = TemplateProcessing(single="$0 <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    assert resume.record_of(args, tokenizer, 10)["tokenizer_sha256"] != before


def test_changed_data_is_refused(task, finished, tmp_path):
    rows = pq.read_table(task.sft).to_pylist()
    rows[200]["response"] += " "
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "changed.parquet")
    with pytest.raises(ValueError, match="contents of --train-files: sha256 was") as error:
        go_on(task, finished, tmp_path, train_files=(str(tmp_path / "changed.parquet"),))
    for file in (task.sft, tmp_path / "changed.parquet"):
        assert hashlib.sha256(open(file, "rb").read()).hexdigest() in str(error.value)


def test_another_model_or_tokenizer_is_refused(task, finished, tmp_path):
    model = shutil.copytree(task.model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template += " "
    tokenizer.save_pretrained(model)
    with pytest.raises(ValueError, match="tokenizer: sha256 was") as error:
        go_on(task, finished, tmp_path, model=str(model))
    assert f"--model: was {task.model}, is {model}" in str(error.value)


def test_a_checkpoint_beyond_the_last_step_is_refused(task, finished, tmp_path):
    with pytest.raises(
        ValueError, match="global_step_2 is beyond the 1 steps of this run; raise --total-training-steps"
    ):
        go_on(task, finished, tmp_path, total_training_steps=1)


def name_of(args):
    """The folder of a run with these Args."""
    return str(run_folder.folder_of(args.checkpoints, args.logging.project_name, args.logging.experiment_name))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            dict(default_local_dir="x/{project}"),
            r"--default-local-dir 'x/{project}': the placeholders are {project_name}",
        ),
        (dict(default_local_dir="x/{0}"), "the placeholders are {project_name}"),
        (dict(default_local_dir="x/{"), "the placeholders are {project_name}"),
        (dict(default_local_dir="x\0y"), r"--default-local-dir 'x\\x00y' is empty or holds control characters"),
        (dict(default_local_dir=""), "--default-local-dir '' is empty"),
        (dict(experiment_name="../other"), "--experiment-name '../other' must be 1 to 100 letters"),
        (dict(experiment_name="/tmp/x"), "--experiment-name '/tmp/x' must be"),
        (dict(experiment_name=".hidden"), "--experiment-name '.hidden' must be"),
        (dict(experiment_name=""), "--experiment-name '' must be"),
        (dict(experiment_name="x" * 101), "--experiment-name 'x+' must be"),
        (dict(project_name="a\nb"), r"--project-name 'a\\nb' must be"),
        (dict(project_name="~"), "--project-name '~' must be"),
    ],
)
def test_names_that_are_no_folder_are_refused(settings, words):
    for module in SCRIPTS:
        with pytest.raises(ValueError, match=words):
            name_of(build(module.Args, **settings))


def test_names_fill_the_placeholders():
    args = build(
        sft.Args, project_name="p-1", experiment_name="e_2.b", default_local_dir="/a b/{experiment_name}/{project_name}"
    )
    assert name_of(args) == "/a b/e_2.b/p-1"
    assert name_of(sft.Args()) == "runs/glassrl/sft"
