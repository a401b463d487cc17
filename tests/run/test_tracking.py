"""What a run leaves behind: metrics.jsonl always, trackers when asked for, and nothing from ranks other than 0.

And that no tracker and no full disk can stop it. About 20 s, most of it imports in other processes.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import helpers_scripts as h
import launch
import pytest

from rl.console import progress, progress_line, say, show_sample
from rl.run import tracking
from rl.run.tracking import Logging, Tracker, _drop_after, without_secrets


@dataclass(frozen=True)
class Config:
    lr: float = 1e-6
    files: tuple[str, ...] = ("a.parquet",)
    where: Path = Path("x")
    logging: Logging = Logging()


def tracker(folder, start=0, backends=("console",), enabled=True, evaluates=True):
    names = dict(project_name="project", experiment_name="experiment")
    return Tracker(folder, Config(logging=Logging(logger=backends, **names)), start, evaluates, enabled=enabled)


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
    logging = {"logger": ["console"], "project_name": "project", "experiment_name": "experiment"}
    logging |= {"alarms": [], "prometheus_port": None}
    assert config == {"lr": 1e-6, "files": ["a.parquet"], "where": "x"} | logging


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


def test_letters_that_a_terminal_lacks_are_spelled_out():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    for text in ("response: \u4f60\u597d", "caf\u00e9"):
        say(text, stream)
    assert stream.buffer.getvalue() == b"response: \\u4f60\\u597d\ncaf\xe9\n"


def test_console_is_a_backend_that_can_be_left_out(tmp_path, capsys):
    t = tracker(tmp_path, backends=())
    t.log(1, {"a": 1.0}, "a line")
    t.print("a text")
    t.close()
    assert capsys.readouterr().out == ""
    assert h.read_jsonl(tmp_path / "metrics.jsonl")[0]["a"] == 1.0


def test_other_ranks_write_nothing_and_start_no_tracker(tmp_path, capsys):
    t = tracker(tmp_path / "run", backends=("console", "wandb", "tensorboard", "swanlab"), enabled=False)
    assert t.sinks == []
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
    tracker(tmp_path, start=2, evaluates=False)  # the evaluation of step 2 stays
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:4]
    assert [g["step"] for g in h.read_jsonl(tmp_path / "generations.jsonl")] == [0, 0, 2, 2]
    tracker(tmp_path, start=2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:3]  # to the digit, time included
    assert [g["step"] for g in h.read_jsonl(tmp_path / "generations.jsonl")] == [0, 0]


def test_a_new_run_sets_the_records_of_an_earlier_one_aside(tmp_path, capsys):
    for loss in (0.5, 0.25):
        t = tracker(tmp_path)
        t.log(1, {"actor/loss": loss})
        t.log_generations(1, "val", [{"prompt": "p", "response": str(loss), "score": 1.0}])
    assert "records of an earlier run: they are called metrics.1.jsonl and so on" in capsys.readouterr().out
    tracker(tmp_path)
    stems = (("metrics", "jsonl"), ("generations", "jsonl"), ("config", "json"))
    names = {f"{stem}{number}.{end}" for stem, end in stems for number in ("", ".1", ".2")}
    assert {p.name for p in tmp_path.iterdir()} == names - {
        "metrics.jsonl",
        "generations.jsonl",
    }  # nothing is logged yet
    for number, loss in ((1, 0.5), (2, 0.25)):
        assert h.read_jsonl(tmp_path / f"metrics.{number}.jsonl")[0]["actor/loss"] == loss
        assert h.read_jsonl(tmp_path / f"generations.{number}.jsonl")[0]["response"] == str(loss)


def test_damaged_lines_do_not_keep_a_run_from_going_on(tmp_path, capsys):
    t = tracker(tmp_path)
    for step in (1, 2, 3, 4):
        t.log(step, {"actor/loss": 0.1 * step})
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    deep = b"[" * 100_000 + b"]" * 100_000 + b"\n"  # too deep for Python's parser
    file.write_bytes(lines[0] + b"\xff" + lines[1][1:] + b"null\n" + b"{}\n" + deep + lines[2] + lines[3][:9])
    damaged = file.read_bytes()
    tracker(tmp_path, start=4)
    assert file.read_bytes() == lines[0] + lines[2]
    assert (tmp_path / "metrics.damaged").read_bytes() == damaged
    assert "4 line(s) of" in capsys.readouterr().out


def test_a_pipe_in_the_place_of_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")  # to open one is to wait for somebody at its other end
    with pytest.raises(OSError, match="metrics.jsonl is not an ordinary file; remove it"):
        tracker(tmp_path, start=4)


def test_a_message_that_nobody_can_read_costs_nothing():
    stream = open("/dev/full", "w")
    say("no space for this", stream)
    reading, writing = os.pipe()
    os.close(reading)
    pipe = open(writing, "w")
    say("nobody reads this", pipe)
    for file in (stream, pipe):
        with contextlib.suppress(OSError):
            file.close()


# ---------------------------------------------------------------------------------------------------------------------
# Files that cannot be written


@contextlib.contextmanager
def files_end_after(size):
    """Files of this process, pytest's own report among them, end after this many bytes, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_a_full_disk_refuses_are_written_when_there_is_space(tmp_path, capsys):
    t = tracker(tmp_path)
    t.log(1, {"a": 0.5})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with files_end_after(size + 10):  # the next line will be cut after ten bytes
        for step in (2, 3, 4):
            t.log(step, {"a": 0.5 * step}, f"step {step}")
            t.log_generations(step, "val", [{"prompt": "p" * 1000, "response": "r", "score": 1.0}] * 2)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size + 10
    out, err = capsys.readouterr()
    assert out == "step 2\nstep 3\nstep 4\n"
    assert [line.split(" cannot be written: ")[0] for line in err.splitlines()] == [
        str(tmp_path / "metrics.jsonl"),
        str(tmp_path / "generations.jsonl"),
    ]
    t.log(5, {"a": 2.5})
    assert capsys.readouterr().err == f"{tmp_path}/metrics.jsonl can be written again; no line is missing\n"
    t.close()  # writes the responses
    assert capsys.readouterr().err == f"{tmp_path}/generations.jsonl can be written again; no line is missing\n"
    lines = h.read_jsonl(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["a"]) for line in lines] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.5)]
    assert [line["step"] for line in h.read_jsonl(tmp_path / "generations.jsonl")] == [2, 2, 3, 3, 4, 4]


def test_a_disk_that_stays_full_is_no_error(tmp_path, capsys):
    t = tracker(tmp_path)
    t.log(1, {"a": 1.0})
    with files_end_after(1):
        t.log(2, {"a": 1.0})
        t.log(3, {"a": 1.0})
        t.close()
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"{tmp_path}/metrics.jsonl lacks 2 lines, which could not be written"
    )
    assert [line["step"] for line in h.read_jsonl(tmp_path / "metrics.jsonl")] == [1]


# ---------------------------------------------------------------------------------------------------------------------
# Secrets


def test_values_of_variables_that_look_secret_are_not_in_the_config(tmp_path, monkeypatch):
    for name in [name for name in os.environ if tracking.SECRET_NAME.search(name)]:
        monkeypatch.delenv(name)
    for name, value in {
        "JUDGE_API_KEY": "sekret-1",
        "my_password": "hunter22",
        "HF_TOKEN": "sekret-1-and-longer",
        "A_SECRET": "short",
        "TOKENIZERS_PARALLELISM": "arithmetic",
        "HARMLESS": "experiment",
    }.items():
        monkeypatch.setenv(name, value)

    @dataclass(frozen=True)
    class Flags:
        url: str = "http://u:hunter22@host/?key=sekret-1"
        files: tuple[str, ...] = ("sekret-1-and-longer", "arithmetic short experiment")
        nested: tuple[tuple[str, ...], ...] = (("sekret-1",),)
        hunter22: str | None = None
        logging: Logging = Logging(project_name="sekret-1")

    trackers = {"logger": ["console"], "experiment_name": "run", "alarms": [], "prometheus_port": None}
    assert without_secrets(Flags()) == trackers | {
        "url": "http://u:***@host/?key=***",
        "files": ["***", "arithmetic short experiment"],
        "nested": [["***"]],
        "hunter22": None,
        "project_name": "***",
    }


# ---------------------------------------------------------------------------------------------------------------------
# Trackers

TRACK = """
import os, sys
from dataclasses import dataclass
from rl.run.tracking import Logging, Tracker

@dataclass
class Config:
    lr: float = 0.0078125
    judge: str = "http://judge/?key=" + os.environ["DUMMY_API_KEY"]
    logging: Logging = Logging("my-experiment", "my-project", logger=tuple(sys.argv[2:]))

t = Tracker(sys.argv[1], Config(), 0, False, enabled=True)
print("a line", "of the run")
t.log(1, {"critic/score/mean": 1.15625, "actor/grad_norm": float("nan")}, "a line")
t.log_generations(2, "val", [{"prompt": "a prompt", "response": "a response", "score": None, "tokens": {"text": []}}])
t.log(2, {"critic/score/mean": 2.15625, "actor/grad_norm": 3.5})
t.close()
"""
SECRET = "sekret-4711"


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The folder of a run with every tracker that is installed, each offline."""
    folder = tmp_path_factory.mktemp("tracked")
    backends = [b for b in ("wandb", "swanlab", "tensorboard") if importlib.util.find_spec(b)]
    settings = dict(WANDB_MODE="offline", SWANLAB_MODE="offline", DUMMY_API_KEY=SECRET)
    output = launch.run("-c", TRACK, folder, *backends, **settings)
    assert "a line\n" not in output  # console was not asked for
    assert "a line of the run\n" in output and "gets nothing more" not in output
    return folder


def test_files_do_not_depend_on_the_trackers(tracked):
    lines = h.read_jsonl(tracked / "metrics.jsonl")
    assert [line["critic/score/mean"] for line in lines] == [1.15625, 2.15625]
    assert h.read_jsonl(tracked / "generations.jsonl")[0]["response"] == "a response"


def test_wandb_does_not_get_what_a_run_prints(tracked):
    files = [file for file in (tracked / "wandb").rglob("*") if file.is_file()]
    assert [file for file in files if b"a line of the run" in file.read_bytes()] == []


def test_no_file_of_a_run_or_its_trackers_holds_a_secret(tracked):
    files = [file for file in tracked.rglob("*") if file.is_file()]
    assert any(b"http://judge/?key=***" in file.read_bytes() for file in files)
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("sent", h.some(["as it happened", "later, by hand"], "as it happened"))
def test_tensorboard_holds_every_value(tracked, tmp_path, sent):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if sent == "later, by hand":
        for name in ("config.json", "metrics.jsonl", "generations.jsonl"):
            shutil.copy(tracked / name, tmp_path)
        launch.run("-m", "extras.trackers", "tensorboard", tmp_path, "my-project", "my-experiment")
        tracked = tmp_path
    events = EventAccumulator(str(tracked / "tensorboard"))
    events.Reload()
    scores = [(e.step, e.value) for e in events.Scalars("critic/score/mean")]
    assert scores == [(1, 1.15625), (2, 2.15625)]
    norms = [(e.step, e.value) for e in events.Scalars("actor/grad_norm")]
    assert norms[1] == (2, 3.5) and math.isnan(norms[0][1])
    [tag] = [tag for tag in events.Tags()["tensors"] if tag.startswith("val/generations")]
    [event] = events.Tensors(tag)
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 2 and "a prompt" in text and "a response" in text


def test_wandb_holds_every_value(tracked):
    if not importlib.util.find_spec("wandb"):
        pytest.skip("wandb is not installed")
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
    if not importlib.util.find_spec("swanlab"):
        pytest.skip("swanlab is not installed")
    [run] = tracked.glob("swanlab/run-*")
    recorded = (run / "backup.swanlab").read_bytes()
    for value in (b"critic/score/mean", b"1.15625", b"2.15625", b"my-project", b"my-experiment", b"a response"):
        assert value in recorded, value
    assert "0.0078125" in (run / "files" / "config.yaml").read_text()


# ---------------------------------------------------------------------------------------------------------------------
# Trackers that fail

FAULTY = """
import json, sys
from pathlib import Path
from dataclasses import dataclass
from rl.run.tracking import Logging, Tracker

@dataclass
class Config:
    lr: float = 1.0
    logging: Logging = Logging("my-experiment", "my-project", logger=("tensorboard", sys.argv[2]))

t = Tracker(sys.argv[1], Config(), 0, False, enabled=True)
for step in (1, 2, 3):
    t.log_generations(step, "val", [dict(response="r")])
    t.log(step, dict(a=1.0))
t.close()
print("the end")
"""


class Fake:
    """A swanlab that raises or exits in one of its calls, and notes all of them."""

    Settings, Text = dict, str

    def __init__(self, fault, how):
        self.fault, self.how, self.calls = fault, how, []

    def call(self, name):
        self.calls.append(name)
        if self.fault == name:
            raise self.how

    def init(self, **settings):
        self.call("init")

    def log(self, values, step):
        self.call("log")

    def finish(self):
        self.call("finish")


HOW = {"raises": ValueError("out of\n order"), "exits": SystemExit(1), "lacks": ImportError("No module named 'x'")}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("fault", ["import", "init", "log", "finish"])
def test_a_tracker_that_raises_is_told_once_and_gets_nothing_more(tmp_path, capsys, monkeypatch, fault, how):
    fake, how = Fake(fault, HOW[how]), HOW[how]
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    if fault == "import":
        monkeypatch.delitem(sys.modules, "swanlab")
        (tmp_path / "swanlab.py").write_text(f"raise {how!r}")
        monkeypatch.syspath_prepend(tmp_path)
    t = tracker(tmp_path / "run", backends=("swanlab", "console"))
    for step in (1, 2):
        t.log_generations(step, "val", [{"response": "r"}])
        t.log(step, {"a": 1.0}, f"step {step}")
    t.close()
    expected = {"import": [], "init": ["init"], "log": ["init", "log"], "finish": ["init", *["log"] * 4, "finish"]}
    assert fake.calls == expected[fault]
    out, err = capsys.readouterr()
    words = f"{type(how).__name__}: {' '.join(str(how).split())}"
    hint = " (pip install swanlab)" if isinstance(how, ImportError) else ""
    assert out == "step 1\nstep 2\n" and err == (
        f"swanlab gets nothing more: {words}{hint}. The numbers are in {tmp_path}/run/metrics.jsonl; to send them "
        f"later: python -m extras.trackers swanlab {tmp_path}/run project experiment\n"
    )
    for name in ("metrics.jsonl", "generations.jsonl"):
        assert [line["step"] for line in h.read_jsonl(tmp_path / "run" / name)] == [1, 2]


NOBODY = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
IMPATIENT = {"WANDB_INIT_TIMEOUT": 1, "WANDB_X_GRAPHQL_RETRY_MAX": 1}
# name: backend, what the run says, environment
FAULTS = {
    "wandb refused": ("wandb", "CommError: ", NOBODY | IMPATIENT),
    "wandb without a key": ("wandb", "UsageError: No API key configured", {}),
    "swanlab without a key": ("swanlab", "KeyFileError: api key not configured", {}),
}


@pytest.mark.parametrize("name", h.some(FAULTS, "wandb refused"))
def test_no_server_out_of_reach_stops_a_run(name, tmp_path):
    backend, words, environment = FAULTS[name]
    if not importlib.util.find_spec(backend):
        pytest.skip(f"{backend} is not installed")
    unset = dict.fromkeys(("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE"))
    folder = tmp_path / "run"
    output = launch.run("-c", FAULTY, folder, backend, HOME=tmp_path, **unset | environment)
    said = [line for line in output.splitlines() if "he numbers are in" in line]
    assert len(said) == 1 and f"{backend} gets nothing more: {words}" in said[0], output
    assert str(folder / "metrics.jsonl") in said[0] and "the end\n" in output
    for file in ("metrics.jsonl", "generations.jsonl"):
        assert [line["step"] for line in h.read_jsonl(folder / file)] == [1, 2, 3]
    assert list((folder / "tensorboard").iterdir())  # which has no fault


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
    assert line.startswith("step 120/120 | reward 0.713 | len 252 | entropy 0.346 | kl 0.0046 | clip 0.012 | gap")
    assert "old_log_prob 2.5 ref 2.2 update_actor 11.2" in line


def test_progress_line_has_what_to_watch_in_each_script():
    found = {"rewards/margins": 0.25, "distillation/kl": 0.125, "reward_model/dpo_acc": 0.75}
    assert "margin 0.250 | to teacher 0.1250 | prm right 0.75 |" in progress_line(1, 1, METRICS | found)


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
    _drop_after(file, 2, evaluates=True)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_only_the_evaluation_of_the_step_that_is_resumed_is_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = ['{"step": 2, "value/loss": 1}', '{"step": 2, "val/accuracy": 1}', '{"step": 2, "val-core/x/mean@1": 1}']
    file.write_text("".join(f"{line}\n" for line in lines))
    _drop_after(file, 2, evaluates=True)
    assert file.read_text() == lines[0] + "\n"


def test_dropping_lines_leaves_the_file_alone_if_there_is_no_space_for_the_rest(tmp_path):
    file = tmp_path / "metrics.jsonl"
    text = "".join(f'{{"step": {step}}}\n' for step in range(1, 6))
    file.write_text(text)
    with files_end_after(15), pytest.raises(OSError):
        _drop_after(file, 3, evaluates=True)
    assert file.read_text() == text
