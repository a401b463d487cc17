"""A model of a step in time: partial rollouts, and the pools of train_async.py, from the speed of decoding and the
lengths of responses.

    python -m extras.plan.simulation                                  # the table of docs/performance.md
    python -m extras.plan.simulation --base-ms 7 --sequence-ms 0.036 --prompts 16 --max-length 8192 --mean-length 2000
    python -m extras.plan.simulation --report runs/partial_rollouts/report.json     # what it says of measured runs

With n responses open, one more token of each takes `base + sequence * n` milliseconds: reading the weights, and what a
response adds. Lengths are geometric with mean M, cut at L. A step needs P groups of G responses. With a share F there
are P (1 + F) in flight, and a step ends when P are complete, the oldest of which it takes, as
extras/partial/in_flight.py. Then come the update, `update` milliseconds a thousand tokens that are trained on, `fixed`
seconds for everything else, and, in the next step, reading again what interrupted responses have, `read` milliseconds a
thousand tokens.

Pools (train_async.py): samplers stop only when --max-staleness lets them sample nothing more, see `pools`.
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
    gpus: tuple[int, ...] = (2, 8)
    """Numbers of GPUs to compare, with P groups each."""
    steps: int = 60
    """Steps that are simulated. The first third is left out."""
    report: Path | None = None
    """report.json of benchmarks/partial_rollouts.py: fit its decoding speed, and compare."""


STALENESS = (1, 2, 4)  # --max-staleness


class Step(NamedTuple):
    """Of one simulated step."""

    generate_s: float
    tokens: int  # of responses that it trains on
    decoding_steps: int
    token_steps: int  # responses summed over decoding steps: the tokens sampled
    read: int  # tokens of prompts and interrupted responses that are read
    step_s: float


def lengths(args: Args, random: np.random.Generator) -> np.ndarray:
    """Of one group's responses, (G,) int: each token ends a response with chance 1 / M."""
    return np.minimum(random.geometric(1 / args.mean_length, args.rollout_n), args.max_length)


def simulate(args: Args, share: float, *, steps: int, seed: int = 0) -> tuple[list[Step], np.ndarray, np.ndarray]:
    """The given number of steps with a share F, and the N groups that are in flight after them, the oldest first. Of
    these it returns the lengths that their responses will have, (N, G), and how many tokens of its longest response
    each group has, (N,).
    """
    random, ahead = np.random.default_rng(seed), int(np.ceil(share * args.prompts))
    whole, have, made = np.zeros((0, args.rollout_n), int), np.zeros(0, int), []
    for step in range(steps):
        interrupted = (whole > have[:, None]).sum(axis=1)  # responses of each group
        new = args.prompts + (ahead if step == 0 else 0)
        read = int(interrupted @ (args.prompt_length + have)) + new * args.prompt_length
        whole = np.vstack([whole, *(lengths(args, random) for _ in range(new))])
        have, longest = np.append(have, np.zeros(new, int)), whole.max(axis=1)
        milliseconds, ticks, sampled = args.read_ms * read / 1000, 0, 0
        while (have >= longest).sum() < args.prompts:
            rest = (whole - have[:, None])[whole > have[:, None]]
            go = int(rest.min())
            milliseconds += go * (args.base_ms + args.sequence_ms * len(rest))
            ticks, sampled = ticks + go, sampled + go * len(rest)
            have = np.minimum(have + go, longest)
        taken = np.flatnonzero(have >= longest)[: args.prompts]
        tokens = int(whole[taken].sum())
        whole, have = np.delete(whole, taken, axis=0), np.delete(have, taken)
        trained = tokens + args.prompts * args.prompt_length
        step_s = milliseconds / 1000 + args.update_ms * trained / 1e6 + args.fixed_s
        made.append(Step(milliseconds / 1000, tokens, ticks, sampled, read, step_s))
    return made, whole, have


def seconds_per_1000(steps: list[Step]) -> float:
    """Seconds of a step for a thousand response tokens that are trained on: steps differ in length."""
    return 1000 * sum(x.step_s for x in steps) / sum(x.tokens for x in steps)


def steady(args: Args, share: float) -> list[Step]:
    """Steps after the first third, in which short responses come first."""
    return simulate(args, share, steps=args.steps)[0][args.steps // 3 :]


def synchronous(args: Args, share: float, gpus: int) -> float:
    """Tokens a second of GPUs that have P groups each and wait for the slowest in each step. 32 GPUs stand for more."""
    ranks = [simulate(args, share, steps=args.steps, seed=seed)[0] for seed in range(min(gpus, 32))]
    steps = list(zip(*ranks, strict=True))[args.steps // 3 :]
    tokens = sum(x.tokens for step in steps for x in step) * gpus / len(ranks)
    return tokens / sum(max(x.step_s for x in step) for step in steps)


def pools(
    args: Args, staleness: int, samplers: int, trainers: int, tick_s: float = 0.1, batch: int | None = None
) -> float:
    """Tokens a second of train_async.py, which trains on `batch` groups in a step, by default P for each of its GPUs.

    Version v may sample the groups below P (v + 1 + S), and step v needs all groups below P (v + 1). New responses go
    round the samplers, from that with the fewest on. After a push a sampler first reads again what it has in flight.
    """
    random, batch = np.random.default_rng(0), batch or args.prompts * (samplers + trainers)
    open_of = np.zeros(batch * (args.steps + staleness + 1), int)  # responses of a group that are not complete
    group, rest, have, place = (np.zeros(0, kind) for kind in (int, float, float, int))  # of those in flight
    seconds, drawn, trained, update_ends = 0.0, 0, 0, np.inf
    reading, tokens, ends = np.zeros(samplers), np.zeros(args.steps + staleness + 1), []
    while trained < args.steps:
        if new := batch * (trained + 1 + staleness) - drawn:
            new_lengths = np.stack([lengths(args, random) for _ in range(new)])
            np.add.at(tokens, np.arange(drawn, drawn + new) // batch, new_lengths.sum(axis=1))
            fewest = np.argsort(np.bincount(place, minlength=samplers), kind="stable")
            place = np.append(place, fewest[np.arange(new_lengths.size) % samplers])
            group = np.append(group, np.arange(drawn, drawn + new).repeat(args.rollout_n))
            rest, have = np.append(rest, new_lengths), np.append(have, np.zeros(new_lengths.size))
            open_of[drawn : drawn + new], drawn = args.rollout_n, drawn + new
        speed = 1000 / (args.base_ms + args.sequence_ms * np.bincount(place, minlength=samplers))  # tokens per second
        go = (speed * np.maximum(tick_s - reading, 0.0))[place]
        reading = np.maximum(reading - tick_s, 0.0)
        rest, have, seconds = rest - go, have + go, seconds + tick_s
        np.subtract.at(open_of, group[rest <= 0], 1)
        group, have, place, rest = (x[rest > 0] for x in (group, have, place, rest))
        groups_of_step = slice(batch * trained, batch * (trained + 1))
        if update_ends == np.inf and drawn >= groups_of_step.stop and not open_of[groups_of_step].any():
            update = args.update_ms * (tokens[trained] + batch * args.prompt_length) / 1e6
            update_ends = seconds + update / trainers + args.fixed_s
        if seconds >= update_ends:
            trained, update_ends = trained + 1, np.inf
            ends.append(seconds)
            again = np.bincount(place, weights=have + args.prompt_length, minlength=samplers)
            reading += args.read_ms * again / 1e6
    first = args.steps // 3
    return tokens[first : args.steps].sum() / (ends[-1] - ends[first - 1])


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
        means = dict(zip(Step._fields, per_token, strict=True))
        rows.append([means["decoding_steps"], means["token_steps"]])
        seconds.append(run["gen_s"] / run["tokens"] - args.read_ms * means["read"] / 1e6)
    base, sequence = np.linalg.solve(np.array(rows), np.array(seconds) * 1000)
    update = 1e6 * first["update_actor_s"] / (first["tokens"] + args.prompts * args.prompt_length)
    fixed = first["step_s"] - first["gen_s"] - first["update_actor_s"]
    return replace(args, base_ms=base, sequence_ms=sequence, update_ms=update, fixed_s=fixed)


def main(args: Args) -> dict[str, float]:
    """Print the table. Returns the share of the synchronous time for each F."""
    measured: dict[float, float] = {}
    if args.report is not None:
        report = json.loads(args.report.read_text())
        args = fitted(args, report)
        measured = {run["share"]: run["seconds_per_1000"] for run in report["runs"]}
    print(f"{args.prompts} x {args.rollout_n}, up to {args.max_length} tokens, {args.mean_length:g} on average before")
    print(f"a decoding step: {args.base_ms:.2f} + {args.sequence_ms:.4f} n ms; update {args.update_ms:.1f} ms per 1000")
    of_sync, base = {}, seconds_per_1000(steady(args, 0.0))
    print(f"{'F':>6}{'s/step':>9}{'generate':>10}{'of sync':>9}{'measured':>10}")
    for share in args.shares:
        steps = steady(args, share)
        of_sync[share] = seconds_per_1000(steps) / base
        other = f"{measured[share] / measured[0.0]:10.2f}" if measured.get(share) and 0.0 in measured else f"{'-':>10}"
        step_s, generate_s = (np.mean([getattr(x, name) for x in steps]) for name in ("step_s", "generate_s"))
        print(f"{share:6g}{step_s:9.1f}{generate_s:10.1f}{of_sync[share]:9.2f}{other}")
    print("\ntokens a second, times those of as many synchronous GPUs; train_async.py: half of them sample")
    print(f"{'GPUs':>6}{'F = 0.25':>10}{'F = 1':>8}" + "".join(f"{f'S = {n}':>8}" for n in STALENESS))
    for gpus in args.gpus:
        base = synchronous(args, 0.0, gpus)
        cells = [f"{synchronous(args, 0.25, gpus) / base:10.2f}{synchronous(args, 1.0, gpus) / base:8.2f}"]
        cells += [f"{pools(args, n, gpus // 2, gpus // 2) / base:8.2f}" for n in STALENESS]
        print(f"{gpus:6}{''.join(cells)}")
    return of_sync


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
