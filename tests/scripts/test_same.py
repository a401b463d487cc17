"""tests/same.py sees every difference, and leaves out what a clock or the use of memory decides."""

import json
import re
from pathlib import Path

import same
import torch
from launch import ROOT
from safetensors.torch import save_file

NAMES = "|".join(["timing_s/", "memory_gb/", "perf/", "reward/seconds_", "environment/seconds", "trainer/idle_ratio"])


def write_run(folder: Path, *, loss: float = 0.5, seconds: float = 1.0, weight: float = 2.0, coef: float = 0.1) -> dict:
    """The facts of a run of two steps with a checkpoint."""
    checkpoint = folder / "global_step_2"
    for name in ("huggingface", "state", "loop"):
        (checkpoint / name).mkdir(parents=True)
    lines = [{"step": 1, "actor/loss": 0.25, "timing_s/gen": seconds}, {"step": 2, "time": seconds, "actor/loss": loss}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, weight])}
    save_file(weights, checkpoint / "huggingface" / "model.safetensors")
    save_file({"actor/optimizer/b/exp_avg": torch.tensor([weight])}, checkpoint / "state" / "rank_0.safetensors")
    state = {"kl_coef": coef, "surplus": [[{"score": ["", 1.0, {}, "ok", seconds]}]]}
    (checkpoint / "loop" / "rank_0.json").write_text(json.dumps(state))
    (checkpoint / "trainer_state.json").write_text(json.dumps({"folder": str(folder)}))  # differs, and decides nothing
    return same.facts(folder, "", ())


def difference(tmp_path: Path, **changes: float) -> str:
    """What is said of a run and the same with changes."""
    folders = tmp_path / "old", tmp_path / "new"
    return same.first_difference(*folders, write_run(folders[0]), write_run(folders[1], **changes))


def test_runs_that_differ_in_seconds_alone_are_the_same(tmp_path):
    assert difference(tmp_path, seconds=7.0) == ""
    found = same.facts(tmp_path / "old", "", ())
    assert len(found) == 2 + 2 + 2 + 1 + 4  # metrics, steps, weights, moments, the state of the loop


def test_another_metric_is_named_with_its_step_and_both_values(tmp_path):
    expected = "step 2: actor/loss: 0.5 | 0.75 (1 of 11 values differ)"
    assert difference(tmp_path, loss=0.75) == expected


def test_another_weight_is_named_with_its_file_and_the_largest_difference(tmp_path):
    said = difference(tmp_path, weight=2.5)
    assert said.startswith("global_step_2/huggingface/model.safetensors: b: 'float32 (2,) sha256 ")
    assert said.endswith(", largest difference 0.5 (2 of 11 values differ)")


def test_another_state_of_the_loop_is_named(tmp_path):
    expected = "global_step_2/loop/rank_0.json: kl_coef: 0.1 | 0.2 (1 of 11 values differ)"
    assert difference(tmp_path, coef=0.2) == expected


def test_a_run_that_leaves_nothing_or_something_else_behind_is_not_the_same(tmp_path):
    assert same.first_difference(tmp_path, tmp_path, {}, {}) == "nothing was left behind"
    found = same.first_difference(tmp_path, tmp_path, {("step 1", "x"): 1.0}, {("step 1", "y"): 1.0})
    assert found == "step 1: x: 1.0 | missing (2 of 1 values differ)"


def test_only_metrics_of_time_memory_and_throughput_are_left_out():
    tables = (ROOT / "docs" / "metrics.md").read_text() + (ROOT / "docs" / "train_async.md").read_text()
    names = set(re.findall(r"`([a-z_]+/[a-z0-9_]+)`", tables))
    left_out = {name for name in names if same.MEASURED.search(name)}
    assert len(names) > 80 and len(left_out) > 10
    of_samplers = {"rollouter/idle_ratio", "samplers/balanced_count"}
    assert {name for name in left_out if not re.match(NAMES, name)} <= of_samplers
    assert "perf/total_num_tokens" not in left_out
