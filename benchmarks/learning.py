"""Does every algorithm learn? Held-out accuracy against steps and against sampled responses, three seeds each.

    python benchmarks/learning.py --setting easy --jobs 2
    python benchmarks/learning.py --setting easy --only grpo rloo --seeds 0

All runs of a setting start from one SFT checkpoint of the embedded arithmetic task (data/arithmetic.py), which is
trained first and kept. A run differs from the others in its script and flags, which RUNS lists, and in its seed, which
decides the order of the prompts and the sampling. Seconds are those of the whole process, start-up and evaluations
included. train_seconds are those of the steps until an evaluation, without evaluations.

Finished runs are skipped, so the same command again goes on where it stopped. Failed ones are tried again, and so are
those whose command has changed. The results cover all runs of RUNS that are found in --work-dir:

    <work-dir>/<setting>/<run>/seed_<n>/     metrics.jsonl, output.log and result.json of a run
    <results>/<setting>.json                 a line a run and seed: command, accuracy at every evaluation, commit, ...
    <results>/<setting>.md                   the table
    <results>/<setting>.png                  the figure: means over the seeds, and bands from the lowest to the highest
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from statistics import mean
from typing import Literal, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.9  # held-out accuracy whose first step the table names
STARTS = 3  # a run whose engine finds that memory is taken or given back by others is started at most this often
BY_OTHERS = ("No available memory for the cache blocks", "Error in memory profiling")  # what vLLM says of that


class Setting(NamedTuple):
    """One task and starting point, common to all runs on it."""

    data: str  # flags of data/arithmetic.py
    sft: str  # flags of sft.py
    sft_steps: int
    train: str  # flags of every training script
    title: str


SFT = "--max-length 128 --lr 4e-3 --beta2 0.98 --lr-warmup-steps 30 --activation-checkpointing none --log-freq 50"
TRAIN = (
    "--max-prompt-length 32 --max-response-length 40 --activation-checkpointing none --test-freq 5 --save-freq 0 "
    "--log-samples-freq 0 --train-batch-size 32 --rollout-n 8 --lr 1e-4 --total-training-steps 60"
)
SETTINGS = {
    "easy": Setting(
        data="--num-sft 57600",
        sft=SFT,
        sft_steps=450,
        train=TRAIN,
        title="easy: a policy that can add has to find out that it pays to show its work and to end as asked",
    ),
    # Three times as many facts (270) and fewer SFT steps: showing its work pays only as far as the sums are right.
    "hard": Setting(
        data="--num-sft 57600 --max-total 19",
        sft=SFT,
        sft_steps=350,
        train=f"{TRAIN} --max-response-length 56",
        title="hard: totals up to 19, and a policy that has to learn to add as well",
    ),
    # In half of the demonstrations the prompt has the solution, so the policy can read a hint.
    "hints": Setting(
        data="--num-sft 57600 --max-total 19 --hinted-share 0.5",
        sft=SFT,
        sft_steps=700,
        train=f"{TRAIN} --max-response-length 56",
        title="hints: totals up to 19, and a policy that also knows how to repeat a solution that it reads",
    ),
}

# Groups (rows of the figure) of runs: script and flags, which come after those of the setting and override them.
# Losses differ only where a step makes several updates, so the runs that compare them make four of 8 prompts.
FOUR_UPDATES = "--ppo-mini-batch-size 8"
PPO = "train_ppo.py --train-batch-size 256 --rollout-n 1 --critic-lr 1e-3"
DAPO = f"train_dapo.py {FOUR_UPDATES} --lr-warmup-steps 0 --weight-decay 0.01"
# TEACHER is the last checkpoint of the run `grpo`.
DISTILL = "train_distill.py --teacher-model TEACHER --distill-top-k 8 --train-batch-size 64 --rollout-n 1"
PRIME = "train_prime.py --prm-lr 1e-4"
# The hint stands right behind the question, as in the demonstrations of the setting `hints`.
SELF_DISTILL = (
    "train_self_distill.py --train-batch-size 64 --rollout-n 1 --hint-template {prompt}{hint} "
    "--max-hinted-prompt-length 72"
)
GROUP = "train_self_distill_variants.py --hint-from group --hint-template {prompt}{hint} --max-hinted-prompt-length 72"
LOSSES = {
    "ppo_clip": f"train_grpo.py {FOUR_UPDATES}",
    "gspo": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode gspo --loss-agg-mode seq-mean-token-mean "
    "--clip-ratio-low 3e-4 --clip-ratio-high 4e-4",
    "cispo": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode cispo --clip-ratio-low 1",
    "sapo": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode sapo --loss-agg-mode seq-mean-token-mean",
    "gmpo": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode gmpo --loss-agg-mode seq-mean-token-mean "
    "--clip-ratio-low 0.4 --clip-ratio-high 0.4",
    "policy_gradient": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode policy_gradient",
    "dppo_tv": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode dppo_tv --clip-ratio-c 20",
    "dppo_kl": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode dppo_kl --clip-ratio-low 0.05 "
    "--clip-ratio-high 0.05 --clip-ratio-c 20",
    "luspo": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode luspo --loss-agg-mode seq-mean-token-sum "
    "--clip-ratio-low 3e-4 --clip-ratio-high 4e-4",
    "vespo": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode vespo",
    "dro": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode dro",
    "clip_cov": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode clip_cov --clip-cov-ratio 0.02 --clip-cov-lb 0.1",
    "kl_cov": f"train_grpo_variants.py {FOUR_UPDATES} --loss-mode kl_cov --kl-cov-ratio 0.02",
}
# Prompts of eight steps are sampled at a time, so that most responses are from one to seven steps old.
STALE = f"{DAPO} --no-filter-groups --gen-batch-size 256 --overlong-buffer-len 0 --clip-ratio-high 0.2"
PARTIAL = {  # also runs of benchmarks/pretrained.py
    f"partial_{f}_{way}": f"train_grpo.py --partial-rollouts {f} --rollout-is {way}"
    for f in ("0.25", "1")
    for way in ("none", "token")
}
RUNS = {
    "advantage estimators, one update per step": {
        "grpo": "train_grpo.py --save-freq -1",  # its last step, the teacher of others
        "dr_grpo": "train_grpo_variants.py --adv-estimator dr_grpo --loss-agg-mode seq-mean-token-sum-norm",
        "rloo": "train_grpo_variants.py --adv-estimator rloo",
        "opo": "train_grpo_variants.py --adv-estimator opo",
        "gpg": "train_grpo_variants.py --adv-estimator gpg --loss-mode policy_gradient",
        "reinforce_plus_plus_baseline": "train_grpo_variants.py --adv-estimator reinforce_plus_plus_baseline",
        "grpo_batch": "train_grpo_variants.py --adv-estimator grpo_batch",
        "grpo_passk": "train_grpo_variants.py --adv-estimator grpo_passk",
        "max_rl": "train_grpo_variants.py --adv-estimator max_rl",
        "gdpo": "train_grpo_variants.py --adv-estimator gdpo --gdpo-reward-keys gsm8k length_penalty "
        "--gdpo-reward-weights 1 0.5 --custom-reward-function rewards/gsm8k.py rewards/length_penalty.py:overlong:0.5",
        "top_entropy": "train_grpo_variants.py --top-entropy-quantile 0.2",
        "unbiased_kl": f"train_grpo_variants.py {FOUR_UPDATES} --use-kl-loss --kl-loss-type unbiased "
        "--kl-loss-coef 0.01",
    },
    "losses, four updates per step": LOSSES,
    "the same with learning rate 3e-5": {f"{name}_3e-5": f"{flags} --lr 3e-5" for name, flags in LOSSES.items()},
    "REINFORCE++ and ReMax, one update per step": {
        "reinforce_plus_plus": "train_reinforce.py",
        "remax": "train_reinforce.py --adv-estimator remax",
        "optimal_token_baseline": "train_reinforce.py --adv-estimator optimal_token_baseline",
        "reinforce_plus_plus_n1": "train_reinforce.py --train-batch-size 256 --rollout-n 1",
        "remax_n1": "train_reinforce.py --train-batch-size 256 --rollout-n 1 --adv-estimator remax",
    },
    "corrections, responses up to seven steps old": {
        "stale": f"{STALE} --rollout-is none",
        "stale_token": f"{STALE} --rollout-is token",
        "stale_token_two_bounds": f"{STALE} --rollout-is token --rollout-is-threshold-lower 0.5",
        "stale_sequence": f"{STALE} --rollout-is sequence",
        "stale_icepop": f"{STALE} --rollout-is token --rollout-mask token",
        "stale_sequence_mask": f"{STALE} --rollout-is none --rollout-mask sequence",
        "stale_geometric_mask": f"{STALE} --rollout-is none --rollout-mask geometric --rollout-mask-threshold 1.05 "
        "--rollout-mask-threshold-lower 0.95",
        "stale_off_policy_mask": f"{STALE} --rollout-is none --off-policy-mask-threshold 0.05",
    },
    "samplers of their own, responses up to S steps old": {
        **{f"async_{s}": f"train_async.py --max-staleness {s}" for s in (0, 1, 4, 8)},
        "async_8_none": "train_async.py --max-staleness 8 --rollout-is none",
        "async_8_loglinear": "train_async.py --max-staleness 8 --proximal-policy loglinear",
        "async_8_sampler": "train_async.py --max-staleness 8 --proximal-policy sampler",
    },
    "partial rollouts, with the prompts of F further steps in flight": PARTIAL,
    "PPO, four updates per step": {
        "ppo": PPO,
    },
    "DAPO, four updates per step": {
        "dapo": DAPO,
        "dapo_no_clip_higher": f"{DAPO} --clip-ratio-high 0.2",
        "dapo_no_token_mean": f"{DAPO} --loss-agg-mode seq-mean-token-mean",
        "dapo_no_dynamic_sampling": f"{DAPO} --no-filter-groups",
        "dapo_no_overlong_punishment": f"{DAPO} --overlong-buffer-len 0",
    },
    "preference losses, one update per step": {
        **{f"dpo_{name}": f"train_dpo.py --loss-type {name}" for name in ("dpo", "hinge", "kto_pair", "sppo")},
        "dpo_ipo": "train_dpo.py --loss-type ipo",
        "dpo_all_pairs": "train_dpo.py --pairs all",
        "spin": "train_dpo.py --pairs solution --rollout-n 1 --ref-update-steps 10",
    },
    "PRIME, one update per step": {
        "prime": PRIME,
        "prime_after": f"{PRIME} --prime-update after",
        "prime_filter": f"{PRIME} --gen-batch-size 64",
    },
    "distillation from a policy that GRPO has trained, one response per prompt": {
        "distill_sampled": f"{DISTILL} --loss-mode sampled",
        "distill_forward_kl": f"{DISTILL} --loss-mode forward_kl",
        "distill_reverse_kl": f"{DISTILL} --loss-mode reverse_kl",
        "distill_jsd": f"{DISTILL} --loss-mode jsd",
        "distill_and_reward": "train_distill.py --teacher-model TEACHER --reward-coef 1 --distillation-loss-coef 0.1",
    },
    "distillation from itself with a hint, one response per prompt (for --setting hints)": {
        "self_distill_reverse_kl": f"{SELF_DISTILL} --loss-mode reverse_kl",
        "self_distill_forward_kl": f"{SELF_DISTILL} --loss-mode forward_kl",
        "self_distill_jsd": f"{SELF_DISTILL} --loss-mode jsd",
    },
    "the same with a right answer of the group as the hint, eight responses per prompt": {
        "self_distill_group": f"{GROUP} --loss-mode jsd",
        "self_distill_group_ema": f"{GROUP} --loss-mode jsd --teacher ema",
    },
    "LoRA at ten times the learning rate, one update per step": {
        f"lora_{rank}": f"train_grpo.py --lora-rank {rank} --lr 1e-3" for rank in (1, 8, 32)
    },
}
NAMES = [name for runs in RUNS.values() for name in runs]


@dataclass(frozen=True)
class Args:
    setting: Literal[*SETTINGS] = "easy"
    """This is the task with its starting point, see SETTINGS."""
    only: tuple[str, ...] = ()
    """The runs of these names are made, see RUNS. By default all are made."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every run is made with each of these seeds."""
    jobs: int = 1
    """This many runs go on at a time, each on one thread."""
    timeout: float = 3600.0
    """A run is ended after this many seconds, and counts as failed."""
    extra: str = ""
    """Every run gets these flags after all others, for example "--total-training-steps 5" for a quick look."""
    work_dir: Path = Path("runs/learning")
    """Data, checkpoints and runs are in this folder."""
    results: Path = Path("runs/learning")
    """Results are written to this folder. Those of the repository are in benchmarks/results/learning."""


class Job(NamedTuple):
    """A run with a seed."""

    name: str
    seed: int
    command: str  # without "python"
    folder: Path
    needs: Path | None = None  # what another job makes first


# --- running


def prepare(folder: Path, setting: Setting) -> str:
    """Write the data of a setting to `folder` and train its SFT checkpoint, unless they exist. Returns the checkpoint's
    folder.

    Raises: RuntimeError if the checkpoint was made by other commands than those of `setting`.
    """
    commands = [
        f"data/arithmetic.py --output-dir {folder}/data {setting.data}",
        f"sft.py --model {folder}/data/model --train-files {folder}/data/sft.parquet --default-local-dir {folder}/sft "
        f"{setting.sft} --total-training-steps {setting.sft_steps}",
    ]
    made = folder / "sft.json"  # written last
    if not made.exists():
        shutil.rmtree(folder / "sft", ignore_errors=True)
        for command in commands:
            print(f"python {command}", flush=True)
            subprocess.run([sys.executable, *shlex.split(command)], check=True)
        made.write_text(json.dumps(commands, indent=2) + "\n")
    elif json.loads(made.read_text()) != commands:
        raise RuntimeError(
            f"{made} names other commands than the setting has now; delete {folder} or change the setting"
        )
    return f"{folder}/sft/global_step_{setting.sft_steps}/huggingface"


def make_jobs(
    runs: dict[str, dict[str, str]], folder: Path, flags: str, names: Sequence[str], seeds: Sequence[int], extra: str
) -> list[Job]:
    """One job a run and seed, seed by seed, so that all runs have their first seed early.

    runs: script and flags of every run, by group and name. flags and extra: those of all runs, before and after them.
    A run with the word TEACHER learns from the last checkpoint of `grpo`, seed 0, which is then made too.
    """
    commands = {name: command for group in runs.values() for name, command in group.items()}
    last = f"{flags} {extra}".split("--total-training-steps ")[-1].split()[0]
    teacher = folder / "grpo" / "seed_0" / f"global_step_{last}" / "huggingface"
    wanted = [(name, seed) for seed in seeds for name in names]
    if any("TEACHER" in commands[name] for name in names) and ("grpo", 0) not in wanted:
        wanted.insert(0, ("grpo", 0))
    jobs = []
    for name, seed in wanted:
        script, *own = commands[name].replace("TEACHER", str(teacher)).split()
        run_dir = folder / name / f"seed_{seed}"
        words = [script, flags, *own, extra, f"--seed {seed}", f"--default-local-dir {run_dir}"]
        needs = teacher if "TEACHER" in commands[name] else None
        jobs.append(Job(name, seed, " ".join(word for word in words if word), run_dir, needs))
    return jobs


def jobs_of(args: Args, model: str, names: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """The jobs of a setting, which start from `model`."""
    folder = args.work_dir / args.setting
    files = f"--model {model} --train-files {folder}/data/train.parquet --val-files {folder}/data/test.parquet"
    return make_jobs(RUNS, folder, f"{files} {SETTINGS[args.setting].train}", names, seeds, args.extra)


def result(job: Job) -> dict | None:
    """The result of a job that was made by the same command, or None."""
    file = job.folder / "result.json"
    found = json.loads(file.read_text()) if file.exists() else None
    return found if found is not None and found["command"] == job.command else None


def commit() -> str:
    """Commit of the checkout, with "+changes" if what trains differs from it. A copy without .git has none."""
    if not (ROOT / ".git").exists():
        return "unknown"

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()

    changed = git("diff", "HEAD", "--name-only", "--", ".", ":!benchmarks", ":!docs", ":!tests")
    return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")


def responses_by_step(metrics: list[dict], config: dict) -> dict[int, int]:
    """Number of responses sampled for training until the end of each step, from the lines of metrics.jsonl.

    DAPO reports its own number, since it samples until its batch is full. Elsewhere every step samples the same number.
    With ReMax that includes a greedy response to each prompt, and with PRIME's --gen-batch-size there are more prompts
    than are learned from.
    """
    steps = [line for line in metrics if "critic/score/mean" in line]
    prompts = config.get("gen_batch_size") or config["train_batch_size"]
    batch = prompts * (config["rollout_n"] + (config.get("adv_estimator") == "remax"))
    counts = [int(line.get("train/num_sampled_responses", batch)) for line in steps]
    return {0: 0} | dict(zip([line["step"] for line in steps], accumulate(counts), strict=True))


def lines_of(file: Path, last: int = 0) -> list[dict]:
    """The lines of a .jsonl file, or the last ones. It may not be there yet. A last line without its end is being
    written just now, and is left out.
    """
    return [json.loads(line) for line in file.read_text().split("\n")[:-1][-last:]] if file.exists() else []


def metrics_of(job: Job) -> list[dict]:
    """The lines of a run's metrics.jsonl so far."""
    return lines_of(job.folder / "metrics.jsonl")


def training_seconds(line: dict) -> float:
    """Seconds of a step without its evaluation, from the step's line of metrics.jsonl."""
    return line["timing_s/step"] - line.get("timing_s/testing", 0.0)


def summarize(job: Job, seconds: float, error: str | None) -> dict:
    """What a run left behind. `error`: why it failed, or None."""
    metrics = metrics_of(job)
    config = json.loads((job.folder / "config.json").read_text()) if metrics else {}
    evaluations = [line for line in metrics if "val/accuracy" in line]
    responses = responses_by_step(metrics, config) if metrics else {}
    training = [training_seconds(x) for x in metrics if "timing_s/step" in x]
    seconds_by_step = [0.0, *accumulate(training)]
    return {
        "name": job.name,
        "seed": job.seed,
        "error": error,
        "final_accuracy": evaluations[-1]["val/accuracy"] if evaluations and error is None else None,
        "steps": [line["step"] for line in evaluations],
        "responses": [responses[line["step"]] for line in evaluations],
        "accuracy": [round(line["val/accuracy"], 4) for line in evaluations],
        "train_seconds": [round(seconds_by_step[line["step"]], 2) for line in evaluations],
        "seconds": round(seconds, 1),
        "commit": commit(),
        "command": job.command,
    }


def last_error(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line or "error: " in line]
    return (lines or ["no error message"])[-1].strip()[:200]


def end_on_sigterm() -> None:
    """Make SIGTERM an exception, so that `prepare` and `run_all` end what they have started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def run_all(
    jobs: list[Job],
    at_a_time: int,
    timeout: float,
    *,
    gpus: tuple[int, ...] = (),
    stagger: float = 0.0,
    has_ended: Callable[[Job], bool] = lambda job: False,
) -> None:
    """Run jobs, `at_a_time` of them, and write a result.json for each. What still runs when this ends is killed. So is
    a job of which `has_ended` says that nothing more is to be learned from it, which is no error.

    A job sees one of `gpus`, that with the fewest jobs. The word GPU in its command becomes the number of that one. Two
    starts are at least `stagger` seconds apart. A job that needs what is not there yet waits. It is a RuntimeError if
    nobody makes it.

    If jobs may share a GPU, one whose engine fails at its start because of what others do with its memory starts again,
    STARTS times in all. The timeout is for each start.
    """
    waiting, running, last_start = list(jobs), {}, -stagger
    starts: Counter[Path] = Counter()
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time and time.perf_counter() >= last_start + stagger:
                job = next((x for x in waiting if x.needs is None or x.needs.exists()), None)
                if job is None and not running:
                    raise RuntimeError(f"{waiting[0].name} needs {waiting[0].needs}, which no run has made")
                if job is None:
                    break
                waiting.remove(job)
                starts[job.folder] += 1
                last_start = time.perf_counter()
                used = [gpu for _, _, gpu in running.values()]
                gpu = min(gpus, key=used.count, default=None)
                environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)})
                shutil.rmtree(job.folder, ignore_errors=True)
                job.folder.mkdir(parents=True)
                with open(job.folder / "output.log", "w") as log:
                    words = shlex.split(job.command)
                    command = [sys.executable, *(str(gpu) if word == "GPU" else word for word in words)]
                    process = subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                running[process] = job, last_start, gpu
            time.sleep(0.2)
            for process, (job, start, _) in list(running.items()):
                status, seconds = process.poll(), time.perf_counter() - start
                ended = status is None and has_ended(job)
                if status is None and seconds < timeout and not ended:
                    continue
                error = None
                if status is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    if not ended:
                        error = f"took longer than --timeout {timeout:g} s"
                elif status != 0:
                    error = f"exit {status}: {last_error(job.folder / 'output.log')}"
                del running[process]
                is_by_others = at_a_time > len(gpus) > 0 and any(x in (error or "") for x in BY_OTHERS)
                if is_by_others and starts[job.folder] < STARTS and not metrics_of(job):
                    print(f"{job.name}, seed {job.seed}: starts again after {error}", flush=True)
                    with suppress(ProcessLookupError):  # what it has started may still hold memory
                        os.killpg(process.pid, signal.SIGKILL)
                    waiting.append(job)
                    continue
                x = summarize(job, seconds, error)
                (job.folder / "result.json").write_text(json.dumps(x) + "\n")
                curve_ends = f"{x['accuracy'][0]:.3f} -> {x['accuracy'][-1]:.3f}" if x["accuracy"] else "no evaluation"
                outcome = error or curve_ends
                print(f"{job.name}, seed {job.seed}: {outcome} ({seconds:.0f} s)", flush=True)
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# --- results


def first_step(x: dict) -> int | None:
    """First evaluated step of a run with held-out accuracy of at least GOAL, or None."""
    return next((step for step, y in zip(x["steps"], x["accuracy"], strict=True) if y >= GOAL), None)


def table(results: list[dict]) -> str:
    """A markdown row a run: final accuracy over the seeds that did not fail, the first evaluated step at GOAL of each
    seed, the responses sampled until the end (mean), and failures.
    """
    lines = [
        f"| run | final accuracy: mean | min | max | first step at {GOAL:.2f}, by seed | responses | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(x["name"] for x in results):
        runs = [x for x in results if x["name"] == name]
        done = [x for x in runs if x["error"] is None]
        cells = ["-"] * 5
        if done:
            finals = [x["final_accuracy"] for x in done]
            cells = [f"{x:.3f}" for x in (sum(finals) / len(finals), min(finals), max(finals))]
            cells += [", ".join("never" if first_step(x) is None else str(first_step(x)) for x in done)]
            cells += [f"{sum(x['responses'][-1] for x in done) / len(done):,.0f}"]
        failed = [f"seed {x['seed']} after step {max(x['steps'], default=0)}: {x['error']}" for x in runs if x["error"]]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {'; '.join(failed).replace('|', '/')} |")
    return "\n".join(lines)


def plot(results: list[dict], title: str, path: Path) -> None:
    """A row per group of RUNS. Left: accuracy against steps, right: against sampled responses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = {x["name"] for x in results if x["error"] is None}
    groups = groups_found(RUNS, found)
    figure, axes = plt.subplots(
        len(groups), 2, figsize=(11, 3.3 * len(groups)), squeeze=False, sharex="col", sharey=True, layout="constrained"
    )
    for (left, right), (group, names) in zip(axes, groups.items(), strict=True):
        for i, name in enumerate(names):
            runs = [x for x in results if x["name"] == name and x["error"] is None]
            curve(left, runs, "steps", f"{name} ({len(runs)})", f"C{i}")
            curve(right, runs, "responses", f"{name} ({len(runs)})", f"C{i}")
        left.set(title=group, ylabel="held-out accuracy, greedy", xlabel="steps")
        right.set(xlabel="sampled responses")
        right.legend(loc="lower right", fontsize="small", title="run (seeds)")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def groups_found(runs: dict[str, dict[str, str]], found: set[str]) -> dict[str, list[str]]:
    """The names of each group of runs that are among `found`, of groups that have any."""
    groups = {group: [name for name in names if name in found] for group, names in runs.items()}
    return {group: names for group, names in groups.items() if names}


def curve(
    axis, runs: list[dict], x_name: str, label: str, color: str, error: Callable[[float], float] = lambda accuracy: 0.0
) -> None:
    """Mean line and band from the lowest to the highest over the seeds. x is the mean over the seeds too.

    Where some of the runs have ended, the line goes on dotted, over those that are left.
    `error`: how far the band goes beyond an accuracy.
    """

    def columns(name: str) -> list[list[float]]:
        return [[x for x in column if x is not None] for column in zip_longest(*(run[name] for run in runs))]

    accuracies, n = columns("accuracy"), min(len(run["accuracy"]) for run in runs)
    x, y = [mean(c) for c in columns(x_name)], [mean(c) for c in accuracies]
    axis.plot(x[:n], y[:n], color=color, label=label, linewidth=1.3)
    axis.plot(x[n - 1 :], y[n - 1 :], color=color, linewidth=1.3, linestyle="dotted")
    low, high = [min(a - error(a) for a in c) for c in accuracies], [max(a + error(a) for a in c) for c in accuracies]
    axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def write_results(args: Args, results: list[dict]) -> None:
    """Write json, table and figure of the setting."""
    args.results.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(x) for x in results)
    commands = json.dumps(json.loads((args.work_dir / args.setting / "sft.json").read_text()))
    path = args.results / f"{args.setting}.json"
    path.write_text(f'{{"prepared_by": {commands},\n"runs": [\n{lines}\n]}}\n')
    path.with_suffix(".md").write_text(table(results) + "\n")
    plot(results, SETTINGS[args.setting].title, path.with_suffix(".png"))
    print(f"\n{table(results)}\n\n{path}, and .md and .png", flush=True)


def main(args: Args) -> list[dict]:
    """Make the runs that are missing and write the results of all that are found. Returns these."""
    os.chdir(ROOT)
    if unknown := sorted(set(args.only) - set(NAMES)):
        raise ValueError(f"--only {' '.join(unknown)}: unknown; choose from {', '.join(NAMES)}")
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs} must be at least 1")
    # One thread: on a model this small two are hardly faster, and far slower when anything else runs on the machine.
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    end_on_sigterm()
    model = prepare(args.work_dir / args.setting, SETTINGS[args.setting])
    jobs = jobs_of(args, model, [name for name in NAMES if not args.only or name in args.only], args.seeds)
    done = [job for job in jobs if (x := result(job)) and x["error"] is None]
    print(f"{len(jobs)} runs, {len(done)} of them finished", flush=True)
    run_all([job for job in jobs if job not in done], args.jobs, args.timeout)
    seeds = sorted({int(path.name.removeprefix("seed_")) for path in args.work_dir.glob(f"{args.setting}/*/seed_*")})
    found = [x for job in jobs_of(args, model, NAMES, seeds) if (x := result(job))]
    results = sorted(found, key=lambda x: (NAMES.index(x["name"]), x["seed"]))
    if results:
        write_results(args, results)
    return results


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
