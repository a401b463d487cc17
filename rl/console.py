"""What a run prints: messages that cannot fail, progress bars, one line per step, and a sample now and then."""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Iterable
from typing import TextIO

import psutil
from tqdm import tqdm

_torchrun = psutil.Process().parent() if "TORCHELASTIC_RUN_ID" in os.environ else None
_began = (_torchrun or psutil.Process()).create_time()
_last = [_began]  # when the last phase of the start ended

# What the line of a step says, in this order, of the metrics that there are. `m` has all of them by name. Extras add
# entries of their own at the end.
SHOWN = {
    "critic/score/mean": "reward {:.3f}",
    "train/loss": "loss {:.4f}",
    "train/accuracy": "accuracy {:.3f}",
    "train/grad_norm": "|g| {:.2f}",
    "response_length/mean": "len {:.0f}",
    "actor/entropy": "entropy {:.3f}",
    "actor/kl_loss": "kl {:.4f}",
    "actor/pg_clipfrac": "clip {:.3f}",
    "rollout/logprob_gap_mean": "gap {:.0e}",
    "rewards/margins": "margin {:.3f}",
    "distillation/kl": "to teacher {:.4f}",
    "reward_model/dpo_acc": "prm right {:.2f}",
    "actor/grad_norm": "|g| {:.2f}",
    "critic/vf_explained_var": "explained {:.2f}",
}
PHASES = ("gen", "update_weights", "old_log_prob", "ref", "update_actor")  # whose seconds it gives


def say(text: str, stream: TextIO | None = None) -> None:
    """Print at once, by default to stdout. A full disk, a closed pipe or letters unknown to the terminal do no harm."""
    with contextlib.suppress(OSError):  # the text stays in the stream's buffer
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            print(text.encode("ascii", "backslashreplace").decode(), file=stream, flush=True)


def started(phase: str) -> bool:
    """Print, on rank 0, that a phase of the start has ended, with its seconds and those since the command. Returns
    True, for callers who have to know that this has been said.
    """
    before, now = _last[0], time.time()
    _last[0] = now
    if os.environ.get("RANK", "0") == "0":
        say(f"start | {phase} {now - before:.1f} s | {now - _began:.1f} s since the command")
    return True


def outlive_output() -> None:
    """Keep the exit code of what this process did. Without this call Python ends with 120 if the reader of its output
    has gone (`| head -1`) or the disk of its log is full.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # it was closed. Without this, the next file that is opened would be taken for it.
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")
    atexit.register(let_go_of_output)


def let_go_of_output() -> None:
    """Write what is left for stdout and stderr, and throw away what they do not take."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            stream.flush()


def progress(name: str, items: Iterable, total: int | None = None) -> tqdm:
    """Iterate over a phase. Rank 0 shows a progress bar on a terminal, once the phase has taken five seconds."""
    quiet = True if os.environ.get("RANK", "0") != "0" else None  # None is quiet unless stderr is a terminal
    return tqdm(items, desc=name, total=total, delay=5, leave=False, disable=quiet)


def progress_line(step: int, total: int, metrics: dict[str, float]) -> str:
    """The line of a step has the metrics that SHOWN names, tokens per second, and seconds of the step and by phase."""
    parts = {name: form.format(metrics[name], m=metrics) for name, form in SHOWN.items() if name in metrics}
    if cut := metrics.get("response_length/clip_ratio"):
        parts["response_length/mean"] += f" ({cut:.0%} cut)"
    phases = " ".join(f"{x} {seconds:.1f}" for x in PHASES if (seconds := metrics.get(f"timing_s/{x}", 0.0)) >= 0.05)
    speed = f"{metrics['perf/throughput'] / 1000:.1f}k tok/s/GPU"
    time = f"{metrics['timing_s/step']:.1f} s" + (f" ({phases})" if phases else "")
    return " | ".join([f"step {step:>{len(str(total))}}/{total}", *parts.values(), speed, time])


def show_sample(prompt: str, response: str, score: float | None) -> str:
    """A prompt, its response and its score as an indented block for the console. Long texts keep their ends."""
    texts = (x if len(x) <= 600 else f"{x[:300]} ... {x[-300:]}" for x in (prompt, response))
    prompt, response = (x.replace("\n", "\n    ") for x in texts)
    return f"  prompt:   {prompt}\n  response: {response}\n  score:    {score}"
