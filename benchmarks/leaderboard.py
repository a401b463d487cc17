"""The leaderboard: after how many seconds of training does a policy reach a target? docs/leaderboard.md has the rules.

    python benchmarks/leaderboard.py --task sums                          # all entries of the task, on a CPU
    python benchmarks/leaderboard.py --task word_problems --only grpo     # on a GPU
    python benchmarks/leaderboard.py --task sums --name mine --command "my_grpo.py --lr 3e-5"     # a new entry

All entries of a task start from the same checkpoint, which is made first and kept. Greedy accuracy on the held-out rows
is measured every five steps. The result of a run is the number of seconds of its steps until the first of two
consecutive evaluations that reach the target. Start-up and evaluations do not count. Everything in a step counts,
such as a compilation in the first one. One run has the machine at a time, since runs at the same time slow each other.
A run is ended as soon as its result is known.

Finished runs are skipped, so the same command again goes on where it stopped:

    <work-dir>/<task>/<entry>/seed_<n>/    metrics.jsonl, output.log and result.json of a run
    <results>/<task>.json                  a line per run: command, accuracy at every evaluation, seconds, commit, ...
    <results>/<task>.md                    the table
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import learning, pretrained  # noqa: E402

EVERY = 5  # steps from one evaluation to the next


class Task(NamedTuple):
    """What all entries of a task have in common, and the entries."""

    target: float
    """Greedy accuracy on the held-out rows that two consecutive evaluations must reach."""
    rows: int
    """Number of held-out rows."""
    flags: str
    """Flags of every entry. The flags of an entry come after these and may override them."""
    entries: dict[str, str]
    """Script and flags of each entry."""


SUMS = learning.SETTINGS["hard"]._replace(data="--num-sft 57600 --max-total 19 --num-test 1024")
TASKS = {
    # Sums of several numbers, worked out in steps: the policy has to learn that showing its work pays, and to add.
    "sums": Task(
        target=0.50,
        rows=1024,
        flags=f"{SUMS.train} --ppo-mini-batch-size 8 --lr 3e-5",
        entries={
            "grpo": "train_grpo.py",
            "dapo": "train_dapo.py --lr-warmup-steps 0 --weight-decay 0.01",
            "ppo": "train_ppo.py --train-batch-size 256 --rollout-n 1 --ppo-mini-batch-size 64 --critic-lr 1e-3",
            "trl": "benchmarks/pretrained_trl.py",
        },
    ),
    # SmolLM2-135M after SFT on 1,000 solutions.
    "word_problems": Task(
        target=0.37,
        rows=pretrained.TASKS["word_problems"].num_test,
        flags=f"{pretrained.TRAIN} --test-freq {EVERY}",
        entries={
            "grpo": "train_grpo.py",
            "dapo": "train_dapo.py --lr-warmup-steps 0 --weight-decay 0.01",
            "ppo": pretrained.PPO,
            "trl": "benchmarks/pretrained_trl.py",
        },
    ),
}


@dataclass(frozen=True)
class Args:
    task: Literal["sums", "word_problems"] = "sums"
    """Task and starting point. `sums` is the harder task of data/arithmetic.py on a CPU, and `word_problems` is
    SmolLM2-135M on data/word_problems.py on a GPU."""
    only: tuple[str, ...] = ()
    """Names of the entries to run. The default is all of them."""
    name: str | None = None
    """Name of a new entry, which --command starts."""
    command: str | None = None
    """Script and flags of the new entry. The flags of the task come before them."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of every entry."""
    timeout: float = 7200.0
    """Seconds after which a run is ended, and counted as failed."""
    extra: str = ""
    """Flags of every run after all others, such as "--total-training-steps 5" for a quick look."""
    work_dir: Path = Path("runs/leaderboard")
    """Folder of the data, the checkpoints and the runs."""
    results: Path = Path("runs/leaderboard")
    """Folder of the results. Those of the repository are in benchmarks/results."""


def first_of_two(steps: list[int], accuracy: list[float], target: float) -> int | None:
    """The step of the first of two consecutive evaluations that reach the target, or None if there are no such two. One
    evaluation alone may reach it by chance.
    """
    pairs = zip(steps, accuracy, accuracy[1:], strict=False)
    return next((step for step, here, after in pairs if min(here, after) >= target), None)


def has_result(job: learning.Job, target: float) -> bool:
    """Whether a run that goes on has reached the target twice in a row, so that its result is known."""
    evaluations = [x for x in learning.metrics_of(job) if "val/accuracy" in x]
    steps, accuracy = [x["step"] for x in evaluations], [x["val/accuracy"] for x in evaluations]
    return first_of_two(steps, accuracy, target) is not None


def with_result(x: dict[str, Any], target: float) -> dict[str, Any]:
    """A result of learning.run_all with the keys target_step and target_seconds, which are None if the run never
    reached the target, or failed.
    """
    step = None if x["error"] else first_of_two(x["steps"], x["accuracy"], target)
    return x | {
        "target_step": step,
        "target_seconds": None if step is None else x["train_seconds"][x["steps"].index(step)],
    }


def table(results: list[dict[str, Any]]) -> str:
    """A markdown row per entry, the fastest first: the median of the seconds over the seeds, the seconds and the steps
    of each seed. An entry of which a seed never reached the target comes last.
    """
    lines = ["| entry | seconds, median | by seed | steps, by seed |", "|---|---|---|---|"]
    rows = []
    for name in dict.fromkeys(x["name"] for x in results):
        runs = sorted((x for x in results if x["name"] == name), key=lambda x: x["seed"])
        seconds = [x["target_seconds"] for x in runs]
        middle = None if None in seconds else median(seconds)
        cells = [f"`{name}`", "-" if middle is None else f"{middle:.1f}"]
        cells.append(", ".join("never" if s is None else f"{s:.1f}" for s in seconds))
        cells.append(", ".join("-" if x["target_step"] is None else str(x["target_step"]) for x in runs))
        rows.append((float("inf") if middle is None else middle, f"| {' | '.join(cells)} |"))
    return "\n".join(lines + [row for _, row in sorted(rows, key=lambda row: row[0])])


def prepare(args: Args) -> str:
    """Make data and checkpoint of the task, unless they exist. Returns the folder of the checkpoint."""
    if args.task == "sums":
        return learning.prepare(args.work_dir / "sums", SUMS)
    return pretrained.prepare(pretrained.Args(task="word_problems", work_dir=args.work_dir))


def main(args: Args) -> list[dict[str, Any]]:
    """Make the runs that are missing, write the results of all runs of the task that are found, and return these."""
    os.chdir(ROOT)
    task, folder = TASKS[args.task], args.work_dir / args.task
    if (args.name is None) != (args.command is None):
        raise ValueError(f"--name {args.name} and --command {args.command} come together: give both for a new entry")
    entries = {args.name: args.command} if args.name and args.command else task.entries
    if unknown := sorted(set(args.only) - set(entries)):
        raise ValueError(f"--only {' '.join(unknown)}: unknown; choose from {', '.join(entries)}")
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if args.task == "sums":
        os.environ["OMP_NUM_THREADS"] = "1"  # on a model this small, two threads are hardly faster
    learning.end_on_sigterm()
    model = prepare(args)
    files = f"--model {model} --train-files {folder}/data/train.parquet --val-files {folder}/data/test.parquet"
    names = [name for name in entries if not args.only or name in args.only]
    jobs = learning.make_jobs({args.task: entries}, folder, f"{files} {task.flags}", names, args.seeds, args.extra)
    missing = [x for x in jobs if not (y := learning.result(x)) or y["error"]]
    learning.run_all(missing, 1, args.timeout, has_ended=lambda job: has_result(job, task.target))
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*/seed_*/result.json"))]
    results = [with_result(x, task.target) for x in found]
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{args.task}.json"
    prepared = (folder / "sft.json").read_text().strip()
    lines = ",\n".join(json.dumps(x) for x in results)
    path.write_text(
        f'{{"target": {task.target}, "rows": {task.rows}, "prepared_by": {prepared},\n"runs": [\n{lines}\n]}}\n'
    )
    path.with_suffix(".md").write_text(table(results) + "\n")
    print(f"\n{table(results)}\n\n{path}, and .md", flush=True)
    return results


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
