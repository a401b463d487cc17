"""The process that feeds one tracker: it reads metrics.jsonl and generations.jsonl as a run writes them.

rl/run/tracking.py starts one for each of wandb, swanlab and tensorboard. The files are the queue: a tracker that is
slow, fails or cannot be reached holds up nobody but this process, which outlives the run by `limit_s` seconds at most.
By hand it sends what a run has written, for instance after the tracker could not be reached:

    python -m rl.run.tracking_worker wandb runs/glassrl/grpo my-project my-experiment
"""

import itertools
import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

POLL_S = 1.0  # seconds between two looks at the files


class Connection(NamedTuple):
    """An open run in a tracker."""

    log: Callable[[int, dict[str, float]], None]  # step, metrics
    log_generations: Callable[[int, str, list[dict[str, Any]]], None]  # step, title, what is shown of each
    finish: Callable[[bool], None]  # whether the run came to its end


def connect_wandb(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Connection:
    """A new wandb run, its files in `run_dir`/wandb. Generations become a table."""
    import wandb

    run = wandb.init(project=project, name=experiment, config=config, dir=run_dir)

    def log_generations(step: int, title: str, generations: list[dict[str, Any]]) -> None:
        columns = list(generations[0])
        rows = [[str(g[c]) for c in columns] for g in generations]
        run.log({title: wandb.Table(columns=columns, data=rows)}, step=step)

    return Connection(
        lambda step, metrics: run.log(metrics, step=step), log_generations, lambda ok: run.finish(0 if ok else 1)
    )


def connect_swanlab(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Connection:
    """A new swanlab run, its files in `run_dir`/swanlab. Generations become texts."""
    import swanlab

    swanlab.init(project=project, experiment_name=experiment, config=config, logdir=f"{run_dir}/swanlab")

    def log_generations(step: int, title: str, generations: list[dict[str, Any]]) -> None:
        swanlab.log({title: [swanlab.Text(text) for text in as_texts(generations)]}, step=step)

    def finish(ok: bool) -> None:
        swanlab.finish() if ok else swanlab.finish(swanlab.State.CRASHED, "the run ended early")

    return Connection(lambda step, metrics: swanlab.log(metrics, step=step), log_generations, finish)


def connect_tensorboard(run_dir: str, project: str, experiment: str, config: dict[str, Any]) -> Connection:
    """Event files in `run_dir`/tensorboard. Generations become texts."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(f"{run_dir}/tensorboard")

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_generations(step: int, title: str, generations: list[dict[str, Any]]) -> None:
        for i, text in enumerate(as_texts(generations)):
            writer.add_text(f"{title}/{i}", text, step)

    return Connection(log, log_generations, lambda ok: writer.close())


CONNECT = {"wandb": connect_wandb, "swanlab": connect_swanlab, "tensorboard": connect_tensorboard}


def as_texts(generations: list[dict[str, Any]]) -> list[str]:
    """Each generation as `name: value` paragraphs."""
    return ["\n\n".join(f"{name}: {value}" for name, value in g.items()) for g in generations]


class Reader:
    """Reads the two files from byte positions `begin` on, and knows what may be handed on in order of steps."""

    def __init__(self, run_dir: Path, begin: tuple[int, int]):
        self.files, self.positions = (run_dir / "metrics.jsonl", run_dir / "generations.jsonl"), list(begin)
        self.reached = -1  # last step with metrics
        self.held: list[dict] = []  # generations of a step whose metrics have not come yet

    def _lines(self, i: int) -> list[dict]:
        """What file i has got since the last time, whole lines only."""
        if not self.files[i].exists():
            return []
        with open(self.files[i], "rb") as f:
            f.seek(self.positions[i])
            data = f.read()
        data = data[: data.rfind(b"\n") + 1]
        self.positions[i] += len(data)
        return [json.loads(line) for line in data.splitlines()]

    def read(self, *, last: bool) -> list[tuple[int, str, list[dict]]]:
        """(step, kind, lines) in order of steps, "" for metrics, one line each.

        Trackers refuse a step below one that they have seen. A run writes generations before the metrics of their step,
        so those of later steps than the metrics read here are held back, unless nothing will follow.
        """
        metrics = self._lines(0)
        self.reached = max([self.reached, *(line["step"] for line in metrics)])
        lines = sorted([*metrics, *self.held, *self._lines(1)], key=lambda line: line["step"])
        ready = [line for line in lines if last or line["step"] <= self.reached]
        self.held = lines[len(ready) :]
        groups = itertools.groupby(ready, key=lambda line: (line["step"], line.get("kind", "")))
        return [
            (step, kind, part)
            for (step, kind), group in groups
            for part in ([list(group)] if kind else [[line] for line in group])
        ]


def hand_on(connection: Connection, step: int, kind: str, lines: list[dict]) -> None:
    """One entry of `Reader.read` to the tracker; null is NaN there."""
    if kind:
        hidden = ("step", "kind", "tokens")  # the numbers of each token are for benchmarks/view.py
        shown = [{name: value for name, value in line.items() if name not in hidden} for line in lines]
        connection.log_generations(step, f"{kind}/generations", shown)
    else:
        metrics = {name: math.nan if value is None else value for name, value in lines[0].items()}
        connection.log(step, {name: value for name, value in metrics.items() if name not in ("step", "time")})


def main() -> None:
    """Arguments: backend, run_dir, project, experiment. Then all that is there is sent.

    tracking.py adds two positions in bytes to begin at, and limit_s: this process then goes on until stdin ends, has
    limit_s seconds left from there, and returns status 0 if it has told the user what went wrong.
    """
    backend, run_dir, project, experiment, *follow = sys.argv[1:]
    again = f"python -m rl.run.tracking_worker {shlex.join(sys.argv[1:5])}"
    ended, came_to_its_end = threading.Event(), not follow

    def say(text: str) -> None:
        line = f"{backend} {text}. The numbers are in {run_dir}/metrics.jsonl; to send them later: {again}\n"
        os.write(2, line.encode())

    def wait_for_end(pipe: int, limit_s: float) -> None:
        nonlocal came_to_its_end
        came_to_its_end = os.read(pipe, 4) == b"done"
        ended.set()
        signal.alarm(math.ceil(limit_s) + 3)  # the kernel's: it ends even a process whose interpreter is stuck
        time.sleep(limit_s)
        say(f"could not be finished within {limit_s:g} s of the run's end")
        os._exit(0)

    if follow:
        for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler's, meant for the run
            signal.signal(number, signal.SIG_IGN)
        pipe = os.dup(0)  # out of reach of libraries that ask for a key on stdin
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        threading.Thread(target=wait_for_end, args=(pipe, float(follow[2])), daemon=True).start()
    else:
        ended.set()

    begin = (int(follow[0]), int(follow[1])) if follow else (0, 0)
    reader, complaints = Reader(Path(run_dir), begin), 0
    try:
        config = json.loads(Path(run_dir, "config.json").read_text())
        connection = CONNECT[backend](run_dir, project, experiment, config)
        last = False
        while not last:
            last = ended.wait(POLL_S)
            for entry in reader.read(last=last):
                try:
                    hand_on(connection, *entry)
                except Exception as error:  # whatever it is, the next line may go well
                    complaints += 1
                    if complaints == 1:
                        say(f"refused a line of step {entry[0]}: {describe(error)}")
        connection.finish(came_to_its_end)
        return
    except ImportError as error:
        say(f"gets nothing: {describe(error)} (pip install {backend})")
    except (Exception, SystemExit) as error:  # libraries also exit
        say(f"gets nothing more: {describe(error)}")
    sys.exit(0 if follow else 1)


def describe(error: BaseException) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(" :.")


if __name__ == "__main__":
    main()
