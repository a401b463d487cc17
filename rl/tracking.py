"""Where metrics go: a progress line on the console and `metrics.jsonl` always; wandb, swanlab and tensorboard when
asked for.
"""

import dataclasses
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

from tqdm import tqdm

T = TypeVar("T")

Backend = Literal["console", "wandb", "swanlab", "tensorboard"]


class Tracker:
    """Writes on rank 0 and does nothing elsewhere, so that scripts call it without asking which rank they are.

    Files under `run_dir`: config.json, metrics.jsonl (one line a step), generations.jsonl (one line a logged response).
    `start` is the step a run resumes from, 0 for a new one: lines of later steps are dropped.
    """

    def __init__(
        self,
        run_dir: str,
        config: Any,
        start: int,
        backends: tuple[Backend, ...],
        project_name: str,
        experiment_name: str,
        *,
        enabled: bool,
    ):
        self.enabled, self.run_dir, self.backends = enabled, pathlib.Path(run_dir), backends
        self.wandb = self.swanlab = self.tensorboard = None
        if not enabled:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "generations.jsonl"):  # a resumed run repeats the steps after its checkpoint
            _drop_after(self.run_dir / name, start)
        config = dataclasses.asdict(config)
        (self.run_dir / "config.json").write_text(json.dumps(config, indent=2, default=str))
        if "wandb" in backends:
            import wandb

            self.wandb = wandb.init(project=project_name, name=experiment_name, config=config, dir=str(self.run_dir))
        if "swanlab" in backends:
            import swanlab

            self.swanlab = swanlab
            swanlab.init(
                project=project_name,
                experiment_name=experiment_name,
                config=config,
                logdir=str(self.run_dir / "swanlab"),
            )
        if "tensorboard" in backends:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(str(self.run_dir / "tensorboard"))

    def log(self, step: int, metrics: dict[str, float], line: str = "") -> None:
        """Record the metrics of a step everywhere; print `line` if console is on.

        Non-finite values are null in metrics.jsonl.
        """
        if not self.enabled:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with open(self.run_dir / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False) + "\n")
        if self.wandb is not None:
            self.wandb.log(metrics, step=step)
        if self.swanlab is not None:
            self.swanlab.log(metrics, step=step)
        if self.tensorboard is not None:
            for name, value in metrics.items():
                self.tensorboard.add_scalar(name, value, step)
        if line:
            self.print(line)

    def log_generations(self, step: int, kind: str, generations: list[dict]) -> None:
        """Record responses: dicts with prompt, response, score (and whatever else) to generations.jsonl and the
        trackers' tables.
        """
        if not self.enabled or not generations:
            return
        with open(self.run_dir / "generations.jsonl", "a") as f:
            for generation in generations:
                f.write(json.dumps({"step": step, "kind": kind, **generation}, default=str) + "\n")
        columns = list(generations[0])
        if self.wandb is not None:
            import wandb

            rows = [[str(g[c]) for c in columns] for g in generations]
            self.wandb.log({f"{kind}/generations": wandb.Table(columns=columns, data=rows)}, step=step)
        texts = ["\n\n".join(f"{c}: {g[c]}" for c in columns) for g in generations]
        if self.swanlab is not None:
            self.swanlab.log({f"{kind}/generations": [self.swanlab.Text(t) for t in texts]}, step=step)
        if self.tensorboard is not None:
            for i, text in enumerate(texts):
                self.tensorboard.add_text(f"{kind}/generations/{i}", text, step)

    def print(self, text: str) -> None:
        """Print on the main rank if console is among the backends."""
        if self.enabled and "console" in self.backends:
            print(text, flush=True)

    def close(self) -> None:
        """Flush and end every backend."""
        if self.wandb is not None:
            self.wandb.finish()
        if self.swanlab is not None:
            self.swanlab.finish()
        if self.tensorboard is not None:
            self.tensorboard.close()
        sys.stdout.flush()


def _drop_after(file: pathlib.Path, step: int) -> None:
    """Drop the lines that a run resumed at `step` writes again: later steps, and the evaluation of `step` itself."""

    def evaluates(line: dict) -> bool:
        return line.get("kind") == "val" or any(name.startswith("val") for name in line)

    if file.exists():
        text = file.read_text()
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # a crash may cut the last one
        kept = [line for line in lines if line["step"] < step or (line["step"] == step and not evaluates(line))]
        file.write_text("".join(json.dumps(line) + "\n" for line in kept))


def progress(name: str, items: Sequence[T]) -> Iterable[T]:
    """Iterate over a phase with a progress bar: on rank 0, on a terminal, once it has taken five seconds."""
    quiet = True if os.environ.get("RANK", "0") != "0" else None  # None: quiet unless stderr is a terminal
    return tqdm(items, desc=name, delay=5, leave=False, disable=quiet)


def show_sample(prompt: str, response: str, score: float | None) -> str:
    """A prompt, its response and its score as an indented block for the console; long texts keep their ends."""

    def clip(text: str, limit: int = 600) -> str:
        return (text if len(text) <= limit else text[: limit // 2] + " ... " + text[-limit // 2 :]).replace(
            "\n", "\n    "
        )

    return f"  prompt:   {clip(prompt)}\n  response: {clip(response)}\n  score:    {score}"


def progress_line(step: int, total: int, metrics: dict[str, float]) -> str:
    """One line a step: reward, length, loss terms, engine gap, speed, seconds by phase."""
    m = metrics
    phases = " ".join(
        f"{k} {m[f'timing_s/{k}']:.1f}"
        for k in ("gen", "update_weights", "old_log_prob", "ref", "update_actor")
        if m.get(f"timing_s/{k}", 0) >= 0.05
    )
    parts = [
        f"step {step:>{len(str(total))}}/{total}",
        f"reward {m['critic/score/mean']:.3f}",
        f"len {m['response_length/mean']:.0f}"
        + (f" ({m['response_length/clip_ratio']:.0%} cut)" if m["response_length/clip_ratio"] else ""),
        f"entropy {m['actor/entropy']:.3f}",
        f"kl {m['actor/kl_loss']:.4f}" if "actor/kl_loss" in m else f"clip {m['actor/pg_clipfrac']:.3f}",
        f"gap {m['rollout/logprob_gap_mean']:.0e}",
        f"|g| {m['actor/grad_norm']:.2f}",
        f"{m['perf/throughput'] / 1000:.1f}k tok/s/GPU",
        f"{m['timing_s/step']:.1f} s ({phases})",
    ]
    if "val/accuracy" in m:
        parts.append(f"val {m['val/accuracy']:.3f}")
    return " | ".join(parts)
