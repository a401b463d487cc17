"""TRL's GRPOTrainer against train_grpo.py: same SFT checkpoint, prompts in the same order, reward, and settings.

    pip install trl==1.16.0 datasets
    python benchmarks/learning.py --setting easy --only grpo        # makes the checkpoint and our side
    python benchmarks/learning_trl.py

TRL samples with transformers, on the CPU. It shares these settings with the run `grpo` of learning.py: 32 prompts x 8
responses and one update per step, temperature 1, AdamW at a constant 1e-4, token-mean loss (TRL's "dapo"), and no KL
term. Both compute in fp32, and measure greedy accuracy on the same 512 held-out prompts. Two things cannot be set
alike, and are too small to matter. TRL adds 1e-4 to a group's standard deviation, and train_grpo.py adds 1e-6. TRL's
weight decay (0.01 in both) spares biases and norms.

The other variants show how a setting that one might leave as it is changes TRL's curve. Finished runs are skipped. This
leaves trl.json, trl.md and trl.png in --results, and reads easy.json there.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import for_trl, learning  # noqa: E402
from rl.data.rows import read_rows  # noqa: E402

PROMPTS, GROUP, MAX_TOKENS = 32, 8, 40
# Arguments of GRPOConfig that differ from `settings`. Runs are found by name: rename a variant when it changes.
VARIANTS = {
    "trl": {},
    "trl_linear_decay": {"lr_scheduler_type": "linear"},  # TRL's default: to 0 at the last step
    # The first update is made with a learning rate of 0. Plain "constant" ignores warmup_steps.
    "trl_warmup_10": {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10},
    "trl_bf16": {"bf16": True},  # TRL's default: matrix products of the loss in bf16
}


@dataclass(frozen=True)
class Args:
    only: tuple[Literal["trl", "trl_linear_decay", "trl_warmup_10", "trl_bf16"], ...] = tuple(VARIANTS)
    """These variants are run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Every variant runs with each of these seeds."""
    steps: int = 60
    """Every run has this many steps."""
    test_freq: int = 5
    """Evaluate at this interval, in steps."""
    jobs: int = 1
    """This many runs go on at a time, each on one thread."""
    timeout: float = 3600.0
    """A run is ended after this many seconds, and counts as failed."""
    work_dir: Path = Path("runs/learning")
    """This is the folder of learning.py, with the checkpoint and the data."""
    results: Path = Path("runs/learning")
    """Results are written to this folder. Those of the repository are in benchmarks/results/learning."""
    run: str | None = None
    """Run this variant with the first seed in this process, write to --default-local-dir, and do nothing else."""
    default_local_dir: Path | None = None
    """This is the folder of that run."""


def settings(args: Args, variant: str, seed: int, folder: Path) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig."""
    common = for_trl.SETTINGS | dict(
        output_dir=str(folder),
        max_steps=args.steps,
        per_device_train_batch_size=PROMPTS * GROUP,  # one micro-batch, one update
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        top_k=0,
        learning_rate=1e-4,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        bf16=False,
        use_vllm=False,
        use_cpu=True,
        seed=seed,
        logging_steps=1,
        model_init_kwargs=dict(dtype="float32"),
    )
    return common | VARIANTS[variant]


def train(args: Args, variant: str, seed: int, folder: Path) -> None:
    """Train with TRL in this process. Leaves config.json and metrics.jsonl as train_grpo.py does."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    task = args.work_dir / "easy"
    model = learning.prepare(args.work_dir / "easy", learning.SETTINGS["easy"])
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    train_rows, val_rows = (read_rows(task / "data" / f"{name}.parquet") for name in ("train", "test"))
    dataset = for_trl.prompts_in_order(train_rows, args.steps, PROMPTS, seed)

    def write(**line: Any) -> None:
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    class Evaluation(TrainerCallback):
        """Held-out greedy accuracy before the first step, every --test-freq steps and at the end."""

        def on_train_begin(self, config, state, control, model, **others):
            self.evaluate(model, 0)

        def on_step_end(self, config, state, control, model, **others):
            if state.global_step % args.test_freq == 0 or state.global_step == args.steps:
                self.evaluate(model, state.global_step)

        def on_log(self, config, state, control, logs, **others):
            if "reward" in logs:
                write(
                    step=state.global_step, **{"critic/score/mean": logs["reward"], "actor/lr": logs["learning_rate"]}
                )

        def evaluate(self, model, step):
            texts = [
                tokenizer.apply_chat_template(x["prompt"], tokenize=False, add_generation_prompt=True) for x in val_rows
            ]
            inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            model.eval()
            output = model.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
            model.train()
            responses = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            write(step=step, **{"val/accuracy": for_trl.accuracy(val_rows, responses)})

    torch.set_num_threads(1)
    (folder / "config.json").write_text(json.dumps({"train_batch_size": PROMPTS, "rollout_n": GROUP}))
    GRPOTrainer(
        model=model,
        reward_funcs=for_trl.score,
        args=GRPOConfig(**settings(args, variant, seed, folder)),
        train_dataset=Dataset.from_list(dataset),
        processing_class=tokenizer,
        callbacks=[Evaluation()],
    ).train()


def make_jobs(args: Args) -> list[learning.Job]:
    """One job a variant and seed."""
    jobs = []
    for seed in args.seeds:
        for variant in args.only:
            folder = args.work_dir / "trl" / variant / f"seed_{seed}"
            command = f"benchmarks/learning_trl.py --run {variant} --seeds {seed} --default-local-dir {folder} "
            command += f"--steps {args.steps} --test-freq {args.test_freq} --work-dir {args.work_dir}"
            jobs.append(learning.Job(variant, seed, command, folder))
    return jobs


def table(results: list[dict], steps: tuple[int, ...]) -> str:
    """A markdown row a run: mean accuracy, and the lowest and the highest of the seeds, at some steps."""
    lines = ["| run | seeds | " + " | ".join(f"step {step}" for step in steps) + " |"]
    lines.append("|" + "---|" * (len(steps) + 2))
    for name in dict.fromkeys(x["name"] for x in results):
        runs = [
            dict(zip(x["steps"], x["accuracy"], strict=True)) for x in results if x["name"] == name and not x["error"]
        ]
        cells = []
        for step in steps:
            values = [run[step] for run in runs if step in run]
            cells.append(f"{sum(values) / len(values):.3f} ({min(values):.3f}-{max(values):.3f})" if values else "-")
        lines.append(f"| `{name}` | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(ours: list[dict], theirs: list[dict], path: Path) -> None:
    """Left: both trainers with equal settings. Right: TRL's variants."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    names = list(dict.fromkeys(x["name"] for x in theirs))
    pairs = [(left, ours, "train_grpo.py", "C0")]
    pairs += [(left, [x for x in theirs if x["name"] == "trl"], "TRL GRPOTrainer, equal settings", "C1")]
    pairs += [(right, [x for x in theirs if x["name"] == name], name, f"C{i + 1}") for i, name in enumerate(names)]
    for axis, runs, label, color in pairs:
        if runs := [x for x in runs if x["error"] is None]:
            learning.curve(axis, runs, "steps", f"{label} ({len(runs)})", color)
    left.set(title="equal settings", ylabel="held-out accuracy, greedy", xlabel="steps")
    right.set(title="TRL with one setting changed", xlabel="steps")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize="small", title="run (seeds)")
    figure.savefig(path, dpi=110)


def main(args: Args) -> list[dict]:
    """Make the runs that are missing, write the results of all that are found, ours included. Returns TRL's."""
    os.chdir(ROOT)
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise ModuleNotFoundError("TRL is not installed; pip install trl==1.16.0 datasets")
    if args.run is not None:
        train(args, args.run, args.seeds[0], args.default_local_dir)
        return []
    easy = args.results / "easy.json"
    if not easy.exists():
        raise FileNotFoundError(f"{easy}: no such file; make it with benchmarks/learning.py --only grpo")
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    learning.end_on_sigterm()
    learning.prepare(args.work_dir / "easy", learning.SETTINGS["easy"])
    jobs = make_jobs(args)
    learning.run_all([j for j in jobs if not (x := learning.result(j)) or x["error"]], args.jobs, args.timeout)
    everything = make_jobs(dataclasses.replace(args, only=tuple(VARIANTS)))
    theirs = [x for job in everything if (x := learning.result(job))]
    theirs.sort(key=lambda x: (list(VARIANTS).index(x["name"]), x["seed"]))
    ours = [x for x in json.loads(easy.read_text())["runs"] if x["name"] == "grpo"]
    text = table(ours + theirs, (0, 5, 10, 15, 20, 40, 60))
    lines = ",\n".join(json.dumps(x) for x in theirs)
    (args.results / "trl.json").write_text(f'{{"runs": [\n{lines}\n]}}\n')
    (args.results / "trl.md").write_text(text + "\n")
    plot(ours, theirs, args.results / "trl.png")
    print(text, flush=True)
    return theirs


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
