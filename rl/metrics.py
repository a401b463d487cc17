"""Metrics under verl's names.

Each function turns data of a step into {name: float}; docs/metrics.md says what is healthy.
"""

import math
import time
from collections import Counter
from collections.abc import Sequence

import torch

from rl import watchdog
from rl.fsdp import Dist, all_reduce_sum
from rl.scoring import Score
from rl.types import Sample


class Timer:
    """`clock = Timer(device)`; `clock("gen")` closes a phase: its seconds and, on CUDA, the memory in use.

    Memory is the device's own count at the end of the phase: everything on it, torch's cached blocks and
    vLLM's pool included. (torch's counters also count what vLLM has given back while asleep.) The cache only grows
    within a phase, so this is close to the phase's peak.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}
        self.start = self.last = self._now()
        watchdog.beat("report")

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __call__(self, phase: str) -> None:
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            self.memory[phase] = (total - free) / 2**30
        self.last = now
        watchdog.beat(phase)

    def metrics(self) -> dict[str, float]:
        """timing_s/<phase> and timing_s/step in seconds, memory_gb/<phase> in GiB."""
        times = {f"timing_s/{k}": v for k, v in self.seconds.items()} | {"timing_s/step": self._now() - self.start}
        return times | {f"memory_gb/{k}": v for k, v in self.memory.items()}


class Sums:
    """Sums of masked per-token values over micro-batches and ranks, reduced once at the end of the step."""

    def __init__(self, device: torch.device):
        self.device = device
        self.totals: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add(self, **scalars: torch.Tensor) -> None:
        """Add scalars that are partial sums already: loss shares, token counts."""
        for name, value in scalars.items():
            value = value.detach().double().to(self.device)
            self.totals[name] = self.totals[name] + value if name in self.totals else value

    def add_max(self, **scalars: torch.Tensor) -> None:
        """Keep the largest value seen."""
        for name, value in scalars.items():
            value = value.detach().double().to(self.device)
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def reduce(self) -> dict[str, float]:
        """{name: total over micro-batches and ranks} and {name: maximum}. All ranks must enter, with the same names."""
        names = sorted(self.totals)
        totals = all_reduce_sum(torch.stack([self.totals[n] for n in names])).tolist() if names else []
        result = dict(zip(names, totals, strict=True))
        if self.maxima:
            names = sorted(self.maxima)
            largest = torch.stack([self.maxima[n] for n in names])
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
            result |= dict(zip(names, largest.tolist(), strict=True))
        return result


def gap_sums(rollout_logp: torch.Tensor, old_logp: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over tokens of how far the engine's log-probs are from the trainer's, both (b, T), for `Sums.add`.

    gap = |rollout - old|, probs_diff = |exp(rollout) - exp(old)|, rollout_kl = rollout - old (k1 estimate of KL(engine,
    trainer)).
    """
    return {
        "gap": ((rollout_logp - old_logp).abs() * mask).sum(),
        "probs_diff": ((rollout_logp.exp() - old_logp.exp()).abs() * mask).sum(),
        "rollout_kl": ((rollout_logp - old_logp) * mask).sum(),
    }


def describe(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """mean, max and min of the finite entries: {prefix/mean: ...}; NaN if there are none."""
    values = values[values.isfinite()].double()
    if values.numel() == 0:
        return {f"{prefix}/{k}": float("nan") for k in ("mean", "max", "min")}
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }


def reward_metrics(rewards: torch.Tensor) -> dict[str, float]:
    """rewards (P, G), NaN where not scored -> critic/score/*, and the share of groups without any spread."""
    spread = torch.stack(
        [g[g.isfinite()].max() - g[g.isfinite()].min() if g.isfinite().any() else g.new_zeros(()) for g in rewards]
    )
    return describe("critic/score", rewards) | {"reward/zero_std_frac": (spread == 0).double().mean().item()}


def scoring_metrics(scores: Sequence[Score], sources: Sequence[str]) -> dict[str, float]:
    """How scoring went: shares of responses without a score by cause, seconds, and every component's mean by source.

    `sources` holds the data source of each response.
    """
    seconds = torch.tensor([s.seconds for s in scores])
    status = Counter(s.status for s in scores)
    components: dict[str, list[float]] = {}
    for score, source in zip(scores, sources, strict=True):
        for name, value in score.components.items():
            components.setdefault(f"reward/{source}/{name}", []).append(value)
    return {
        "reward/error_frac": status["error"] / len(scores),
        "reward/timeout_frac": status["timeout"] / len(scores),
        "reward/none_frac": status["none"] / len(scores),
        "reward/seconds_p95": seconds.quantile(0.95).item(),
        "reward/seconds_max": seconds.max().item(),
        **{name: sum(values) / len(values) for name, values in sorted(components.items())},
    }


def evaluation_metrics(scores: Sequence[Score], sources: Sequence[str]) -> dict[str, float]:
    """One score per held-out prompt -> val-core/<source>/reward/mean@1, components, and val/accuracy over all of them.

    A response without a score counts as 0. The accuracy is the mean of the component `acc` (verl's name for right or
    wrong) where a reward has it, with or without a score, and of the score elsewhere.
    """
    values: dict[str, list[float]] = {}
    for score, source in zip(scores, sources, strict=True):
        values.setdefault(f"val-core/{source}/reward/mean@1", []).append(score.value or 0.0)
        for name, value in score.components.items():
            values.setdefault(f"val-aux/{source}/{name}/mean@1", []).append(value)
    means = {name: sum(v) / len(v) for name, v in values.items()}
    return means | {"val/accuracy": sum(accuracy(s) for s in scores) / len(scores)}


def accuracy(score: Score) -> float:
    """The component `acc` if the reward has it, else the score; 0 without either."""
    return score.components.get("acc", score.value or 0.0)


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Lengths in tokens; `clip_ratio` is the share of responses that ended at the length limit, by finish reason."""
    response = torch.tensor([float(len(s.response_ids)) for s in samples])
    prompt = torch.tensor([float(len(s.prompt_ids)) for s in samples])
    truncated = sum(s.finish_reason == "length" for s in samples) / len(samples)
    return (
        describe("response_length", response)
        | {"response_length/clip_ratio": truncated}
        | describe("prompt_length", prompt)
    )


def throughput(samples: Sequence[Sample], times: dict[str, float], d: Dist) -> dict[str, float]:
    """perf/*: verl's tokens/s/GPU (prompt + response tokens over the step's seconds and ranks), and response tokens/s
    while generating.
    """
    total = sum(s.num_tokens for s in samples)
    return {
        "perf/total_num_tokens": float(total),
        "perf/time_per_step": times["timing_s/step"],
        "perf/throughput": total / (times["timing_s/step"] * d.world_size),
        "perf/gen_tokens_per_s": sum(len(s.response_ids) for s in samples) / times["timing_s/gen"],
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that at least one of k draws is right: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374, eq. 1. Raises ValueError if k > n. Example: n = 4, c = 1, k = 2 -> 0.5.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= n = {num_samples} samples per prompt")
    miss = 1.0
    for i in range(num_correct):
        miss *= max(num_samples - k - i, 0) / (num_samples - i)
    return 1.0 - miss


def majority_vote(answers: Sequence[str | None]) -> int | None:
    """Index of the first sample that gives the most frequent answer; None answers do not vote.

    Ties go to the answer seen first.
    """
    votes = Counter(a for a in answers if a is not None)
    return answers.index(votes.most_common(1)[0][0]) if votes else None


def parse_alarm(text: str) -> tuple[str, str, float]:
    """`metric>number` or `metric<number` -> (metric, sign, number); spaces around each are allowed.

    Raises ValueError for anything else.
    """
    metric, sign, number = map(str.strip, text.partition("<") if "<" in text else text.partition(">"))
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not metric or ">" in metric or not math.isfinite(limit):
        raise ValueError(f"--alarms {text!r} must be metric>number or metric<number, e.g. 'actor/entropy<0.01'")
    return metric, sign, limit


def alarms(metrics: dict[str, float], conditions: Sequence[str]) -> list[str]:
    """A sentence for every condition (see `parse_alarm`) that is true of the metrics, or whose metric is NaN.

    A metric that is absent raises no alarm.
    """
    found = []
    for metric, sign, limit in map(parse_alarm, conditions):
        value = metrics.get(metric, limit)
        if math.isnan(value) or (value > limit if sign == ">" else value < limit):
            found.append(f"{metric} is {value:.4g}, beyond the limit of --alarms {metric}{sign}{limit:g}")
    return found
