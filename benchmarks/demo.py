"""The whole path in a few minutes on two CPU cores: data -> SFT -> evaluation -> GRPO -> evaluation.

    make demo        (or: python benchmarks/demo.py)

A 0.2M-parameter Qwen2 learns chains of four additions and subtractions ("4+3-5+2+1=?"). SFT shows it demonstrations of
mixed quality: many are bare guesses, many end in a form that cannot be graded. GRPO then has to find out what the
reward wants. Leaves runs/demo/summary.json and runs/demo/curve.png.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Args:
    run_dir: Path = Path("runs/demo")
    """Data, checkpoints, summary.json and curve.png are written to this folder."""
    sft_steps: int = 450
    """SFT makes this many steps of 128 demonstrations."""
    grpo_steps: int = 60
    """GRPO makes this many steps of 32 prompts x 8 responses."""
    held_out: int = 512
    """Each evaluation answers this many prompts that nothing is trained on."""
    seed: int = 0
    """The seed decides the data, the weights and both runs."""


def run(command: str) -> float:
    """Run a script of this repository with the current Python. Returns seconds. A failure ends the demo."""
    print(f"\n$ python {command}", flush=True)
    # One thread: on a model this small two are hardly faster, and far slower when anything else runs on the machine.
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    start = time.perf_counter()
    subprocess.run([sys.executable, *shlex.split(command)], check=True, env=env)
    return time.perf_counter() - start


def read_metrics(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def plot(lines: list[dict], path: Path) -> None:
    """Reward of the sampled responses and greedy accuracy on held-out prompts against GRPO steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train = [(m["step"], m["critic/score/mean"], m["response_length/mean"]) for m in lines if "critic/score/mean" in m]
    val = [(m["step"], m["val/accuracy"]) for m in lines if "val/accuracy" in m]
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot([t[0] for t in train], [t[1] for t in train], label="training reward, sampled at temperature 1")
    axis.plot([v[0] for v in val], [v[1] for v in val], "o-", label="held-out accuracy, greedy")
    axis.set(xlabel="GRPO step", ylabel="share right", ylim=(0, 1.02), title="Four-step arithmetic, 0.2M parameters")
    lengths = axis.twinx()
    lengths.plot([t[0] for t in train], [t[2] for t in train], color="gray", linewidth=0.8, label="response length")
    lengths.set(ylabel="tokens", ylim=(0, 40))
    handles = [*axis.get_legend_handles_labels()[0], *lengths.get_legend_handles_labels()[0]]
    axis.legend(handles, [h.get_label() for h in handles], loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(args: Args) -> dict[str, float]:
    """Run the five commands and write the summary. Returns it."""
    os.chdir(ROOT)
    folder, data = args.run_dir, args.run_dir / "data"
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    limits = "--max-prompt-length 32 --max-response-length 40"
    sizes = f"--num-sft {args.sft_steps * 128} --num-test {args.held_out}"
    run(f"data/arithmetic.py --output-dir {data} {sizes} --seed {args.seed}")
    seconds_sft = run(
        f"sft.py --model {data}/model --train-files {data}/sft.parquet --max-length 128 "
        f"--default-local-dir {folder}/sft --lr 4e-3 --beta2 0.98 --lr-warmup-steps 30 "
        f"--total-training-steps {args.sft_steps} --activation-checkpointing none --log-freq 50 --seed {args.seed}"
    )
    sft_model = f"{folder}/sft/global_step_{args.sft_steps}/huggingface"
    run(f"eval.py --model {sft_model} --val-files {data}/test.parquet {limits} --output {folder}/before.jsonl")
    seconds_grpo = run(
        f"train_grpo.py --model {sft_model} --train-files {data}/train.parquet --val-files {data}/test.parquet "
        f"{limits} --train-batch-size 32 --rollout-n 8 --lr 1e-4 --total-training-steps {args.grpo_steps} "
        f"--activation-checkpointing none --log-samples-freq 20 --seed {args.seed} --default-local-dir {folder}/grpo"
    )
    grpo_model = f"{folder}/grpo/global_step_{args.grpo_steps}/huggingface"
    run(f"eval.py --model {grpo_model} --val-files {data}/test.parquet {limits} --output {folder}/after.jsonl")

    def accuracy(name: str) -> float:
        scores = [json.loads(line)["score"] for line in (folder / name).read_text().splitlines()]
        return sum(score or 0.0 for score in scores) / len(scores)

    lines = read_metrics(folder / "grpo")
    steps = [m for m in lines if "critic/score/mean" in m]
    summary = {
        "accuracy_before": accuracy("before.jsonl"),
        "accuracy_after": accuracy("after.jsonl"),
        "reward_first_step": steps[0]["critic/score/mean"],
        "reward_last_step": steps[-1]["critic/score/mean"],
        "seconds_sft": round(seconds_sft, 1),
        "seconds_grpo": round(seconds_grpo, 1),
        "seconds_total": round(time.perf_counter() - start, 1),
        "logprob_gap_max": max(m["rollout/logprob_gap_max"] for m in steps),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(lines, folder / "curve.png")
    print(f"\n{'':34}{'after SFT':>10}{'after GRPO':>12}")
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    print(f"{f'held-out accuracy, greedy ({args.held_out})':34}{before:>10.3f}{after:>12.3f}")
    first, last = summary["reward_first_step"], summary["reward_last_step"]
    print(f"{'training reward, first/last step':34}{first:>10.3f}{last:>12.3f}")
    print(f"{'seconds, start-up included':34}{summary['seconds_sft']:>10.0f}{summary['seconds_grpo']:>12.0f}")
    print(f"total {summary['seconds_total']:.0f} s; {args.run_dir}/summary.json, {args.run_dir}/curve.png")
    return summary


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
