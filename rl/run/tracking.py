"""Where the numbers of a run go: metrics.jsonl and generations.jsonl in its folder, and the trackers of --logger."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal

from extras import trackers
from rl.console import say
from rl.flags import Count, Free, Port, flat
from rl.ranks import Ranks
from rl.run.together import together

METRICS, GENERATIONS, CONFIG = RECORDS = ("metrics.jsonl", "generations.jsonl", "config.json")
SECRET_NAME = re.compile("key|token(?!iz)|secret|passw", re.IGNORECASE)  # but not TOKENIZERS_PARALLELISM
SECRET_LENGTH = 6  # characters. Shorter values ("1", "true") are words that flags hold anyway.


@dataclasses.dataclass(frozen=True)
class Logging:
    """These flags are about logging."""

    experiment_name: Free[str] = "run"  # Trackers show the run under this name, and the default folder ends with it.
    project_name: Free[str] = "glassrl"  # Trackers show the run in this project, and the default folder begins with it.
    # These are conditions. A step that meets one of them prints a line that begins with ALARM. Without a condition
    # there are no alarms.
    alarms: Free[tuple[str, ...]] = ()
    # Metrics go to these trackers, besides metrics.jsonl, which is always written.
    logger: Free[tuple[Literal["console", "wandb", "swanlab", "tensorboard"], ...]] = ("console",)
    # Rank 0 serves the metrics to Prometheus on this port. By default it does not.
    prometheus_port: Free[Port | None] = None


@dataclasses.dataclass(frozen=True)
class LoggingRL(Logging):
    """These flags are about logging."""

    # At this interval, in steps, print a prompt with its response, and record up to four responses in
    # generations.jsonl. 0 means never.
    log_samples_freq: Free[Count] = 10


@dataclasses.dataclass(frozen=True)
class LoggingSupervised(Logging):
    """These flags are about logging."""

    log_freq: Free[Count] = 10  # Print a line at this interval, in steps. 0 means only at the end.


def open_early(flags: Logging, ranks: Ranks) -> dict[str, trackers.Sink]:
    """The sinks by name that may refuse a flag, so that a run knows before a model is loaded, on rank 0. Raises
    ValueError on every rank, see `trackers.open_early`. All ranks must enter.
    """
    sinks: dict[str, trackers.Sink] = {}
    together(lambda: sinks.update(trackers.open_early(flags)) if ranks.is_main else None)
    return sinks


class Tracker:
    """Writes the records of a run on rank 0. Does nothing on other ranks.

    config.json has the flags without secrets, metrics.jsonl a line for each step and evaluation, generations.jsonl a
    line for each response that is shown.

    Args: args, of the script; start, the step from which the run is resumed: lines that it will write again are
    dropped. With 0 the files of an earlier run get other names; evaluates, whether the run evaluates at `start` first;
    enabled, whether this is rank 0; sinks, that are open already, by name.

    Raises OSError if the folder or config.json cannot be written. Nothing is raised later. Lines that a full disk
    refuses wait in memory, and a tracker that raises gets nothing more.
    """

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        args: Any,
        start: int,
        evaluates: bool,
        *,
        enabled: bool,
        sinks: dict[str, trackers.Sink] | None = None,
    ):
        self.enabled, self.run_dir, flags = enabled, pathlib.Path(run_dir), args.logging
        self.prints = enabled and "console" in flags.logger
        self.metrics, self.generations = Lines(self.run_dir / METRICS), Lines(self.run_dir / GENERATIONS)
        self.sinks: list[trackers.Sink] = []
        if not enabled:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for file in (self.run_dir / name for name in RECORDS):
            if file.exists() and not file.is_file():  # a pipe would hold up the run
                raise OSError(f"{file} is not an ordinary file; remove it, or choose another --experiment-name")
        if start == 0:
            _set_aside(self.run_dir)
        for lines in (self.metrics, self.generations):
            _drop_after(lines.file, start, evaluates=evaluates)
        config = without_secrets(args)
        (self.run_dir / CONFIG).write_text(json.dumps(config, indent=2))
        self.sinks = trackers.open_sinks(flags, config, sinks or {}, self.metrics.file)

    def log(self, step: int, metrics: dict[str, float], line: str = "") -> None:
        """Record the metrics of a step. Print `line` if --logger has console.

        What is not finite is null in metrics.jsonl and NaN in the trackers.
        """
        if self.enabled:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
            record = {"step": step, "time": time.time(), **finite}
            self.metrics.append(record)
            trackers.hand_on(self.sinks, [record])
        if line:
            self.print(line)

    def log_generations(self, step: int, kind: str, generations: Sequence[dict[str, Any]]) -> None:
        """Record responses, dicts with prompt, response, score and more. kind: "train" or "val"."""
        if self.enabled and generations:
            records = [{"step": step, "kind": kind, **generation} for generation in generations]
            self.generations.append(*records)
            trackers.hand_on(self.sinks, records)

    def print(self, text: str) -> None:
        """Print on rank 0 if --logger has console."""
        if self.prints:
            say(text)

    def close(self) -> None:
        """Write the lines that wait in memory, and wait until the trackers have sent what they have."""
        self.metrics.close()
        self.generations.close()
        for sink in self.sinks:
            sink.close()


class Lines:
    """A file of JSON lines. Those that a full disk refuses wait in memory and are written with the next ones."""

    def __init__(self, file: pathlib.Path):
        self.file, self.pending = file, bytearray()

    def append(self, *records: dict[str, Any]) -> None:
        """Add a line for each record. What is not written, be it half a line, is the first to be written next time."""
        was_failing = bool(self.pending)
        self.pending += "".join(json.dumps(record, default=str) + "\n" for record in records).encode()
        try:
            with open(self.file, "ab", buffering=0) as f:
                while self.pending:
                    del self.pending[: f.write(self.pending)]
        except OSError as error:
            if not was_failing:
                say(f"{self.file} cannot be written: {error}; training goes on, its lines are kept", sys.stderr)
        else:
            if was_failing:
                say(f"{self.file} can be written again; no line is missing", sys.stderr)

    def close(self) -> None:
        """Try once more, and say what is missing."""
        if self.pending:
            self.append()
        if lines := self.pending.count(b"\n"):
            say(f"{self.file} lacks {lines} lines, which could not be written", sys.stderr)


def without_secrets(args: Any) -> dict[str, Any]:
    """All flags of Args as JSON, with *** for the value of each environment variable whose name looks secret."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SECRET_LENGTH}
    secrets = sorted(values, key=len, reverse=True)  # one may be a part of another

    def hidden(value: Any) -> Any:
        if isinstance(value, list):
            return [hidden(item) for item in value]
        for secret in secrets if isinstance(value, str) else ():
            value = value.replace(secret, "***")
        return value

    return {name: hidden(value) for name, value in json.loads(json.dumps(flat(args), default=str)).items()}


def _set_aside(run_dir: pathlib.Path) -> None:
    """Give the records of an earlier run, which saved nothing to resume from, names with a number."""
    files = [file for name in RECORDS if (file := run_dir / name).exists() and file.stat().st_size]
    if run_dir / METRICS in files:
        number = next(n for n in itertools.count(1) if not any(run_dir.glob(f"*.{n}.json*")))
        for file in files:
            file.rename(file.with_name(f"{file.stem}.{number}{file.suffix}"))
        say(f"{run_dir} has records of an earlier run: they are called metrics.{number}.jsonl and so on now")


def _drop_after(file: pathlib.Path, step: int, *, evaluates: bool) -> None:
    """Drop the lines that a run resumed at `step` writes again. These are later steps, and the evaluation of `step`
    itself if the run evaluates there first. A copy of a file with damaged lines is kept.
    """

    def evaluation(line: dict) -> bool:
        return line.get("kind") == "val" or any(name.startswith(("val/", "val-")) for name in line)

    if not file.exists():
        return
    text = file.read_text(errors="replace")
    whole_lines = text[: text.rfind("\n") + 1].splitlines()  # a crash may cut the last one
    lines = [trackers.parse_record(line) for line in whole_lines]
    if damaged := lines.count(None):
        shutil.copy(file, file.with_suffix(".damaged"))
        say(f"{damaged} line(s) of {file} are damaged and left out; {file.with_suffix('.damaged').name} has them")
    whole = [line for line in lines if line is not None]
    remaining = [x for x in whole if x["step"] < step or (x["step"] == step and not (evaluates and evaluation(x)))]
    rest = "".join(json.dumps(line) + "\n" for line in remaining)
    if rest != text:
        temporary = file.with_suffix(".tmp")  # a full disk must not cost what is there
        temporary.write_text(rest)
        os.replace(temporary, file)
