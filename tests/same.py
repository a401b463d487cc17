"""Do two commits compute the same numbers? Short runs of every script on a CPU, on both commits, compared bit by bit.

    python tests/same.py main .                         # main against the working tree: about five minutes
    python tests/same.py HEAD~3 HEAD --only ppo dapo    # only these runs

This is for changes that should change nothing: code that is moved, renamed or simplified. Each commit gets a worktree
in a temporary folder, and both get the same command lines, model folders and data files, which are made by the second
commit. `.` stands for the working tree with all changes to files that git knows.

It compares the metrics of each step, and the printed results and the answers of eval.py. It also compares the sha256 of
every tensor of exported weights, adapters, parameters and optimizer state, the state of the loop, and the other files
of exported models. What a clock or the use of memory decides is left out, see `MEASURED`. The exit status is 0 if
everything is the same, and 1 if anything differs or if a run fails.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

# A metric is left out if a word of its name says that it is a time, an amount of memory, or one of them per other.
MEASURED = re.compile(r"(^|[/_.])(time|timing|seconds|s|idle|balanced|memory|gb|throughput|mfu)([/_.]|$)|score\.4$")
TIMEOUT_S = 900  # of a command; they take seconds, but perhaps beside much else

# Up to three turns, whose messages depend on the seed and on the answers.
GAME = """
class Environment:
    def reset(self, row, seed):
        return [{"role": "user", "content": str(seed % 1000)}]

    def step(self, reply):
        return (None if reply.turn == 3 else [{"role": "user", "content": str(len(reply.text))}]), 0.25
"""


class Command(NamedTuple):
    """A script with its flags, on this many ranks."""

    script: str
    settings: dict[str, Any]
    nproc: int = 0


class Side(NamedTuple):
    """One of the two commits."""

    name: str  # old or new
    tree: Path  # the commit's files
    runs: Path  # the runs' folders


class Helpers(NamedTuple):
    """Modules of tests/ of the second commit."""

    scripts: Any
    families: Any
    launch: Any


# ---------------------------------------------------------------------------------------------------------------------
# The runs


class Inputs:
    """Model folders and data files that both commits read, made once and by the second commit."""

    def __init__(self, helpers: Helpers, root: Path):
        self.h, self.families, self.root = helpers.scripts, helpers.families, root
        self.task = self.h.make_task_with_stops(root / "task")
        self.h.reward_settings(self.task, root)  # writes the preferences
        (root / "game.py").write_text(GAME)
        self.experts = self.model("experts")
        self.hybrid = self.model("delta nets")
        self.teacher = self.lively()
        self.judge = self.scoring()
        self.dots, self.calculator = root / "dots", root / "calculator"
        dots, calculator = (importlib.import_module(f"data.{name}") for name in ("dots", "calculator"))
        dots.main(dots.Args(self.dots, num_sft=8, num_train=8, num_test=4))
        sizes = dict(num_sft=64, num_train=16, num_test=8)
        calculator.main(calculator.Args(self.calculator, **sizes))
        self.caller = self.taught(helpers.launch)

    def model(self, family: str) -> str:
        """A tiny model of a family, with the tokenizer of the task."""
        folder = self.root / family.replace(" ", "_")
        self.h.AutoTokenizer.from_pretrained(self.task.model).save_pretrained(folder)
        return self.families.save(family, folder)

    def lively(self) -> str:
        """The task's model with other weights."""
        folder = self.root / "teacher"
        self.h.AutoTokenizer.from_pretrained(self.task.model).save_pretrained(folder)
        model = self.h.AutoModelForCausalLM.from_pretrained(self.task.model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for x in model.parameters():
                x.add_(0.1 * torch.randn(x.shape, generator=generator))
        model.save_pretrained(folder)
        return str(folder)

    def scoring(self) -> str:
        """A reward model."""
        folder = self.root / "judge"
        self.h.AutoTokenizer.from_pretrained(self.teacher).save_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(self.teacher, num_labels=1)
        with torch.no_grad():
            model.score.weight.normal_(generator=torch.Generator().manual_seed(2))
        model.save_pretrained(folder)
        return str(folder)

    def taught(self, launch: Any) -> str:
        """A model that calls the calculator."""
        settings = dict(
            model=str(self.calculator / "model"),
            train_files=(str(self.calculator / "sft.parquet"),),
            train_batch_size=16,
            max_length=128,
            default_local_dir=str(self.root / "caller"),
            total_training_steps=150,
            lr=5e-3,
        )
        launch.run("sft.py", *self.h.flags(settings), cwd=launch.ROOT, PYTHONPATH=launch.ROOT)
        return str(self.root / "caller" / "global_step_150" / "huggingface")


def runs(x: Inputs, folder: Path) -> dict[str, list[Command]]:
    """The commands of each run, whose folder is `folder` / name: 2 or 3 steps of a tiny model."""
    h, task, two_updates = x.h, x.task, dict(ppo_mini_batch_size=2, total_training_steps=2)

    def grpo(name: str, **changes: Any) -> dict[str, Any]:
        return h.grpo_settings(task, folder / name, **two_updates | changes)

    held_out = dict(val_before_train=True, test_freq=1, val_n=2, val_temperature=1.0)
    judged = dict(reward_model=x.judge, reward_model_max_length=30)
    partial = dict(partial_rollouts=0.75, rollout_is="token", max_response_length=30, total_training_steps=3)
    variants = dict(use_kl_in_reward=True, top_p=0.9, top_k=40, loss_mode="kl_cov", kl_cov_ratio=0.1)
    variants |= dict(top_entropy_quantile=0.5)
    dots = dict(
        model=str(x.dots / "model"),
        train_files=(str(x.dots / "train.parquet"),),
        val_files=(str(x.dots / "test.parquet"),),
        max_prompt_length=64,
    )
    tools = dict(
        model=x.caller,
        train_files=(str(x.calculator / "train.parquet"),),
        val_files=(str(x.calculator / "test.parquet"),),
        tools=("environments/calculator.py",),
        max_prompt_length=64,
        max_response_length=64,
        temperature=0.7,
        max_num_seqs=1,  # else rounding depends on when the tool answers
    )
    evaluation = dict(
        model=x.teacher,
        val_files=(task.test,),
        engine="vllm",
        output=folder / "eval.jsonl",
        rollout_n=4,
        temperature=1.0,
        max_prompt_length=32,
        max_response_length=12,
        custom_reward_function=(task.reward,),
        reward_workers=1,
    )
    sft = dict(val_files=(h.few_rows(task.sft, x.root),), test_freq=2)
    preferences = dict(train_files=(str(Path(task.sft).with_name("preferences.jsonl")),), total_training_steps=2)
    begun = dict(total_training_steps=3, save_freq=1, ppo_mini_batch_size=2)
    goes_on = begun | dict(resume_mode=str(folder / "resumed" / "begun" / "global_step_1"))
    return {
        "eval": [Command("eval", evaluation)],
        "sft": [Command("sft", h.sft_settings(task, folder / "sft", **sft))],
        "reward": [Command("train_reward", h.sft_settings(task, folder / "reward", **preferences), 2)],
        "grpo": [Command("train_grpo", grpo("grpo", use_kl_loss=True, **held_out))],
        "judged": [Command("train_grpo", grpo("judged", **judged, **held_out), 2)],
        "vllm": [Command("train_grpo", grpo("vllm", engine="vllm", **held_out))],
        "two_ranks": [Command("train_grpo", grpo("two_ranks", engine="vllm", train_batch_size=5), 2)],
        "resumed": [  # on fewer ranks
            Command("train_grpo", h.grpo_settings(task, folder / "resumed" / "begun", **begun), 2),
            Command("train_grpo", h.grpo_settings(task, folder / "resumed" / "goes_on", **goes_on)),
        ],
        "partial": [Command("train_grpo_variants", grpo("partial", adv_estimator="rloo", **partial))],
        "variants": [Command("train_grpo_variants", grpo("variants", **variants))],
        "ppo": [Command("train_ppo", h.ppo_settings(task, folder / "ppo", engine="vllm", use_kl_loss=True))],
        "dapo": [Command("train_dapo", h.dapo_settings(task, folder / "dapo", gen_batch_size=7), 2)],
        "reinforce": [Command("train_reinforce", h.reinforce_settings(task, folder / "reinforce"))],
        "dpo": [Command("train_dpo", h.dpo_settings(task, folder / "dpo"))],
        "distill": [Command("train_distill", h.distill_settings(task, folder / "distill", teacher_model=x.teacher))],
        "prime": [Command("train_prime", h.prime_settings(task, folder / "prime"))],
        "async": [Command("train_async", grpo("async", samplers=1, max_staleness=0, rollout_is="token"))],
        "tools": [Command("train_grpo", grpo("tools", **tools))],
        "turns": [Command("train_grpo_variants", grpo("turns", environment=str(x.root / "game.py"), advantage_by="turn",
                          max_response_length=60, max_num_seqs=1))],
        "experts": [Command("train_grpo", grpo("experts", model=x.experts, router_replay=True))],
        "hybrid": [Command("train_grpo", grpo("hybrid", model=x.hybrid))],
        "lora": [Command("train_grpo", grpo("lora", engine="vllm", lora_rank=4, lr=1e-2, use_kl_loss=True))],
        "images": [Command("train_grpo", grpo("images", **dots))],
    }  # fmt: skip


# What differs from run to run although nothing has changed.
CHANCE = {
    "async": ("rollouter/", "trainer/", "samplers/"),  # who waited for whom
}


# ---------------------------------------------------------------------------------------------------------------------
# What a run leaves behind


def leaves(x: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """The numbers and texts in dicts and lists of JSON, each by its place."""
    if isinstance(x, (dict, list)):
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, x


def tensors(file: Path) -> dict[str, object]:
    """sha256 of each tensor's bytes."""
    found = {}
    with safe_open(file, "pt") as opened:
        for name in sorted(opened.keys()):
            x = opened.get_tensor(name)
            digest = hashlib.sha256(x.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
            found[name] = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} sha256 {digest[:12]}"
    return found


def facts(folder: Path, printed: str, chance: tuple[str, ...]) -> dict[tuple[str, str], object]:
    """{(where, name): value} of everything that is compared, in the order in which it came about."""
    found: dict[tuple[str, str], object] = {}
    for file in sorted(folder.rglob("metrics.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            kind = "evaluation" if any(name.startswith("val/") for name in line) else "step"
            for name, value in line.items():
                if not MEASURED.search(name) and not name.startswith(chance):
                    found[f"{file.parent.relative_to(folder)} {kind} {line['step']}", name] = value
    for file in sorted(folder.rglob("global_step_*/*/*"), key=lambda x: (int(x.parts[-3].split("_")[-1]), x)):
        where = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found |= {(where, name): value for name, value in tensors(file).items()}
        elif file.suffix == ".json":
            values = leaves(json.loads(file.read_text()))
            found |= {(where, name): value for name, value in values if not MEASURED.search(name)}
        else:
            found[where, "sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    if (answers := folder.with_suffix(".jsonl")).is_file():  # of eval.py
        for i, line in enumerate(map(json.loads, answers.read_text().splitlines())):
            found |= {(f"answer {i}", name): x for name, x in leaves(line) if not MEASURED.search(name)}
        for name, value in re.findall(r"^(\S+) +(-?[\d.]+)$", printed, re.MULTILINE):
            if not MEASURED.search(name):
                found["printed", name] = value
    return found


def largest_difference(side: Path, other: Path, where: str, name: str) -> str:
    """Of two tensors of the same shape; empty if there are no such tensors."""
    with contextlib.suppress(Exception):
        a, b = (safe_open(x / where, "pt").get_tensor(name).double() for x in (side, other))
        return f", largest difference {(a - b).abs().max().item():.3g}"
    return ""


def first_difference(old: Path, new: Path, a: dict, b: dict) -> str:
    """What differs between the facts of two runs; empty if nothing does."""
    odd = [key for key in [*a, *(key for key in b if key not in a)] if key not in a or key not in b or a[key] != b[key]]
    if not odd:
        return "" if a else "nothing was left behind"
    where, name = odd[0]
    values = [repr(x[odd[0]]) if odd[0] in x else "missing" for x in (a, b)]
    more = largest_difference(old, new, where, name) if where.endswith(".safetensors") else ""
    return f"{where.removeprefix('. ')}: {name}: {values[0]} | {values[1]}{more} ({len(odd)} of {len(a)} values differ)"


# ---------------------------------------------------------------------------------------------------------------------
# Running them


def git(*words: object) -> str:
    return subprocess.run(["git", *map(str, words)], check=True, capture_output=True, text=True).stdout.strip()


def commit_of(name: str) -> str:
    """The full name of a commit; `.` is the working tree, with its changes to files that git knows."""
    return git("stash", "create") or git("rev-parse", "HEAD") if name == "." else git("rev-parse", f"{name}^{{commit}}")


def load_helpers(tree: Path) -> Helpers:
    """The modules that the tests of a commit share."""
    sys.path[:1] = [str(tree / "tests"), str(tree)]
    os.environ["PYTHONPATH"] = str(tree)
    os.chdir(tree)
    helpers = Helpers(*(importlib.import_module(x) for x in ("helpers_scripts", "helpers_families", "launch")))
    assert Path(helpers.launch.__file__).is_relative_to(tree), helpers.launch.__file__
    return helpers


def execute(side: Side, name: str, commands: list[Command], helpers: Helpers) -> tuple[bool, str, float]:
    """Whether all commands of a run succeed, what they print, and how many seconds they take."""
    output, begin = "", time.monotonic()
    (side.runs / name).mkdir(parents=True)
    for command in commands:
        words = [f"{command.script}.py", *helpers.scripts.flags(command.settings)]
        env = dict(PYTHONPATH=side.tree, PYTHONDONTWRITEBYTECODE=None)
        process = helpers.launch.start(*words, nproc=command.nproc, cwd=side.tree, **env)
        try:
            output += helpers.launch.finish(process, timeout=TIMEOUT_S)
        except AssertionError as error:
            output, process.returncode = f"{output}\n{error}", 124
        (side.runs / f"{name}.log").write_text(output)
        if process.returncode:
            return False, output, time.monotonic() - begin
    return True, output, time.monotonic() - begin


def why(output: str) -> str:
    """The end of what a failed run has printed, in a line."""
    lines = [x for line in output.splitlines() if (x := line.strip(" │╭╮╰╯─"))]
    unknown = [x for x in lines if x.startswith("Unrecognized options:")]  # flags that this commit does not have
    return " / ".join(unknown or lines[-4:])[-500:]


def compare(name: str, sides: list[Side], outcomes: list[tuple[bool, str, float]]) -> tuple[bool, str]:
    """Whether the runs of two commits are the same, and a sentence about that."""
    failed = [f"{s.name} fails: {why(x)}" for s, (succeeds, x, _) in zip(sides, outcomes, strict=True) if not succeeds]
    if failed:
        return False, "; ".join(failed)
    folders = [side.runs / name for side in sides]
    found = [facts(x, out, CHANCE.get(name, ())) for x, (_, out, _) in zip(folders, outcomes, strict=True)]
    difference = first_difference(*folders, *found)
    return not difference, difference or f"same ({len(found[0]):,} values)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit")
    parser.add_argument("new", help="a commit, or . for the working tree")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these runs")
    parser.add_argument("--jobs", type=int, default=2, help="run this many commands at a time")
    parser.add_argument("--keep", action="store_true", help="leave the worktrees, the runs and their logs")
    args = parser.parse_args()
    commits, begin = {"old": commit_of(args.old), "new": commit_of(args.new)}, time.monotonic()
    repository = git("rev-parse", "--show-toplevel")
    root = Path(tempfile.mkdtemp(prefix="same-"))
    sides = [Side(name, root / name / "tree", root / name / "runs") for name in commits]
    try:
        for side in sides:
            git("-C", repository, "worktree", "add", "--detach", side.tree, commits[side.name])
        helpers = load_helpers(sides[1].tree)
        with open(root / "inputs.log", "w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            inputs = Inputs(helpers, root / "inputs")
        commands = {side.name: runs(inputs, side.runs) for side in sides}
        names = args.only or list(commands["old"])
        if unknown := set(names) - set(commands["old"]):
            raise SystemExit(f"--only {' '.join(unknown)}: there are {' '.join(commands['old'])}")
        print(f"the inputs took {time.monotonic() - begin:.0f} s\n", flush=True)
        print(f"{'run':<12}{'s old':>7}{'s new':>7}  what differs first: old | new", flush=True)
        pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
        try:
            started = {
                name: [pool.submit(execute, side, name, commands[side.name][name], helpers) for side in sides]
                for name in names
            }
            same = 0
            for name, futures in started.items():
                outcomes = [future.result() for future in futures]
                is_same, sentence = compare(name, sides, outcomes)
                same += is_same
                print(f"{name:<12}{''.join(f'{s:>7.0f}' for _, _, s in outcomes)}  {sentence}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)
        print(f"\n{same} of {len(names)} runs are the same; {time.monotonic() - begin:.0f} s")
        return int(same < len(names))
    finally:
        if args.keep:
            print(f"{root} has the worktrees, the runs and their logs")
        else:
            for side in sides:
                subprocess.run(
                    ["git", "-C", repository, "worktree", "remove", "--force", side.tree], capture_output=True
                )
            subprocess.run(["rm", "-rf", root])


if __name__ == "__main__":
    sys.exit(main())
