"""float16: runs survive overflows, are resumed with their scale, and sample in float16 too."""

import importlib
import json
import math
import os
import signal
from functools import partial

import helpers_scripts as h
import launch
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import eval as evaluation
import sft
import train_grpo
from extras.engines import hf
from extras.loss_scale import LossScale
from rl.flags import build
from rl.model import sharding
from rl.run.checkpoint_files import list_steps
from rl.scoring.pool import Scorer


def settings_of(task, folder, **changes):
    return h.grpo_settings(task, folder, dtype="float16", **changes)


def begin_at(scale):
    """From now on models begin with this scale."""
    sharding.LossScale = partial(LossScale, scale)


def kill_in_step(n, scale):
    begin_at(scale)
    Scorer.collect = h.crash_at(0, n)


def metrics_of(folder):
    return h.timeless(h.read_jsonl(folder / "metrics.jsonl"))


def loops_of(folder, step):
    return [json.loads(x.read_text()) for x in sorted((folder / f"global_step_{step}" / "loop").glob("*.json"))]


@pytest.fixture
def start_scale(monkeypatch, runs_here):
    """start_scale(scale): models begin with it."""
    monkeypatch.setattr(sharding, "LossScale", sharding.LossScale)  # to be undone
    return begin_at


def test_four_overflows_in_a_row_do_not_stop_a_run(task, tmp_path, start_scale):
    start_scale(2.0**24)
    train_grpo.main(build(train_grpo.Args, **settings_of(task, tmp_path, total_training_steps=9, save_freq=1)))
    lines = metrics_of(tmp_path)
    skipped = [int(x["actor/skipped_for_overflow"]) for x in lines]
    count = skipped[-1]
    assert 4 <= count < 9 and skipped == [min(i, count) for i in range(1, 10)]
    assert [x["actor/loss_scale"] for x in lines] == [2.0 ** (24 - x) for x in skipped]
    assert [x["actor/grad_norm"] == 0 for x in lines] == [x <= count for x in range(1, 10)]
    assert all(x["actor/skipped_updates"] == 0 for x in lines)
    original = {name: x.half() for name, x in h.original(task).items()}
    for step in range(1, 10):
        exported = load_file(tmp_path / f"global_step_{step}" / "huggingface" / "model.safetensors")
        assert {x.dtype for x in exported.values()} == {torch.float16}
        assert (h.distance(exported, original) == 0) == (step <= count)
        state = h.saved_state(tmp_path / f"global_step_{step}")
        assert any("optimizer" in name for name in state) == (step > count)
        assert state["actor/model/model.norm.weight"].dtype == torch.float32
    saved = {"scale": 2.0 ** (24 - count), "clean": 9 - count, "skipped": count}
    assert loops_of(tmp_path, 9) == [{"loss_scales": {"actor": saved}}]
    assert AutoConfig.from_pretrained(tmp_path / "global_step_9" / "huggingface").dtype == torch.float16
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_9" / "huggingface")
    assert plain.dtype == torch.float16


def nan_from_scale_4():
    begin_at(4.0)
    original = train_grpo.token_logprobs
    train_grpo.token_logprobs = lambda *args, **options: [x * math.nan for x in original(*args, **options)]


def test_three_updates_without_numbers_at_the_smallest_scale_stop_a_run(task, tmp_path):
    settings = settings_of(task, tmp_path / "run", total_training_steps=9)
    run = launch.fork("train_grpo", settings, tmp_path / "log", fault=nan_from_scale_4)
    assert run.ends() == [1]
    assert "RuntimeError: step 5: three updates in a row were useless" in run.log.read_text()
    lines = metrics_of(tmp_path / "run")
    assert [x["actor/loss_scale"] for x in lines] == [2, 1, 1, 1]
    assert [x["actor/skipped_for_overflow"] for x in lines] == [1, 2, 2, 2]
    assert [x["actor/skipped_updates"] for x in lines] == [0, 0, 1, 1]
    assert [x["actor/grad_norm"] for x in lines] == [0, 0, None, None]


def test_a_run_that_is_killed_goes_on_with_its_scale(task, tmp_path, start_scale):
    settings = dict(total_training_steps=7, save_freq=2)
    one, two = (settings_of(task, tmp_path / name, **settings) for name in ("one", "two"))
    unbroken = launch.fork("train_grpo", one, tmp_path / "log", fault=partial(begin_at, 2.0**22))
    assert unbroken.ends() == [0]
    killed = launch.fork("train_grpo", two, tmp_path / "log", fault=partial(kill_in_step, 6, 2.0**22))
    assert killed.ends() == [-signal.SIGKILL] and list_steps(tmp_path / "two") == [2, 4]
    skipped = [x["actor/skipped_for_overflow"] for x in metrics_of(tmp_path / "one")]
    assert skipped[3] == skipped[-1] > 0  # the scale has changed before the checkpoint, and is right
    train_grpo.main(build(train_grpo.Args, **two))  # its model begins with 2 ** 16
    assert metrics_of(tmp_path / "two")[-3:] == metrics_of(tmp_path / "one")[-3:]
    assert loops_of(tmp_path / "two", 7) == loops_of(tmp_path / "one", 7)
    h.assert_same(h.saved_state(tmp_path / "two" / "global_step_7"), h.saved_state(tmp_path / "one" / "global_step_7"))


def overflow_on_rank_1():
    """Its gradients are 2 ** 12 times too large."""
    if os.environ["RANK"] == "1":
        original = train_grpo.backward
        train_grpo.backward = lambda model, loss, **last: original(model, 2.0**12 * loss, **last)


def test_if_one_rank_overflows_all_skip(task, tmp_path):
    settings = settings_of(task, tmp_path / "run", total_training_steps=16, save_freq=1, max_ckpt_to_keep=None)
    run = launch.fork("train_grpo", settings, tmp_path / "log", fault=overflow_on_rank_1, ranks=2)
    assert run.ends() == [0, 0], run.log.read_text()
    lines = metrics_of(tmp_path / "run")
    skipped = [0, *(int(x["actor/skipped_for_overflow"]) for x in lines)]
    # Without the fault nothing overflows at 2 ** 16, and at 2 ** 4 nothing can with it.
    assert 4 <= skipped[-1] <= 12 and lines[-1]["actor/loss_scale"] == 2.0 ** (16 - skipped[-1])
    before = {name: x.half() for name, x in h.original(task).items()}
    for step in range(1, 17):
        one, two = loops_of(tmp_path / "run", step)
        assert one == two and one["loss_scales"]["actor"]["skipped"] == skipped[step]
        after = load_file(tmp_path / "run" / f"global_step_{step}" / "huggingface" / "model.safetensors")
        assert (h.distance(after, before) == 0) == (skipped[step] > skipped[step - 1])
        before = after


def test_sft_goes_on_after_an_overflow(task, tmp_path, start_scale):
    start_scale(2.0**24)
    settings = h.sft_settings(task, tmp_path, dtype="float16", total_training_steps=16, log_freq=0)
    sft.main(build(sft.Args, **settings))
    lines = metrics_of(tmp_path)
    assert lines[0]["actor/skipped_for_overflow"] == 1 and lines[0]["train/grad_norm"] == 0
    assert lines[-1]["actor/skipped_for_overflow"] < 12 and lines[-1]["train/grad_norm"] > 0
    assert lines[-1]["train/loss"] < lines[0]["train/loss"] - 0.1


@pytest.mark.parametrize(
    ("script", "names"),
    h.some_rows(
        [
            ("train_ppo", "actor critic"),
            ("train_dapo", "actor"),
            ("train_reinforce", "actor"),
            ("train_dpo", "actor"),
            ("train_distill", "actor"),
            ("train_prime", "actor prm"),
            ("train_reward", "reward_model"),
        ],
        ("train_ppo", "actor critic"),
        ("train_prime", "actor prm"),
    ),
)
def test_each_model_that_learns_has_a_scale_of_its_own(script, names, task, tmp_path, runs_here):
    module, settings = importlib.import_module(script), getattr(h, f"{script.removeprefix('train_')}_settings")
    module.main(build(module.Args, **settings(task, tmp_path, dtype="float16", total_training_steps=2)))
    for line in metrics_of(tmp_path):
        if "actor/lr" in line or "train/lr" in line:
            for name in names.split():
                assert line[f"{name}/loss_scale"] == 2.0 ** (16 - line[f"{name}/skipped_for_overflow"])
            assert len([name for name in line if name.endswith("/loss_scale")]) == len(names.split())
    assert sorted(loops_of(tmp_path, 2)[0]["loss_scales"]) == names.split()


def test_adapters_learn_in_float32_on_weights_in_float16(task, tmp_path, runs_here):
    train_grpo.main(build(train_grpo.Args, **settings_of(task, tmp_path, lora_rank=4, lr=1e-2)))
    assert {x.dtype for x in h.saved_state(tmp_path / "global_step_2").values()} == {torch.float32}
    lines = metrics_of(tmp_path)
    assert all(x["actor/grad_norm"] > 0 and x["rollout/logprob_gap_mean"] < 1e-3 for x in lines)
    exported = load_file(tmp_path / "global_step_2" / "huggingface" / "model.safetensors")
    assert {x.dtype for x in exported.values()} == {torch.float16}


def test_engine_and_evaluation_compute_in_float16(task, tmp_path, monkeypatch, runs_here):
    dtypes, make = [], hf.Engine.__init__

    def noted(self, *args, **options):
        make(self, *args, **options)
        dtypes.append({x.dtype for x in self.model.parameters()})

    monkeypatch.setattr(hf.Engine, "__init__", noted)
    train_grpo.main(build(train_grpo.Args, **settings_of(task, tmp_path / "run", total_training_steps=1)))
    h.leave_distributed()
    rewards = dict(custom_reward_function=(task.reward,), reward_workers=1)
    lengths = dict(max_prompt_length=32, max_response_length=4)
    for dtype in ("float16", "auto"):
        evaluation.main(
            build(
                evaluation.Args,
                model=task.model,
                val_files=(task.test,),
                engine="hf",
                dtype=dtype,
                max_samples=2,
                **rewards,
                **lengths,
            )
        )
        h.leave_distributed()
    assert dtypes == [{torch.float16}, {torch.float16}, {torch.float32}]


def test_a_run_in_another_precision_is_another_run(task, tmp_path, runs_here):
    train_grpo.main(build(train_grpo.Args, **settings_of(task, tmp_path, total_training_steps=1)))
    h.leave_distributed()
    settings = h.grpo_settings(task, tmp_path, total_training_steps=2)
    with pytest.raises(ValueError, match="--dtype: was float16, is auto"):
        train_grpo.main(build(train_grpo.Args, **settings))
    h.leave_distributed()
    train_grpo.main(build(train_grpo.Args, **settings, force_resume=True))
    last = metrics_of(tmp_path)[-1]
    assert last["step"] == 2 and "actor/loss_scale" not in last
    assert loops_of(tmp_path, 2) == [{}]
