"""Do the examples of environments/ pay? A tiny model learns each, with what answers it and without, three seeds each.

    python benchmarks/environments.py --tasks calculator guess python agent

For each task, this makes the data, and trains on imperfect demonstrations (SFT). Then it runs train_grpo.py from that
checkpoint for each way and seed. At last it runs eval.py with the same flags on the last checkpoint, which must give
the run's own last evaluation to the last digit. The way `without` has no --tools for the calculator. For the game it
has --max-turns 1, which is a guess to which nothing is said. The way `echo` also learns what the calculator says. The
task `agent` has the program examples/check_agent.py, and no way without it.

Steps that are finished are skipped, so the same command again goes on where it stopped. It leaves

    <work-dir>/<task>/                                     data/, sft/ and <way>_<seed>/ of each run
    <results>/<task>_<way>_<seed>.metrics.jsonl            the metrics of a run
    <results>/environments.json                            its commands, accuracy before and after, and that of eval.py
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent
SFT = "--max-length 128 --lr 4e-3 --beta2 0.98 --lr-warmup-steps 30 --activation-checkpointing none --log-freq 100"
TRAIN = (
    "--train-batch-size 32 --rollout-n 8 --lr 1e-4 --activation-checkpointing none --log-samples-freq 20 "
    "--test-freq 10 --seed"
)


class Task(NamedTuple):
    """What is learned, and how."""

    data: str  # script of data/ and its flags
    sft_steps: int
    steps: int  # of train_grpo.py
    both: str  # flags of train_grpo.py and eval.py
    ways: dict[str, str]  # name -> more such flags
    trains: dict[str, str] = {}  # name of a way -> script and its own flags, if not train_grpo.py


CALCULATOR = "--tools environments/calculator.py --max-turns 4"
CALLS = "--max-prompt-length 40 --max-response-length 80"
TASKS = {
    "calculator": Task(
        "calculator.py",
        1200,  # after 800 some machines' rounding leaves a model that cannot copy a result yet
        60,
        CALLS,
        {"with": CALCULATOR, "without": "", "echo": CALCULATOR},
        {"echo": "train_grpo_variants.py --echo-coef 0.1"},
    ),
    "guess": Task(
        "guess.py",
        300,
        30,
        "--environment environments/guess.py:Guess --custom-reward-function rewards/environment.py "
        "--max-prompt-length 16 --max-response-length 64",
        {"with": "", "without": "--max-turns 1"},
    ),
    "python": Task(
        "calculator.py --tool python", 800, 30, CALLS, {"with": "--tools environments/python.py --max-turns 4"}
    ),
    "agent": Task(
        "arithmetic.py --num-test 256 --context 192",
        450,
        30,
        "--agent 'python examples/check_agent.py' --custom-reward-function examples/check_agent.py "
        "--max-prompt-length 32 --max-response-length 144",
        {"with": ""},
    ),
}
WAYS = tuple(dict.fromkeys(way for task in TASKS.values() for way in task.ways))


@dataclass(frozen=True)
class Args:
    tasks: tuple[Literal[*TASKS], ...] = tuple(TASKS)
    """These tasks are run."""
    ways: tuple[Literal[*WAYS], ...] = WAYS
    """These ways of each task are run, if it has them."""
    steps: int | None = None
    """Runs have this many steps. By default each task says how many."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """train_grpo.py runs with each of these seeds. Data and SFT have seed 0."""
    engine: str = "vllm"
    """The engine is vllm or hf."""
    work_dir: Path = Path("runs/environments")
    """Data, checkpoints and logs are written to this folder."""
    results: Path = Path("runs/environments/results")
    """The metrics and environments.json are written to this folder."""


def run(command: str, folder: Path) -> None:
    """Run a script of this repository unless it is finished: then `folder`/done has the command. See output.log."""
    done = folder / "done"
    if done.exists() and done.read_text() == command:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"python {command}", flush=True)
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    with open(folder / "output.log", "w") as log:
        subprocess.run([sys.executable, *shlex.split(command)], check=True, env=env, stdout=log, stderr=log)
    done.write_text(command)


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def commands(name: str, way: str, seed: int, args: Args) -> dict[str, tuple[str, Path]]:
    """Data, SFT, a run and its evaluation, in this order: each command, and the folder that it is finished in."""
    task, folder = TASKS[name], args.work_dir / name
    steps = args.steps or task.steps
    files, own = folder / "data/files", folder / f"{way}_{seed}"
    flags = f"--val-files {files}/test.parquet --engine {args.engine} {task.both} {task.ways[way]}"
    sft = f"sft.py --model {files}/model --train-files {files}/sft.parquet {SFT}"
    train = f"{task.trains.get(way, 'train_grpo.py')} --model {folder}/sft/run/global_step_{task.sft_steps}/huggingface"
    train = f"{train} --train-files {files}/train.parquet {flags} {TRAIN} {seed} --total-training-steps {steps}"
    evaluate = f"eval.py --model {own}/run/global_step_{steps}/huggingface {flags} --seed {seed}"
    return {
        "data": (f"data/{task.data} --output-dir {files}", folder / "data"),
        "sft": (f"{sft} --total-training-steps {task.sft_steps} --default-local-dir {folder}/sft/run", folder / "sft"),
        "train": (f"{train} --default-local-dir {own}/run", own),
        "evaluate": (f"{evaluate} --output {own}/eval/responses.jsonl", own / "eval"),
    }


def learn(name: str, way: str, seed: int, args: Args) -> dict:
    """A run and its evaluation. Returns what is to be known of it. Raises RuntimeError if the two differ."""
    made = commands(name, way, seed, args)
    for command, folder in made.values():
        run(command, folder)
    own = made["train"][1]
    accuracy = {x["step"]: x["val/accuracy"] for x in read_jsonl(own / "run/metrics.jsonl") if "val/accuracy" in x}
    scores = [x.get("acc", x["score"]) or 0.0 for x in read_jsonl(own / "eval/responses.jsonl")]
    found = {"run": f"{name}_{way}", "seed": seed, "accuracy": accuracy, "num_prompts": len(scores)}
    found |= {"before": accuracy[0], "after": accuracy[max(accuracy)], "eval": sum(scores) / len(scores)}
    if found["after"] != found["eval"]:
        raise RuntimeError(f"{own}: the run's last evaluation is {found['after']}, and eval.py says {found['eval']}")
    args.results.mkdir(parents=True, exist_ok=True)
    shutil.copy(own / "run/metrics.jsonl", args.results / f"{name}_{way}_{seed}.metrics.jsonl")
    return found | {key: command for key, (command, _) in made.items()}


def main(args: Args) -> list[dict]:
    """Run all, print a line for each, and write environments.json."""
    os.chdir(ROOT)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    found = []
    for name in args.tasks:
        for seed in args.seeds:
            for way in [x for x in TASKS[name].ways if x in args.ways]:
                found.append(learn(name, way, seed, args))
                x = found[-1]
                print(f"{name:12}{way:9}seed {seed}   {x['before']:.4f} to {x['after']:.4f}   eval.py {x['eval']:.4f}")
                text = json.dumps({"commit": commit, "engine": args.engine, "runs": found}, indent=1)
                (args.results / "environments.json").write_text(text + "\n")
    return found


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
