"""Where metrics go: a progress line on the console and `metrics.jsonl` always; wandb, swanlab and tensorboard when
asked for.

The loop only writes files. Each tracker has a process of its own that reads them (rl/run/tracking_worker.py), so that
nothing a tracker does or waits for can delay or stop a run.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

from rl.console import say
from rl.flags import Count, Free, Port, flat

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CLOSE_S = 30.0  # what trackers may take after the run's end
RECORDS = ("metrics.jsonl", "generations.jsonl", "config.json")
PENDING_BYTES = 64 * 2**20  # lines kept in memory while a file cannot be written, for each file
SECRET_NAME = re.compile("key|token(?!iz)|secret|passw", re.IGNORECASE)  # but not TOKENIZERS_PARALLELISM
SECRET_LENGTH = 6  # characters; shorter values ("1", "true") are words that flags hold anyway


Backend = Literal["console", "wandb", "swanlab", "tensorboard"]


@dataclasses.dataclass(frozen=True)
class Logging:
    """logging"""

    experiment_name: Free[str] = "run"  # run in the trackers, and part of the folder
    project_name: Free[str] = "glassrl"  # project in the trackers, and part of the folder
    alarms: Free[tuple[str, ...]] = ()  # conditions; a step that meets one prints a line that begins with ALARM
    logger: Free[tuple[Backend, ...]] = ("console",)  # trackers besides metrics.jsonl, which is always written
    prometheus_port: Free[Port | None] = None  # rank 0 serves the metrics, and vLLM's own, to Prometheus on this port


@dataclasses.dataclass(frozen=True)
class LoggingRL(Logging):
    """logging"""

    # print a prompt and its response, and record up to four in generations.jsonl, every this many steps; 0 never
    log_samples_freq: Free[Count] = 10


@dataclasses.dataclass(frozen=True)
class LoggingSupervised(Logging):
    """logging"""

    log_freq: Free[Count] = 10  # print a line every this many steps; 0 only at the end


class Tracker:
    """Writes on rank 0 and does nothing elsewhere, so that scripts call it without asking which rank they are.

    Files under `run_dir`: config.json (without `secrets`), metrics.jsonl (one line a step), generations.jsonl (one line
    a logged response). `start` is the step a run resumes from: lines that it writes again are dropped. With 0, for a
    new run, files that an earlier one has left get other names. `evaluates`: whether the run evaluates at `start`
    first. `config` is the script's Args; its logging flags say which trackers to start.

    Raises OSError if `run_dir` or config.json cannot be written, and nothing later: lines that a full disk refuses are
    kept in memory, up to PENDING_BYTES a file, and written when there is space again.
    """

    def __init__(self, run_dir: str, config: Any, start: int, evaluates: bool, *, enabled: bool):
        self.enabled, self.run_dir, self.backends = enabled, pathlib.Path(run_dir), config.logging.logger
        self.pending = {"metrics.jsonl": bytearray(), "generations.jsonl": bytearray()}
        self.lost = dict.fromkeys(self.pending, 0)  # lines
        self.failing: set[str] = set()
        self.workers: dict[str, subprocess.Popen] = {}
        if not enabled:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for file in (self.run_dir / name for name in RECORDS):
            if file.exists() and not file.is_file():  # a pipe would hold up the run
                raise OSError(f"{file} is no ordinary file; remove it, or choose another --experiment-name")
        if start == 0:
            _set_aside(self.run_dir)
        for name in self.pending:  # a resumed run repeats the steps after its checkpoint
            _drop_after(self.run_dir / name, start, evaluates=evaluates)
        flags = redact(json.loads(json.dumps(flat(config), default=str)), secrets())
        (self.run_dir / "config.json").write_text(json.dumps(flags, indent=2))
        for backend in self.backends:
            if backend != "console":
                self._start(backend, config.logging.project_name, config.logging.experiment_name)

    def _start(self, backend: str, project_name: str, experiment_name: str) -> None:
        """Start the process that hands every line from here on to `backend`."""
        files = [self.run_dir / name for name in self.pending]
        begin = [str(file.stat().st_size if file.exists() else 0) for file in files]
        code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from rl.run.tracking_worker import main; main()"
        words = [backend, str(self.run_dir), project_name, experiment_name, *begin, str(CLOSE_S * 5 / 6)]
        try:
            self.workers[backend] = subprocess.Popen(
                [sys.executable, "-c", code, *words],
                stdin=subprocess.PIPE,
                stdout=2,  # what a tracker has to say is not the run's output
                start_new_session=True,  # Ctrl-C is for the run, and no tracker asks for a key on the terminal
            )
        except OSError as error:
            say(f"{backend} gets nothing, its process did not start: {error}", sys.stderr)

    def log(self, step: int, metrics: dict[str, float], line: str = "") -> None:
        """Record the metrics of a step everywhere; print `line` if console is on.

        Non-finite values are null in metrics.jsonl and NaN in the trackers.
        """
        if not self.enabled:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        text = json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False) + "\n"
        self._append("metrics.jsonl", text)
        self._look_after_workers()
        if line:
            self.print(line)

    def log_generations(self, step: int, kind: str, generations: list[dict]) -> None:
        """Record responses: dicts with prompt, response, score (and whatever else) to generations.jsonl and the
        trackers' tables. `log` must follow with the same step.
        """
        if not self.enabled or not generations:
            return
        lines = [json.dumps({"step": step, "kind": kind, **generation}, default=str) for generation in generations]
        self._append("generations.jsonl", "\n".join(lines) + "\n")

    def _append(self, name: str, text: str) -> None:
        """Add lines to a file. What does not get there, be it half a line, stays pending and is the first next time."""
        pending, data = self.pending[name], text.encode()
        if len(pending) + len(data) <= PENDING_BYTES:
            pending += data
        else:
            self.lost[name] += text.count("\n")
        try:
            with open(self.run_dir / name, "ab", buffering=0) as f:
                while pending:
                    del pending[: f.write(pending)]
        except OSError as error:
            if name not in self.failing:
                self.failing.add(name)
                say(
                    f"{self.run_dir / name} cannot be written: {error}; training goes on, its lines are kept",
                    sys.stderr,
                )
            return
        if name in self.failing:
            self.failing.remove(name)
            say(f"{self.run_dir / name} can be written again; {self.lost[name]} lines are missing", sys.stderr)

    def _look_after_workers(self) -> None:
        """Say so if a tracker's process was ended by something else than itself."""
        for backend, worker in list(self.workers.items()):
            if worker.poll() is not None:
                del self.workers[backend]
                if worker.returncode != 0:  # else it has said itself what the matter was
                    say(
                        f"{backend} gets nothing more, its process ended with {worker.returncode}; "
                        f"the numbers are in {self.run_dir / 'metrics.jsonl'}",
                        sys.stderr,
                    )

    def print(self, text: str) -> None:
        """Print on the main rank if console is among the backends."""
        if self.enabled and "console" in self.backends:
            say(text)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Write what is pending and end every backend: one that cannot send the rest within `wait_s` seconds goes on by
        itself, after the end of the run too, until CLOSE_S seconds are over.
        """
        if not self.enabled:
            return
        for name, pending in self.pending.items():
            if pending:
                self._append(name, "")
            if pending or self.lost[name]:
                lines = pending.count(b"\n") + self.lost[name]
                say(f"{self.run_dir / name} lacks {lines} lines, which could not be written", sys.stderr)
        for worker in self.workers.values():
            with contextlib.suppress(OSError):  # it has ended
                worker.stdin.write(b"done")
                worker.stdin.close()
        deadline = time.monotonic() + wait_s
        for worker in self.workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(deadline - time.monotonic(), 0))
        self._look_after_workers()


def secrets() -> list[str]:
    """Values of environment variables whose names look secret, if they have SECRET_LENGTH characters, longest first."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SECRET_LENGTH}
    return sorted(values, key=len, reverse=True)


def redact(value: Any, secrets: Sequence[str]) -> Any:
    """JSON with *** for every occurrence of a secret in its strings; keys stay."""
    if isinstance(value, dict):
        return {name: redact(item, secrets) for name, item in value.items()}
    if isinstance(value, list):
        return [redact(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
    return value


def _set_aside(run_dir: pathlib.Path) -> None:
    """Give the records of an earlier run, which saved nothing to resume from, names with a number."""
    files = [file for name in RECORDS if (file := run_dir / name).exists() and file.stat().st_size]
    if (run_dir / "metrics.jsonl") in files:
        number = next(n for n in itertools.count(1) if not any(_numbered(file, n).exists() for file in files))
        for file in files:
            file.rename(_numbered(file, number))
        say(
            f"{run_dir} has records of an earlier run: they are called {_numbered(files[0], number).name} and so on now"
        )


def _numbered(file: pathlib.Path, number: int) -> pathlib.Path:
    return file.with_name(f"{file.stem}.{number}{file.suffix}")


def _drop_after(file: pathlib.Path, step: int, *, evaluates: bool) -> None:
    """Drop the lines that a run resumed at `step` writes again: later steps, and the evaluation of `step` itself if the
    run `evaluates` first. It does not where the step was evaluated only because it was the last, and now no longer is.

    Of a file with damaged lines a copy is kept.
    """

    def evaluation(line: dict) -> bool:
        return line.get("kind") == "val" or any(name.startswith(("val/", "val-")) for name in line)

    if not file.exists():
        return
    text = file.read_text(errors="replace")
    lines = [_parsed(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # a crash may cut the last one
    if damaged := lines.count(None):
        shutil.copy(file, file.with_suffix(".damaged"))
        say(f"{damaged} line(s) of {file} are damaged and left out; {file.with_suffix('.damaged').name} has them")
    whole = [line for line in lines if line is not None]
    kept = [
        line for line in whole if line["step"] < step or (line["step"] == step and not (evaluates and evaluation(line)))
    ]
    rest = "".join(json.dumps(line) + "\n" for line in kept)
    if rest != text:
        temporary = file.with_suffix(".tmp")  # a full disk must not cost what is there
        temporary.write_text(rest)
        os.replace(temporary, file)


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl or generations.jsonl; None if it is damaged."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and isinstance(value.get("step"), int) else None
