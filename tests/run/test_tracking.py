"""What a run leaves behind: metrics.jsonl always, trackers when asked for, and nothing from ranks other than 0.

And that no tracker and no full disk can delay or stop it. About 25 s, most of it imports in other processes.
"""

import contextlib
import importlib.util
import io
import json
import math
import os
import resource
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import helpers_scripts as h
import launch
import pytest

from rl.console import progress, progress_line, say, show_sample
from rl.run import tracking
from rl.run.tracking import Tracker, _drop_after, redact, secrets
from rl.run.tracking_worker import Reader


@dataclass(frozen=True)
class Config:
    lr: float = 1e-6
    files: tuple[str, ...] = ("a.parquet",)
    where: Path = Path("x")
    val_files: tuple[str, ...] = ("b.parquet",)
    test_freq: int = 2
    logger: tuple[str, ...] = ("console",)
    project_name: str = "project"
    experiment_name: str = "experiment"


def tracker(folder, start=0, backends=("console",), enabled=True, total_steps=6, **config):
    return Tracker(str(folder), Config(logger=backends, **config), start, total_steps, enabled=enabled)


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
    trackers = {"logger": ["console"], "project_name": "project", "experiment_name": "experiment"}
    own = {"lr": 1e-6, "files": ["a.parquet"], "where": "x", "val_files": ["b.parquet"], "test_freq": 2}
    assert config == own | trackers


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
    assert not t.workers
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
    tracker(tmp_path, start=2, test_freq=3)  # evaluates step 3, not step 2, of which the evaluation stays
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:4]
    assert [g["step"] for g in h.read_jsonl(tmp_path / "generations.jsonl")] == [0, 0, 2, 2]
    tracker(tmp_path, start=2, test_freq=-1)
    tracker(tmp_path, start=2, val_files=())
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == before[:4]
    shutil.copytree(tmp_path, tmp_path / "ended")
    tracker(tmp_path / "ended", start=2, test_freq=3, total_steps=2)  # the last step is always evaluated
    assert (tmp_path / "ended" / "metrics.jsonl").read_text().splitlines() == before[:3]
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
    with pytest.raises(OSError, match="metrics.jsonl is no ordinary file; remove it"):
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
    """Files of this process, pytest's own report among them, end after so many bytes, in the middle of a write."""
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
    assert capsys.readouterr().err == f"{tmp_path}/metrics.jsonl can be written again; 0 lines are missing\n"
    t.close()  # one more chance for the responses
    assert capsys.readouterr().err == f"{tmp_path}/generations.jsonl can be written again; 0 lines are missing\n"
    lines = h.read_jsonl(tmp_path / "metrics.jsonl")
    assert [(line["step"], line["a"]) for line in lines] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0), (5, 2.5)]
    assert [line["step"] for line in h.read_jsonl(tmp_path / "generations.jsonl")] == [2, 2, 3, 3, 4, 4]


def test_what_is_kept_in_memory_is_bounded_and_what_is_lost_is_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracking, "PENDING_BYTES", 4500)
    t = tracker(tmp_path)
    with files_end_after(100):
        for step in range(1, 6):
            t.log_generations(step, "val", [{"text": "t" * 1950}])  # about 2000 bytes: two fit besides 100 on disk
    assert 3800 < len(t.pending["generations.jsonl"]) <= 4500
    t.log_generations(6, "val", [{"text": "after"}])
    assert [line["step"] for line in h.read_jsonl(tmp_path / "generations.jsonl")] == [1, 2, 6]
    t.close()
    err = capsys.readouterr().err.splitlines()
    assert err[1:] == [
        f"{tmp_path}/generations.jsonl can be written again; 3 lines are missing",
        f"{tmp_path}/generations.jsonl lacks 3 lines, which could not be written",
    ]


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
    assert secrets()[0] == "sekret-1-and-longer" and sorted(secrets()[1:]) == ["hunter22", "sekret-1"]
    config = {
        "url": "http://u:hunter22@host/?key=sekret-1",
        "files": ["sekret-1-and-longer", {"hunter22": "arithmetic short experiment"}],
        "lr": 1e-6,
        "none": None,
    }
    assert redact(config, secrets()) == {
        "url": "http://u:***@host/?key=***",
        "files": ["***", {"hunter22": "arithmetic short experiment"}],
        "lr": 1e-6,
        "none": None,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Trackers

TRACK = """
import os, sys
from dataclasses import dataclass
from rl.run.tracking import Tracker

@dataclass
class Config:
    lr: float = 0.0078125
    judge: str = "http://judge/?key=" + os.environ["DUMMY_API_KEY"]
    test_freq: int = -1
    logger: tuple[str, ...] = tuple(sys.argv[2:])
    project_name: str = "my-project"
    experiment_name: str = "my-experiment"

t = Tracker(sys.argv[1], Config(), 0, 6, enabled=True)
t.log(1, {"critic/score/mean": 1.15625, "actor/grad_norm": float("nan")}, "a line")
t.log_generations(2, "val", [{"prompt": "a prompt", "response": "a response", "score": None}])
t.log(2, {"critic/score/mean": 2.15625, "actor/grad_norm": 3.5})
t.close()

LAZY = {"wandb", "swanlab", "tensorboard", "torch.utils.tensorboard", "torch", "vllm"}
assert not LAZY & set(sys.modules), LAZY & set(sys.modules)
"""
SECRET = "sekret-4711"


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The folder of a run with every tracker that is installed, each offline."""
    folder = tmp_path_factory.mktemp("tracked")
    backends = [b for b in ("wandb", "swanlab", "tensorboard") if importlib.util.find_spec(b)]
    settings = dict(WANDB_MODE="offline", SWANLAB_MODE="offline", DUMMY_API_KEY=SECRET)
    output = launch.run("-c", TRACK, folder, *backends, **settings)
    assert "a line" not in output  # console was not asked for
    return folder


def test_files_do_not_depend_on_the_trackers(tracked):
    lines = h.read_jsonl(tracked / "metrics.jsonl")
    assert [line["critic/score/mean"] for line in lines] == [1.15625, 2.15625]
    assert h.read_jsonl(tracked / "generations.jsonl")[0]["response"] == "a response"


def test_no_file_of_a_run_or_its_trackers_holds_a_secret(tracked):
    files = [file for file in tracked.rglob("*") if file.is_file()]
    assert any(b"http://judge/?key=***" in file.read_bytes() for file in files)
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.mark.parametrize("sent", ["as it happened", "later, by hand"])
def test_tensorboard_holds_every_value(tracked, tmp_path, sent):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if sent == "later, by hand":
        for name in ("config.json", "metrics.jsonl", "generations.jsonl"):
            shutil.copy(tracked / name, tmp_path)
        launch.run("-m", "rl.run.tracking_worker", "tensorboard", tmp_path, "my-project", "my-experiment")
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

STEPS = 20
TIMED = f"""
import json, os, signal, sys, time
from dataclasses import dataclass
from rl.run import tracking

@dataclass
class Config:
    lr: float = 1.0
    test_freq: int = -1
    logger: tuple[str, ...] = tuple(sys.argv[3:])
    project_name: str = "my-project"
    experiment_name: str = "my-experiment"

def seconds(call, *args):
    begin = time.monotonic()
    call(*args)
    return time.monotonic() - begin

tracking.CLOSE_S = float(sys.argv[2])
begin = time.monotonic()
t = tracking.Tracker(sys.argv[1], Config(), 0, 6, enabled=True)
start = time.monotonic() - begin
logs = []
for step in range(1, {STEPS} + 1):
    t.log_generations(step, "val", [dict(response="r" * 100_000)])
    logs.append(seconds(t.log, step, dict(a=1.0)))
    time.sleep(0.05)
close = seconds(t.close, tracking.CLOSE_S)
print()
print("TIMES", json.dumps([start, max(logs), close]))
"""
FAKE = """
import os, time
def go(place):
    if os.environ["FAULT"] == place + " hangs":
        print("fake hangs", flush=True)
        time.sleep(1000)
    if os.environ["FAULT"] == place + " raises":
        raise ValueError("out of order")
    if os.environ["FAULT"] == place + " exits":
        raise SystemExit(1)
def init(**settings): go("init")
def log(values, step): go("log")
def finish(*state): go("finish")
def Text(text): return text
class State: CRASHED = None
go("import")
if os.environ["FAULT"] == "missing": raise ImportError("No module named 'swanlab'")
"""


def black_hole() -> socket.socket:
    """A server that lets anybody connect (the kernel does) and never says a word."""
    return socket.create_server(("127.0.0.1", 0), backlog=100)


# name: backend, seconds that close may take, what the run says, environment
HANGS = "could not be finished within"
FAULTS = {
    "wandb in a black hole": ("wandb", 6, HANGS, {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://HOLE"}),
    "wandb refused": ("wandb", 6, HANGS, {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}),
    "wandb without a key": ("wandb", 30, "gets nothing more: UsageError: No API key configured", {}),
    "swanlab in a black hole": ("swanlab", 6, HANGS, {"SWANLAB_API_KEY": "a" * 21, "SWANLAB_API_HOST": "http://HOLE"}),
    "swanlab without a key": ("swanlab", 30, "gets nothing more: KeyFileError: api key not configured", {}),
    "missing": ("swanlab", 30, "gets nothing: ImportError: No module named 'swanlab' (pip install swanlab)", {}),
    "init exits": ("swanlab", 30, "gets nothing more: SystemExit: 1", {}),
    "log raises": ("swanlab", 30, "refused a line of step 1: ValueError: out of order", {}),
    "log hangs": ("swanlab", 3, HANGS, {}),
    "finish hangs": ("swanlab", 3, HANGS, {}),
}


@pytest.fixture(scope="module")
def faulty_runs(tmp_path_factory):
    """Runs with each of FAULTS, some at a time: {name: (folder, output)}."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "fake").mkdir()
    (folder / "fake" / "swanlab.py").write_text(FAKE)
    results, names = {}, list(FAULTS)
    with black_hole() as hole, pytest.MonkeyPatch.context() as m:
        for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE"):
            m.delenv(name, raising=False)
        for some in (names[:5], names[5:]):
            running = {}
            for name in some:
                backend, close_s, _, environment = FAULTS[name]
                if not importlib.util.find_spec(backend):
                    continue
                environment = {
                    k: v.replace("HOLE", f"127.0.0.1:{hole.getsockname()[1]}") for k, v in environment.items()
                }
                paths = str(launch.ROOT) if "swanlab" in name or "wandb" in name else f"{launch.ROOT}:{folder / 'fake'}"
                environment |= {"HOME": folder, "FAULT": name, "PYTHONPATH": paths}
                running[name] = launch.start("-c", TIMED, folder / name, close_s, backend, **environment)
            results |= {name: (folder / name, launch.finish(process)) for name, process in running.items()}
    return results


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_of_a_tracker_delays_or_stops_a_run(faulty_runs, name):
    if name not in faulty_runs:
        pytest.skip("not installed")
    backend, close_s, message, _ = FAULTS[name]
    folder, output = faulty_runs[name]
    start, log, close = json.loads(output.split("TIMES ")[1].splitlines()[0])
    assert start < 2 and log < 1, output  # a process is started, lines are written: milliseconds
    assert close < close_s + 2, output
    said = [line for line in output.splitlines() if "he numbers are in" in line]
    assert len(said) == 1 and f"{backend} {message}" in said[0] and str(folder / "metrics.jsonl") in said[0], output
    assert "Traceback" not in output
    for file in ("metrics.jsonl", "generations.jsonl"):
        assert [line["step"] for line in h.read_jsonl(folder / file)] == list(range(1, STEPS + 1))


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A swanlab that never comes back from init."""
    (tmp_path / "swanlab.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAULT", "init hangs")


def test_a_tracker_killed_from_outside_is_reported_once(tmp_path, capsys, hanging):
    t = tracker(tmp_path / "run", backends=("swanlab",))
    worker = t.workers["swanlab"]
    assert os.getsid(worker.pid) == worker.pid  # so Ctrl-C does not reach it
    t.log(1, {"a": 1.0})
    assert capsys.readouterr().err == ""
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    t.log(2, {"a": 1.0})
    t.log(3, {"a": 1.0})
    t.close()
    assert capsys.readouterr().err == (
        f"swanlab gets nothing more, its process ended with -9; the numbers are in {tmp_path}/run/metrics.jsonl\n"
    )
    assert len(h.read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_run_in_a_hurry_leaves_its_trackers_to_themselves(tmp_path, monkeypatch, hanging):
    monkeypatch.setattr(tracking, "CLOSE_S", 1.2)
    t = tracker(tmp_path / "run", backends=("swanlab",))
    worker = t.workers["swanlab"]
    begin = time.monotonic()
    t.close(0.1)
    assert time.monotonic() - begin < 1 and worker.poll() is None
    assert worker.wait(10) == 0 and time.monotonic() - begin > 1


def test_a_tracker_does_not_outlive_a_killed_run_for_long(tmp_path, hanging):
    code = TIMED.split("for step")[0] + "print(t.workers['swanlab'].pid, flush=True); time.sleep(1000)"
    run = launch.start("-c", code, tmp_path / "run", 1.2, "swanlab", PYTHONPATH=f"{launch.ROOT}:{tmp_path}")
    worker = int(run.stdout.readline())
    while "fake hangs" not in run.stdout.readline():
        assert run.poll() is None
    os.kill(worker, signal.SIGTERM)  # a scheduler sends it to everybody; the worker stays with the run
    run.kill()
    output = launch.finish(run)  # ends when the worker has let go of stderr
    assert "swanlab could not be finished within 1 s of the run's end." in output
    launch.until(lambda: not launch.alive(worker), 10)


# ---------------------------------------------------------------------------------------------------------------------
# What a tracker's process reads


def append(file, *lines, end="\n"):
    with open(file, "a") as f:
        f.write("\n".join(json.dumps(line) for line in lines) + end)


def test_a_tracker_sees_steps_in_order_and_whole_lines_only(tmp_path):
    metrics, generations = tmp_path / "metrics.jsonl", tmp_path / "generations.jsonl"
    append(metrics, {"step": 1, "old": 0.5})
    reader = Reader(tmp_path, (metrics.stat().st_size, 0))
    assert reader.read(last=False) == []
    append(generations, {"step": 2, "kind": "val", "r": "a"}, {"step": 2, "kind": "val", "r": "b"})
    assert reader.read(last=False) == []  # metrics of step 1 might follow
    append(metrics, {"step": 1, "new": 0.5}, {"step": 2, "loss": 0.25}, end="")
    val = [{"step": 2, "kind": "val", "r": "a"}, {"step": 2, "kind": "val", "r": "b"}]
    assert reader.read(last=False) == [(1, "", [{"step": 1, "new": 0.5}])]  # half of a line of step 2 is there
    append(metrics, end="\n")
    append(generations, {"step": 2, "kind": "train", "r": "c"}, {"step": 3, "kind": "val", "r": "d"})
    append(metrics, {"step": 2, "more": 0.125})
    groups = reader.read(last=False)
    assert {step for step, _, _ in groups} == {2} and (2, "val", val) in groups
    assert (2, "train", [{"step": 2, "kind": "train", "r": "c"}]) in groups
    assert [lines for _, kind, lines in groups if not kind] == [
        [{"step": 2, "loss": 0.25}],
        [{"step": 2, "more": 0.125}],
    ]
    assert reader.read(last=True) == [(3, "val", [{"step": 3, "kind": "val", "r": "d"}])]
    assert reader.read(last=True) == []


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
