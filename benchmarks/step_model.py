"""A model of a step: how long it takes, from the speed of decoding and the lengths of responses.

    python benchmarks/step_model.py                                    # the table of docs/performance.md
    python benchmarks/step_model.py --base-ms 7 --sequence-ms 0.036 --prompts 16 --max-length 8192 --mean-length 2000
    python benchmarks/step_model.py --report runs/partial_rollouts/report.json      # what it says of measured runs

With n responses open, one more token of each takes `base + sequence * n` milliseconds: reading the weights, and what a
response adds. Lengths are geometric with mean M, cut at L. A step needs P groups of G responses; with a share F there
are P (1 + F) in flight, and a step ends when P are complete, the oldest of which it takes, as rl/sampling/in_flight.py.
Then come the update, `update` milliseconds a thousand tokens that are trained on, `fixed` seconds for everything else,
and, in the next step, reading again what interrupted responses have, `read` milliseconds a thousand tokens.

Pools (train_async.py): samplers never stop, and trainers are as fast as the slower of the two.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tyro


@dataclass(frozen=True)
class Args:
    prompts: int = 16
    """Groups that a step trains on (P), of one engine."""
    rollout_n: int = 8
    """Responses to each prompt (G)."""
    prompt_length: int = 128
    """Tokens of a prompt."""
    max_length: int = 8192
    """Longest response (L)."""
    mean_length: float = 2000.0
    """Mean of the geometric lengths before the cut at L (M)."""
    base_ms: float = 7.0
    """Milliseconds of a decoding step with few responses."""
    sequence_ms: float = 0.036
    """Milliseconds that each open response adds to it."""
    read_ms: float = 15.0
    """Milliseconds to read a thousand tokens again after a push."""
    update_ms: float = 20.0
    """Milliseconds of the update for a thousand tokens."""
    fixed_s: float = 2.0
    """Seconds of a step for everything else: push, sleep, wake, probe, rewards."""
    shares: tuple[float, ...] = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)
    """--partial-rollouts (F)."""
    steps: int = 60
    """Steps that are simulated; the first third is left out."""
    report: Path | None = None
    """report.json of benchmarks/partial_rollouts.py: fit its decoding speed, and compare."""


class Step(NamedTuple):
    """Of one simulated step."""

    generate_s: float
    tokens: int  # of responses that it trains on
    decoding_steps: int
    token_steps: int  # responses summed over decoding steps: the tokens sampled
    read: int  # tokens of prompts and interrupted responses that are read
    step_s: float


class Open(NamedTuple):
    """A group in flight: the lengths that its responses will have, (G,), and how many tokens it has of the longest."""

    lengths: np.ndarray
    tokens: int


def lengths(args: Args, random: np.random.Generator) -> np.ndarray:
    """Of one group's responses, (G,) int: each token ends a response with chance 1 / M."""
    return np.minimum(random.geometric(1 / args.mean_length, args.rollout_n), args.max_length)


def simulate(args: Args, share: float, *, steps: int, seed: int = 0) -> tuple[list[Step], list[Open]]:
    """So many steps with a share F, and the groups that are in flight after them."""
    random, ahead = np.random.default_rng(seed), int(np.ceil(share * args.prompts))
    flight: list[Open] = []  # the oldest first; complete where tokens == lengths.max()
    found = []
    for step in range(steps):
        read = sum(args.prompt_length + min(n, x.tokens) for x in flight for n in x.lengths if n > x.tokens)
        new = args.prompts + (ahead if step == 0 else 0)
        read += new * args.prompt_length
        flight += [Open(lengths(args, random), 0) for _ in range(new)]
        milliseconds, ticks, sampled = args.read_ms * read / 1000, 0, 0
        while sum(x.tokens >= x.lengths.max() for x in flight) < args.prompts:
            rest = np.concatenate([x.lengths - x.tokens for x in flight])
            rest = rest[rest > 0]
            go = int(rest.min())
            milliseconds += go * (args.base_ms + args.sequence_ms * len(rest))
            ticks, sampled = ticks + go, sampled + go * len(rest)
            flight = [Open(x.lengths, min(x.tokens + go, int(x.lengths.max()))) for x in flight]
        ready = [x for x in flight if x.tokens >= x.lengths.max()]
        taken = {id(x) for x in ready[: args.prompts]}
        tokens = sum(int(x.lengths.sum()) for x in ready[: args.prompts])
        flight = [x for x in flight if id(x) not in taken]
        trained = tokens + args.prompts * args.prompt_length
        step_s = milliseconds / 1000 + args.update_ms * trained / 1e6 + args.fixed_s
        found.append(Step(milliseconds / 1000, tokens, ticks, sampled, read, step_s))
    return found, flight


def seconds_per_1000(steps: list[Step]) -> float:
    """Seconds of a step for a thousand response tokens that are trained on: steps differ in length."""
    return 1000 * sum(x.step_s for x in steps) / sum(x.tokens for x in steps)


def steady(args: Args, share: float) -> list[Step]:
    """Steps after the first third, in which short responses come first."""
    return simulate(args, share, steps=args.steps)[0][args.steps // 3 :]


def pools(args: Args, staleness: int = 1) -> tuple[float, float]:
    """Seconds a thousand response tokens of one sampler with one trainer, and of two synchronous GPUs with half of the
    prompts each (the slower of the two decides). P (1 + S) groups are in flight in the sampler.
    """
    sampled = steady(args, float(staleness))
    tokens = np.mean([x.tokens for x in sampled])
    trainer = args.update_ms * (tokens + args.prompts * args.prompt_length) / 1e6 + args.fixed_s
    sampler = np.mean([x.generate_s for x in sampled])
    half = replace(args, prompts=max(args.prompts // 2, 1))
    one, other = (simulate(half, 0.0, steps=args.steps, seed=seed)[0] for seed in (1, 2))
    both = [(max(a.step_s, b.step_s), a.tokens + b.tokens) for a, b in zip(one, other, strict=True)]
    return 1000 * max(sampler, trainer) / tokens, 1000 * sum(s for s, _ in both) / sum(n for _, n in both)


def fitted(args: Args, report: dict) -> Args:
    """The speeds that a report's synchronous run and its run with the most in flight have shown: two measured
    generations, two unknowns, base and sequence. Update and the rest are those of the synchronous run.
    """
    settings = {name: report[name] for name in ("prompts", "rollout_n", "prompt_length", "max_length", "mean_length")}
    args = replace(args, **settings)
    runs = sorted(report["runs"], key=lambda run: run["share"])
    first, last = runs[0], runs[-1]
    rows, seconds = [], []
    for run in (first, last):
        model = steady(args, run["share"])
        per_token = [sum(getattr(x, name) for x in model) / sum(x.tokens for x in model) for name in Step._fields]
        own = dict(zip(Step._fields, per_token, strict=True))
        rows.append([own["decoding_steps"], own["token_steps"]])
        seconds.append(run["gen_s"] / run["tokens"] - args.read_ms * own["read"] / 1e6)
    base, sequence = np.linalg.solve(np.array(rows), np.array(seconds) * 1000)
    update = 1e6 * first["update_actor_s"] / (first["tokens"] + args.prompts * args.prompt_length)
    fixed = first["step_s"] - first["gen_s"] - first["update_actor_s"]
    return replace(args, base_ms=base, sequence_ms=sequence, update_ms=update, fixed_s=fixed)


def main(args: Args) -> dict[str, float]:
    """Print the table; returns the share of the synchronous time for each F."""
    measured: dict[float, float] = {}
    if args.report is not None:
        report = json.loads(args.report.read_text())
        args = fitted(args, report)
        measured = {run["share"]: run["seconds_per_1000"] for run in report["runs"]}
    print(f"{args.prompts} x {args.rollout_n}, up to {args.max_length} tokens, {args.mean_length:g} on average before")
    print(f"a decoding step: {args.base_ms:.2f} + {args.sequence_ms:.4f} n ms; update {args.update_ms:.1f} ms per 1000")
    found, base = {}, seconds_per_1000(steady(args, 0.0))
    print(f"{'F':>6}{'s/step':>9}{'generate':>10}{'of sync':>9}{'measured':>10}")
    for share in args.shares:
        steps = steady(args, share)
        found[share] = seconds_per_1000(steps) / base
        other = f"{measured[share] / measured[0.0]:10.2f}" if measured.get(share) and 0.0 in measured else f"{'-':>10}"
        step_s, generate_s = (np.mean([getattr(x, name) for x in steps]) for name in ("step_s", "generate_s"))
        print(f"{share:6g}{step_s:9.1f}{generate_s:10.1f}{found[share]:9.2f}{other}")
    ours, sync = pools(args)
    print(f"1 sampler + 1 trainer: {sync / ours:.2f} times the tokens a second of two synchronous GPUs")
    return found


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
