"""A long run that is killed: is there one curve, and do memory, open files or seconds per step grow?

    python benchmarks/long_run.py                       # 1,000 steps of SmolLM2-135M on a GPU, killed three times
    python benchmarks/long_run.py --task 30B-A3B --gpus 4 --tokenizer path/to/qwen2_tokenizer       # 40 steps of LoRA
    python benchmarks/long_run.py --task 4B-hybrid --gpus 4 --tokenizer path/to/qwen2_tokenizer     # 60 steps
    python benchmarks/long_run.py --task sums --kill-after 12 31 43 --every 0.5 --extra="--total-training-steps 100 \\
        --test-freq 20 --save-freq 10 --engine hf"      # a tiny model on a CPU, in a few minutes

This starts train_grpo.py as a user would. When a step of --kill-after has ended, and a random part of the next one has
passed, the process group gets SIGKILL, and the same command starts again. It resumes from the newest checkpoint. The
longest part without a kill is the last one, where a leak shows best. Meanwhile this looks at the process and at all
that it has started: resident memory (pages that processes share count for each), open files and threads. nvidia-smi
says what is in use on all GPUs of the machine, so nothing else should run there. With --extra="--max-hours 0.1" a start
ends by itself after six minutes. The same command again goes on from there.

    <work-dir>/<task>/long_run/               metrics.jsonl and checkpoints, and output_<n>.log of each start
    <work-dir>/<task>/long_run/samples.jsonl  what was seen, and a line for each kill
    <results>/<task>.json, .md and .png       the first and the last tenth of the steps of each start; the curves
"""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import leaderboard, learning  # noqa: E402
from benchmarks.learning import lines_of  # noqa: E402

LONG = "--total-training-steps 1000 --test-freq 100 --save-freq 50 --max-ckpt-to-keep 3"
SIZES = {  # flags of a run with the model and the data of a task of benchmarks/leaderboard.py
    "sums": LONG,
    # Short steps, since there are many. The longest demonstration has 148 tokens.
    "word_problems": f"{LONG} --train-batch-size 8 --ppo-mini-batch-size 8 --max-response-length 160",
}
# Random weights of 30B differ more between engine and trainer than a run may by default.
NOISE = (
    "--max-prompt-length 128 --max-response-length 512 --train-batch-size 16 --test-freq -1 --no-val-before-train "
    "--log-samples-freq 0 --max-ckpt-to-keep 1 --max-logprob-gap 1 --compile"
)
SHAPES = {  # flags of a run with random weights of a shape of benchmarks/make_model.py, and random rewards
    "30B-A3B": f"{NOISE} --rollout-n 8 --total-training-steps 40 --save-freq 10 --lora-rank 32 --lr 1e-5 "
    "--tensor-model-parallel-size 2",
    "4B-hybrid": f"{NOISE} --rollout-n 8 --total-training-steps 60 --save-freq 15",
    "tiny": f"{NOISE} --rollout-n 4 --total-training-steps 20 --save-freq 4 --max-response-length 32",  # for a CPU
}
KILLS = {"30B-A3B": (23,), "4B-hybrid": (34,), "tiny": (10,)}  # by default, after the second checkpoint
SEEN = {  # columns of the table
    "score": "mean score",
    "gap": "gap",
    "norm": "norm of gradients",
    "length": "tokens of a response",
    "seconds": "s per step",
    "memory": "memory, GiB",
    "files": "open files",
    "threads": "threads",
    "gpu": "GPU, GiB",
}


@dataclass(frozen=True)
class Args:
    task: Literal[*SIZES, *SHAPES] = "word_problems"
    """Model and data are those of this task of benchmarks/leaderboard.py, or random ones of this shape of
    benchmarks/make_model.py."""
    kill_after: tuple[int, ...] | None = None
    """The run is killed in the step after each of these. The default is 120, 252 and 410, and for a shape see KILLS.
    Soon after step 250 a checkpoint may not be complete."""
    gpus: int = 1
    """The run has this many ranks."""
    tokenizer: str | None = None
    """This is the folder of a Qwen2 tokenizer, which a shape needs."""
    every: float = 2.0
    """Memory, files and threads are recorded every time that this many seconds have passed."""
    seed: int = 0
    """The seed decides the run, and at which moment of a step a kill comes."""
    extra: str = ""
    """The run gets these flags after all others."""
    work_dir: Path = Path("runs/long_run")
    """Data, checkpoints and the run are in this folder."""
    results: Path = Path("runs/long_run")
    """Results are written to this folder."""


def kills_of(args: Args) -> tuple[int, ...]:
    """The steps after which the run is killed."""
    return KILLS.get(args.task, (120, 252, 410)) if args.kill_after is None else args.kill_after


def look(process: psutil.Process) -> dict[str, float]:
    """Memory, open files and threads of a process and all below it, and memory in use on the machine's GPUs if any."""
    seen = []
    for x in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):  # it has just ended
            seen.append((x.memory_info().rss / 2**30, x.num_fds(), x.num_threads()))
    found = dict(zip(("memory", "files", "threads"), map(sum, zip(*seen, strict=True)), strict=False))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        mib = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        found["gpu"] = sum(map(int, mib)) / 1024
    return found


def watch(run: psutil.Popen, folder: Path, kill_after: int | None, args: Args) -> Iterator[dict[str, Any]]:
    """Look at the processes of a start until it ends. Those of a start with `kill_after` are killed after that step.
    The last line then has the key killed_after.
    """
    began, looked = time.time(), 0.0
    while run.poll() is None:
        new = [x for x in lines_of(folder / "metrics.jsonl", last=1) if x["time"] > began]  # none before its first step
        if new and kill_after is not None and new[0]["step"] >= kill_after:
            time.sleep(random.Random(f"{args.seed} {kill_after}").uniform(0, new[0].get("timing_s/step", 1)))
            below, saving = run.children(recursive=True), any(folder.glob(".tmp-global_step_*"))
            os.killpg(run.pid, signal.SIGKILL)
            # Some have groups of their own, and end by themselves.
            _, left = psutil.wait_procs([run, *below], timeout=60)
            [last] = lines_of(folder / "metrics.jsonl", last=1)
            if left:  # the next start would run beside them
                raise RuntimeError(f"{[str(x) for x in left]} still run 60 s after the kill")
            yield {"killed_after": last["step"], "saving": saving}
        elif time.time() > looked + args.every:
            looked = time.time()
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                yield {"step": new[0]["step"] + 1 if new else None} | look(run)  # the step that it is in
        time.sleep(0.2)


def make(command: str, folder: Path, args: Args) -> None:
    """Start the command, and again after each kill. Raises RuntimeError if it ends with an error."""
    folder.mkdir(parents=True, exist_ok=True)
    start, killed = len(list(folder.glob("output_*.log"))), True
    while killed:
        kills = sum("killed_after" in x for x in lines_of(folder / "samples.jsonl"))
        log, kill_after = folder / f"output_{start}.log", next(iter(sorted(kills_of(args))[kills:]), None)
        print(f"start {start}, to be killed after step {kill_after}: python {command}", flush=True)
        with open(log, "w") as output, open(folder / "samples.jsonl", "a", buffering=1) as samples:
            words = [sys.executable, *shlex.split(command)]
            killed, run = False, psutil.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                for line in watch(run, folder, kill_after, args):
                    killed = "killed_after" in line
                    print(json.dumps({"start": start} | line), file=samples)
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
        if run.wait() != 0 and not killed:
            raise RuntimeError(f"python {command}: exit {run.returncode}: {learning.last_error(log)}; see {log}")
        start += 1


def points(folder: Path) -> list[dict[str, Any]]:
    """What is known of steps, by the names of SEEN and accuracy. What samples.jsonl knows also has the start."""
    names = {"val/accuracy": "accuracy", "critic/score/mean": "score", "response_length/mean": "length"}
    names |= {"rollout/logprob_gap_mean": "gap", "actor/grad_norm": "norm"}
    found = []
    for x in lines_of(folder / "metrics.jsonl"):
        found.append({"step": x["step"]} | {name: x[key] for key, name in names.items() if key in x})
        if "timing_s/step" in x:
            found[-1]["seconds"] = learning.training_seconds(x)
    last = found[-1]["step"]  # after it the processes end
    return found + [x for x in lines_of(folder / "samples.jsonl") if 0 < (x.get("step") or 0) <= last]


def report(folder: Path) -> dict[str, Any]:
    """What a run has left. `parts` has the steps of each start that no later start repeated, and the whole run at the
    end. Each part has medians over the first and the last tenth of its steps.
    """
    logs = [folder / f"output_{i}.log" for i in range(len(list(folder.glob("output_*.log"))))]
    seen = points(folder)
    steps = [x["step"] for x in seen if "seconds" in x]
    begins, now = [], 0
    for log in logs:  # one that ended before it said where it begins has begun where the one before it did
        found = re.search(r": new run, steps|resumed from .*global_step_(\d+)", log.read_text())
        now = int(found[1] or 0) if found else now
        begins.append(now)
    begins.append(steps[-1])

    def part(start: int | None, begin: int, end: int) -> dict[str, Any]:
        tenth, here = max(1, (end - begin) // 10), [x for x in seen if start is None or x.get("start", start) == start]
        ends = [[x for x in here if a < x["step"] <= a + tenth] for a in (begin, end - tenth)]
        medians = {
            name: [median(y) if (y := [x[name] for x in z if name in x]) else None for z in ends] for name in SEEN
        }
        return {"start": start, "steps": [begin + 1, end]} | medians

    kills = [x for x in lines_of(folder / "samples.jsonl") if "killed_after" in x]
    parts = [part(i, begin, end) for i, (begin, end) in enumerate(pairwise(begins)) if begin < end]
    return {
        "steps_once": steps == list(range(1, len(steps) + 1)),
        "accuracy": {x["step"]: x["accuracy"] for x in seen if "accuracy" in x},
        "kills": [x | {"resumed_from": begins[x["start"] + 1]} for x in kills],
        "parts": [*parts, part(None, 0, steps[-1])],
    }


def table(found: dict[str, Any]) -> str:
    """A row for each start and one for the whole run, in markdown."""
    lines = ["| start | steps | repeated | " + " | ".join(SEEN.values()) + " |", "|" + "---|" * (3 + len(SEEN))]
    repeated = {x["start"]: x["killed_after"] - x["resumed_from"] for x in found["kills"]}
    repeated[None] = sum(repeated.values())
    for x in found["parts"]:
        cells = ["all" if x["start"] is None else str(x["start"]), "{} to {}".format(*x["steps"])]
        cells.append(str(repeated.get(x["start"], 0)))
        cells += ["-" if None in x[name] else "{:.4g} to {:.4g}".format(*x[name]) for name in SEEN]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(folder: Path, kills: list[dict[str, Any]], path: Path) -> None:
    """What is known of each step. A dotted line is a kill."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 5, figsize=(20, 6), layout="constrained")
    for axis, (name, title) in zip(axes.flat, [("accuracy", "held-out accuracy"), *SEEN.items()], strict=True):
        seen = [x for x in points(folder) if name in x]
        for start in dict.fromkeys(x.get("start") for x in seen):
            curve = [(x["step"], x[name]) for x in seen if x.get("start") == start]
            axis.plot(*zip(*curve, strict=True), "o-" if name == "accuracy" else "-", linewidth=1)
        for kill in kills:
            axis.axvline(kill["killed_after"], color="gray", linestyle="dotted")
        axis.set(title=title, xlabel="steps")
    figure.savefig(path, dpi=110)


def prepare(args: Args) -> tuple[str, str]:
    """Make model and data, unless they exist. Returns the model's folder and the flags of the data."""
    folder = args.work_dir / args.task
    if args.task in SIZES:
        model = leaderboard.prepare(leaderboard.Args(task=args.task, work_dir=args.work_dir))
        return model, f"--train-files {folder}/data/train.parquet --val-files {folder}/data/test.parquet"
    from benchmarks import step_time

    model = str(step_time.model_folder(args.task, args.tokenizer, args.work_dir, "fixed", 0.0))
    if not (rows := folder / "rows.jsonl").exists():
        folder.mkdir(parents=True, exist_ok=True)
        step_time.write_prompts(rows, 1024, 128, model)
    return model, f"--train-files {rows} --custom-reward-function benchmarks/noise_reward.py"


def command_of(args: Args, model: str, data: str) -> str:
    """What python runs. `data`: the flags of the data."""
    flags = f"{leaderboard.TASKS[args.task].flags} {SIZES[args.task]}" if args.task in SIZES else SHAPES[args.task]
    start = f"-m torch.distributed.run --standalone --nproc_per_node {args.gpus} " if args.gpus > 1 else ""
    flags = f"--model {model} {data} {flags} {args.extra} --seed {args.seed}"
    return f"{start}train_grpo.py {flags} --default-local-dir {args.work_dir}/{args.task}/long_run"


def main(args: Args) -> dict[str, Any]:
    """Make the run, write its results and return them."""
    os.chdir(ROOT)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    learning.end_on_sigterm()
    folder = args.work_dir / args.task / "long_run"
    command = command_of(args, *prepare(args))
    make(command, folder, args)
    found = {"command": command, "commit": learning.commit()} | report(folder)
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{args.task}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(found) + "\n")
    plot(folder, found["kills"], path.with_suffix(".png"))
    print(f"\n{table(found)}\n")
    for name in ("accuracy", "kills", "steps_once"):
        print(f"{name}: {json.dumps(found[name])}")
    print(f"{path}, and .md and .png")
    return found


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
