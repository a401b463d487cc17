"""Seconds of a GRPO step with --partial-rollouts F against none, one engine and one policy for all of them.

    python benchmarks/partial_rollouts.py --shape 1.5B --tokenizer T --shares 0 1 0.25 2 --steps 1 3 2 2
    python benchmarks/partial_rollouts.py --shape 7B --tokenizer T --shares 0 1 --steps 1 2 -- --lora-rank 32
    python benchmarks/partial_rollouts.py --shape 1.5B --tokenizer T --prompts 64 --max-length 1024 --mean-length 250
    python benchmarks/partial_rollouts.py --shape tiny --prompts 4 --max-length 60 --mean-length 20 -- --engine hf

Random weights, prompts of digits, responses of geometric lengths, as benchmarks/step_time.py makes them. A run begins
in the steady state: responses in flight get random tokens, as many as extras/plan/simulation.py says, instead of the
minutes of sampling after which they would have them. Behind -- stand flags of train_grpo.py. report.json in --out is
written after every run. extras.plan.simulation --report compares it with the model.
"""

import gc
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import rl.run.run  # noqa: E402
import rl.run.task  # noqa: E402
import train_grpo  # noqa: E402
from benchmarks import step_time  # noqa: E402
from extras.partial import in_flight  # noqa: E402
from extras.partial.in_flight import InFlight  # noqa: E402
from extras.partial.saved import groups_in_flight, saved_group  # noqa: E402
from extras.plan import simulation  # noqa: E402
from rl.data.rows import Row  # noqa: E402
from rl.data.types import Sampling  # noqa: E402
from rl.ranks import shutdown_ranks  # noqa: E402
from rl.sampling.loop import Loop  # noqa: E402


@dataclass(frozen=True)
class Args:
    shape: str = "1.5B"
    """benchmarks/make_model.py makes a Qwen2.5 of this shape. tiny is for the CPU."""
    tokenizer: str | None = None
    """This is the folder or Hugging Face id of a Qwen2 tokenizer. tiny brings its own."""
    cache: Path = Path("runs/benchmark_models")
    """Models are kept in this folder for the next time."""
    shares: tuple[float, ...] = (0.0, 1.0, 0.25, 2.0)
    """The runs have these values of --partial-rollouts, in this order."""
    steps: tuple[int, ...] = (1, 3, 2, 2)
    """Each run has this many measured steps."""
    prompts: int = 16
    """A step trains on this many groups."""
    rollout_n: int = 8
    """Each prompt gets this many responses."""
    prompt_length: int = 128
    """Every prompt has this many tokens."""
    max_length: int = 8192
    """A response has at most this many tokens."""
    mean_length: float = 2000.0
    """The geometric lengths have this mean before that cut."""
    out: Path = Path("runs/partial_rollouts")
    """Results are written to this folder."""


def kept(make: Callable, **always: Any) -> Callable:
    """`make`, which makes its object once, for the longest sequences, and then gives the same one."""
    found: list[Any] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(make(*args, **kwargs | always))
        return found[0]

    return once


def steady_state(args: Args, share: float, rows: list[Row], sampling: Sampling, vocabulary: int) -> list[dict]:
    """The groups that are in flight between two steps, as a checkpoint of `InFlight` has them."""
    settings = {name: getattr(args, name) for name in ("prompts", "rollout_n", "max_length", "mean_length")}
    _, lengths, tokens = simulation.simulate(simulation.Args(**settings), share, steps=20)
    random, loop = np.random.default_rng(1), Loop(None)
    ends, whole = list(sampling.stop_token_ids), {}
    for name, (row, of_group, most) in enumerate(zip(rows, lengths, tokens, strict=True)):
        loop.start(name, row, sampling)
        for j, length in enumerate(of_group):
            x, n = loop.trajectories[name, j], int(min(length, most))
            ids = random.integers(0, vocabulary, n)
            x.ids = np.where(np.isin(ids, ends), 15, ids).tolist()  # 15: a digit, which ends nothing
            x.mask, x.logprobs = [1] * n, [-float(np.log(vocabulary))] * n
            of_prompt = [np.iinfo(np.int32).max] * len(row["prompt_ids"])  # not sampled
            x.columns = {"versions": np.array(of_prompt + [0] * n, np.int32)}
            if n == length:
                x.finish_reason = "length" if n == args.max_length else "stop"
                for _, samples in loop._finish(x):  # complete: it waits for the next step
                    whole[name] = saved_group(row, dict(enumerate(samples)))
    groups = groups_in_flight(loop) | whole
    return [groups[name] for name in sorted(groups)]


def seeded_stream(args: Args, share: float, vocabulary: int) -> type[InFlight]:
    """InFlight that begins with a steady state, and not with more new prompts than a step has."""

    class Stream(InFlight):
        def sample(self, engine: Any, rows: list[Row], sampling: Sampling, *others: Any, step: int) -> Any:
            if step == 0 and self.ahead:
                own = rows[self.batch_size :]
                self.saved = steady_state(args, share, own, sampling, vocabulary)
            return super().sample(engine, rows[: self.batch_size], sampling, *others, step=step)

    return Stream


def run(args: Args, share: float, steps: int, words: list[str], name: str, *, max_length: int) -> dict[str, Any]:
    """Run train_grpo.py in this process. Returns medians of its steps."""
    folder = args.out / name
    shutil.rmtree(folder, ignore_errors=True)
    own = f"--partial-rollouts {share} --max-response-length {max_length} --total-training-steps {steps}".split()
    own += ["--rollout-is", "token" if share else "none", "--default-local-dir", str(folder)]
    train = step_time.args_of(train_grpo.Args, [*words, *own])
    vocabulary = step_time.AutoConfig.from_pretrained(train.model).vocab_size
    in_flight.InFlight = seeded_stream(args, share, vocabulary)
    train_grpo.main(train)
    gc.collect()  # moments of the optimizer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "timing_s/update_actor" in line]
    phases = [x for x in lines[-1] if x.startswith("timing_s/")]
    tokens = [line["response_length/mean"] * args.prompts * args.rollout_n for line in lines]
    more = ("response_length/clip_ratio", "rollout/staleness_mean", "rollout/mixed_frac", "rollout/logprob_gap_mean")
    return {
        "share": share,
        "steps": len(lines),
        **{f"{x.removeprefix('timing_s/')}_s": statistics.median(line[x] for line in lines) for x in phases},
        "tokens": statistics.median(tokens),
        "seconds_per_1000": 1000 * sum(line["timing_s/step"] for line in lines) / sum(tokens),
        **{x: statistics.mean(line[x] for line in lines) for x in more if x in lines[-1]},
        "each_step_s": [line["timing_s/step"] for line in lines],
    }


def main(args: Args, flags: list[str]) -> dict[str, Any]:
    """Measure each share. Returns the report. `flags` are train_grpo.py's."""
    if len(args.shares) != len(args.steps):
        raise ValueError(f"--shares has {len(args.shares)} values and --steps {len(args.steps)}; give as many of each")
    for folder in (args.out, args.cache):
        folder.mkdir(parents=True, exist_ok=True)
    shape = (args.shape, args.tokenizer, args.cache, "geometric", args.mean_length)
    model, prompts = step_time.model_folder(*shape), args.out / "prompts.jsonl"
    most = max(steps + share + 1 for share, steps in zip(args.shares, args.steps, strict=True))
    step_time.write_prompts(prompts, args.prompts * (int(most) + 1), args.prompt_length, str(model))
    words = f"--max-prompt-length {args.prompt_length} --train-batch-size {args.prompts} --rollout-n {args.rollout_n}"
    words += " --no-val-before-train --test-freq -1 --save-freq 0 --log-samples-freq 0 --resume-mode disable"
    words += f" --model {model} --train-files {prompts} --custom-reward-function {ROOT}/benchmarks/noise_reward.py"
    words = [*words.split(), *flags]

    longest = args.prompt_length + args.max_length
    make_engine = rl.run.task.make_engine

    def make(*others: Any, **options: Any) -> Any:
        engine = make_engine(*others, **options)
        engine.close_for_good, engine.close = engine.close, engine.sleep  # the next run plans its memory without it
        return engine

    rl.run.task.make_engine = kept(make, longest=longest)
    train_grpo.load_model = kept(train_grpo.load_model, longest=longest)
    rl.run.run.shutdown_ranks = lambda: None  # the next run needs the process group
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    report = {name: str(x) if isinstance(x, Path) else x for name, x in vars(args).items()}
    report |= {"device": device, "versions": step_time.versions(), "flags": flags, "runs": []}
    run(args, 0.0, 1, words, "warmup", max_length=min(256, args.max_length))
    for share, steps in zip(args.shares, args.steps, strict=True):
        found = run(args, share, steps, words, f"share_{share:g}", max_length=args.max_length)
        report["runs"].append(found)
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(found), flush=True)
    print(table(report), flush=True)
    rl.run.task.make_engine().close_for_good()
    shutdown_ranks()
    return report


def table(report: dict[str, Any]) -> str:
    """The report as text. "of sync": seconds a thousand response tokens, against F = 0."""
    names = f"{'push':>7}{'update':>8}{'length':>8}{'s/1000':>9}{'of sync':>9}"
    rows = [f"{'F':>6}{'steps':>6}{'s/step':>8}{'gen':>8}{names}"]
    base = next((x["seconds_per_1000"] for x in report["runs"] if x["share"] == 0), float("nan"))
    for x in report["runs"]:
        length, per = x["tokens"] / report["prompts"] / report["rollout_n"], x["seconds_per_1000"]
        times = f"{x['step_s']:8.2f}{x['gen_s']:8.2f}{x['update_weights_s']:7.2f}{x['update_actor_s']:8.2f}"
        rows.append(f"{x['share']:6g}{x['steps']:6}{times}{length:8.0f}{per:9.4f}{per / base:9.2f}")
    return "\n".join(rows)


if __name__ == "__main__":
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    main(tyro.cli(Args, args=sys.argv[1:at], description=__doc__), sys.argv[at + 1 :])
