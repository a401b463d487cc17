"""Tokens per second of train_async.py with some trainers and samplers, and of train_grpo.py on as many GPUs.

    python benchmarks/pools.py --shape 1.5B --tokenizer T --trainers 1 --samplers 1 --staleness 1
    python benchmarks/pools.py --shape 1.5B --tokenizer T --one-gpu          # both pools on one GPU, as under MPS
    python benchmarks/pools.py --shape tiny --max-length 32 --mean-length 10 -- --engine hf --train-batch-size 4

Random weights, prompts of digits, responses of geometric lengths. Tokens a second are those of the steps after the
warm-up, prompts included, over the seconds between their lines in metrics.jsonl. Flags after -- go to both scripts.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import step_time  # noqa: E402


@dataclass(frozen=True)
class Args:
    shape: str = "1.5B"
    """benchmarks/make_model.py makes a Qwen2.5 of this shape. tiny is for the CPU."""
    tokenizer: str | None = None
    """This is the folder or Hugging Face id of a Qwen2 tokenizer. tiny brings its own."""
    cache: Path = Path("runs/benchmark_models")
    """Models are kept in this folder for the next time."""
    trainers: int = 1
    """train_async.py has this many ranks."""
    samplers: int = 1
    """train_async.py has this many samplers."""
    staleness: tuple[int, ...] = (1,)
    """There is a run for each of these values of --max-staleness."""
    one_gpu: bool = False
    """Run one trainer and one sampler on the first GPU, beside train_grpo.py on it."""
    max_length: int = 2048
    """A response has at most this many tokens."""
    mean_length: float = 512.0
    """The geometric lengths have this mean before that cut."""
    steps: int = 8
    """train_async.py runs this many steps, warm-up included."""
    warmup: int = 3
    """This many first steps are left out, until as many prompts are in flight as --max-staleness allows."""
    sync_steps: int = 4
    """train_grpo.py runs this many steps, of which the first is its warm-up."""
    out: Path = Path("runs/pools")
    """Results are written to this folder."""


def measure(folder: Path, warmup: int) -> dict[str, float]:
    """What a run did after its warm-up: tokens and seconds per step, and means of other metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, kept = lines[warmup - 1], lines[warmup:]
    tokens = sum(line["perf/total_num_tokens"] for line in kept)
    seconds = kept[-1]["time"] - before["time"]
    found = {"tokens_per_s": tokens / seconds, "s_per_step": seconds / len(kept), "tokens_per_step": tokens / len(kept)}
    names = [name for name in kept[-1] if name.startswith(("timing_s/", "trainer/", "rollouter/", "rollout/"))]
    return found | {name: sum(line.get(name, 0.0) for line in kept) / len(kept) for name in names}


def run(script: str, ranks: int, words: list[str], folder: Path, env: dict[str, str]) -> None:
    """Run a script under torchrun, with its output in a file beside its folder."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [str(ROOT / script), *words, "--default-local-dir", str(folder)]
    with open(f"{folder}.log", "w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | env)


def main(args: Args, flags: list[str]) -> dict[str, dict[str, float]]:
    """Run both scripts. Returns what `measure` finds by name."""
    args.out.mkdir(parents=True, exist_ok=True)
    args.cache.mkdir(parents=True, exist_ok=True)
    model = step_time.model_folder(args.shape, args.tokenizer, args.cache, "geometric", args.mean_length)
    prompts = args.out / "prompts.jsonl"
    step_time.write_prompts(prompts, 512, 128, str(model))
    words = f"--max-prompt-length 128 --max-response-length {args.max_length}"
    words += " --train-batch-size 64 --rollout-n 8 --no-val-before-train --test-freq -1 --save-freq 0"
    words += f" --log-samples-freq 0 --model {model} --train-files {prompts} --custom-reward-function "
    common = [*(words + str(ROOT / "benchmarks" / "noise_reward.py")).split(), *flags]
    ranks = 1 if args.one_gpu else args.trainers + args.samplers
    env = {"CUDA_VISIBLE_DEVICES": "0"} if args.one_gpu else {}
    jobs: list[tuple[str, str, int, list[str]]] = []
    for staleness in args.staleness:
        own = f"--samplers {args.samplers} --max-staleness {staleness}".split()
        own += "--sampler-devices 0 --gpu-memory-utilization 0.35".split() if args.one_gpu else []
        own += ["--total-training-steps", str(args.steps)]
        jobs.append((f"async_{staleness}", "train_async.py", args.trainers, [*common, *own]))
    jobs.append(("sync", "train_grpo.py", ranks, [*common, "--total-training-steps", str(args.sync_steps)]))
    report: dict[str, Any] = {"args": {name: str(x) for name, x in vars(args).items()}, "flags": flags}
    for name, script, size, own in jobs:
        folder = (args.out / name).resolve()
        run(script, size, own, folder, env)
        try:
            report[name] = measure(folder, 1 if name == "sync" else args.warmup)
        except (FileNotFoundError, IndexError):
            report[name] = {"failed": Path(f"{folder}.log").read_text()[-3000:]}
        print(name, json.dumps(report[name], indent=1), flush=True)
        (args.out / "report.json").write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:at]), sys.argv[at + 1 :])
