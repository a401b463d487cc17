"""What a run leaves behind: metrics.jsonl always, trackers when asked for, and nothing from ranks other than 0."""

import importlib.util
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import helpers_scripts as h
import pytest

from rl.tracking import Tracker, _drop_after, progress, progress_line, show_sample


@dataclass(frozen=True)
class Config:
    lr: float = 1e-6
    files: tuple[str, ...] = ("a.parquet",)
    where: Path = Path("x")


def tracker(folder, start=0, backends=("console",), enabled=True):
    return Tracker(str(folder), Config(), start, backends, "project", "experiment", enabled=enabled)


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_every_step_is_a_line_of_strict_json(tmp_path, capsys):
    t = tracker(tmp_path / "new" / "folder")
    t.log(0, {"val/accuracy": 0.25})
    t.log(1, {"a": 1 / 3, "b": math.nan, "c": math.inf, "d": -math.inf, "e": 2}, "step 1 | fine")
    t.close()
    lines = h.read_jsonl(tmp_path / "new" / "folder" / "metrics.jsonl")  # refuses NaN and Infinity
    assert all(line.pop("time") > 1.7e9 for line in lines)
    assert lines == [
        {"step": 0, "val/accuracy": 0.25},
        {"step": 1, "a": 1 / 3, "b": None, "c": None, "d": None, "e": 2},
    ]
    assert capsys.readouterr().out == "step 1 | fine\n"
    config = json.loads((tmp_path / "new" / "folder" / "config.json").read_text())
    assert config == {"lr": 1e-6, "files": ["a.parquet"], "where": "x"}


def test_lines_are_there_as_soon_as_they_are_logged(tmp_path):
    t = tracker(tmp_path)
    t.log(1, {"a": 1.0})
    t.log_generations(1, "val", [{"prompt": "p", "response": "r", "score": 1.0}])
    assert len(h.read_jsonl(tmp_path / "metrics.jsonl")) == len(h.read_jsonl(tmp_path / "generations.jsonl")) == 1


def test_generations_keep_their_text(tmp_path):
    t = tracker(tmp_path)
    t.log_generations(3, "val", [])
    assert not (tmp_path / "generations.jsonl").exists()
    t.log_generations(3, "val", [{"prompt": "2+2\n=?", "response": "zażółć \u2028 \U0001f600", "score": None}])
    t.log_generations(4, "train", [{"prompt": "p", "response": "", "score": 0.5, "truth": "4"}])
    assert [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().split("\n")[:-1]] == [
        {"step": 3, "kind": "val", "prompt": "2+2\n=?", "response": "zażółć \u2028 \U0001f600", "score": None},
        {"step": 4, "kind": "train", "prompt": "p", "response": "", "score": 0.5, "truth": "4"},
    ]


def test_console_is_a_backend_that_can_be_left_out(tmp_path, capsys):
    t = tracker(tmp_path, backends=())
    t.log(1, {"a": 1.0}, "a line")
    t.print("a text")
    t.close()
    assert capsys.readouterr().out == ""
    assert h.read_jsonl(tmp_path / "metrics.jsonl")[0]["a"] == 1.0


def test_other_ranks_write_nothing_and_start_no_tracker(tmp_path, capsys, monkeypatch):
    for name in ("wandb", "swanlab", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    t = tracker(tmp_path / "run", backends=("console", "wandb", "tensorboard", "swanlab"), enabled=False)
    t.log(1, {"a": 1.0}, "a line")
    t.log_generations(1, "val", [{"prompt": "p", "response": "r", "score": 1.0}])
    t.print("a text")
    t.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_a_resumed_run_drops_what_it_will_write_again(tmp_path):
    t = tracker(tmp_path)
    for step in range(5):
        if step:
            t.log(step, {"actor/loss": 0.1 * step})
        if step % 2 == 0:
            t.log(step, {"val/accuracy": 0.2 * step, "val-core/gsm8k/reward/mean@1": 0.2 * step})
            t.log_generations(step, "val", [{"prompt": "p", "response": f"r{step}", "score": 1.0}] * 2)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    kinds = [(line["step"], "val/accuracy" in line) for line in map(json.loads, before)]
    assert kinds == [(0, True), (1, False), (2, False), (2, True), (3, False), (4, False), (4, True)]

    tracker(tmp_path, start=4)  # evaluates step 4 again
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:6]
    assert [g["step"] for g in h.read_jsonl(tmp_path / "generations.jsonl")] == [0, 0, 2, 2]
    tracker(tmp_path, start=2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:3]  # to the digit, time included
    assert [g["step"] for g in h.read_jsonl(tmp_path / "generations.jsonl")] == [0, 0]
    tracker(tmp_path, start=0)
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "generations.jsonl").read_text() == ""


# ---------------------------------------------------------------------------------------------------------------------
# Trackers: in a process of their own, since they take over stdout and exit handlers

TRACK = """
import sys
from dataclasses import dataclass
from rl.tracking import Tracker

LAZY = {"wandb", "swanlab", "tensorboard", "torch.utils.tensorboard", "torch", "vllm"}
assert not LAZY & set(sys.modules), LAZY & set(sys.modules)

@dataclass
class Config:
    lr: float = 0.0078125

backends = tuple(sys.argv[2:])
t = Tracker(sys.argv[1], Config(), 0, backends, "my-project", "my-experiment", enabled=True)
t.log(1, {"critic/score/mean": 1.15625, "actor/grad_norm": float("nan")}, "a line")
t.log_generations(1, "val", [{"prompt": "a prompt", "response": "a response", "score": None}])
t.log(2, {"critic/score/mean": 2.15625, "actor/grad_norm": 3.5})
t.close()
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The folder of a run with every tracker that is installed, each offline."""
    folder = tmp_path_factory.mktemp("tracked")
    backends = [b for b in ("wandb", "swanlab", "tensorboard") if importlib.util.find_spec(b)]
    output = h.run("-c", TRACK, folder, *backends, WANDB_MODE="offline", SWANLAB_MODE="offline")
    assert "a line" not in output  # console was not asked for
    return folder


def test_files_do_not_depend_on_the_trackers(tracked):
    lines = h.read_jsonl(tracked / "metrics.jsonl")
    assert [line["critic/score/mean"] for line in lines] == [1.15625, 2.15625]
    assert h.read_jsonl(tracked / "generations.jsonl")[0]["response"] == "a response"


def test_tensorboard_holds_every_value(tracked):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked / "tensorboard"))
    events.Reload()
    scores = [(e.step, e.value) for e in events.Scalars("critic/score/mean")]
    assert scores == [(1, 1.15625), (2, 2.15625)]
    norms = [(e.step, e.value) for e in events.Scalars("actor/grad_norm")]
    assert norms[1] == (2, 3.5) and math.isnan(norms[0][1])
    [tag] = [tag for tag in events.Tags()["tensors"] if tag.startswith("val/generations")]
    [event] = events.Tensors(tag)
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 1 and "a prompt" in text and "a response" in text


def test_wandb_holds_every_value(tracked):
    pytest.importorskip("wandb")
    [run] = tracked.glob("wandb/offline-run-*/run-*.wandb")
    recorded = run.read_bytes()
    for value in (b"critic/score/mean", b"1.15625", b"2.15625", b"my-project", b"my-experiment", b"0.0078125"):
        assert value in recorded, value
    [table] = run.parent.glob("files/media/table/val/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["prompt", "response", "score"],
        "data": [["a prompt", "a response", "None"]],
    }


def test_swanlab_holds_every_value(tracked):
    pytest.importorskip("swanlab")
    [run] = tracked.glob("swanlab/run-*")
    recorded = (run / "backup.swanlab").read_bytes()
    for value in (b"critic/score/mean", b"1.15625", b"2.15625", b"my-project", b"my-experiment", b"a response"):
        assert value in recorded, value
    assert "0.0078125" in (run / "files" / "config.yaml").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# The console

METRICS = {
    "critic/score/mean": 0.71284,
    "response_length/mean": 251.6,
    "response_length/clip_ratio": 0.0625,
    "actor/entropy": 0.34567,
    "actor/pg_clipfrac": 0.0123,
    "rollout/logprob_gap_mean": 0.000234,
    "actor/grad_norm": 0.5,
    "perf/throughput": 12_345.0,
    "timing_s/step": 21.04,
    "timing_s/gen": 9.31,
    "timing_s/update_weights": 0.01,  # too short to show
    "timing_s/update_actor": 11.2,
}


def test_progress_line_says_what_matters():
    assert progress_line(7, 120, METRICS) == (
        "step   7/120 | reward 0.713 | len 252 (6% cut) | entropy 0.346 | clip 0.012 | gap 2e-04 | |g| 0.50 | "
        "12.3k tok/s/GPU | 21.0 s (gen 9.3 update_actor 11.2)"
    )
    off_policy = METRICS | {"actor/kl_loss": 0.00456, "timing_s/old_log_prob": 2.5, "timing_s/ref": 2.25}
    line = progress_line(120, 120, off_policy | {"response_length/clip_ratio": 0.0})
    assert line.startswith("step 120/120 | reward 0.713 | len 252 | entropy")
    assert "kl 0.0046" in line and "old_log_prob 2.5 ref 2.2 update_actor 11.2" in line


def test_progress_line_of_a_step_that_could_not_be_scored():
    assert "reward nan" in progress_line(1, 1, METRICS | {"critic/score/mean": math.nan})


def test_show_sample_is_indented_and_keeps_both_ends_of_a_long_text():
    assert show_sample("2+2=?\n", "4", None) == "  prompt:   2+2=?\n    \n  response: 4\n  score:    None"
    shown = show_sample("p", "start" + "x" * 2000 + "end", 1.0)
    assert "start" in shown and "end\n" in shown and " ... " in shown and len(shown) < 700


def test_a_progress_bar_changes_nothing_and_is_silent_off_the_terminal(capsys, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert list(progress("update", [[3], [1, 2], []])) == [[3], [1, 2], []]
    assert capsys.readouterr() == ("", "")


def test_drop_after_forgives_a_line_that_a_crash_cut(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "crit')
    _drop_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
