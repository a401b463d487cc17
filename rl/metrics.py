"""Metrics under verl's names.

Each function turns data of a step into {name: float}; docs/metrics.md says what is healthy.
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch

from rl import losses
from rl.ranks import Ranks
from rl.types import Batch, Response, Score


class Means:
    """Means of a step over its micro-batches and all ranks: of tokens, of sequences, or of updates.

    `num_updates` is how many optimizer steps the step makes. Every rank must add the same names; `reduce` adds up what
    they have.
    """

    def __init__(self, ranks: Ranks, *, num_updates: int = 1):
        self.ranks, self.num_updates = ranks, num_updates
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor | float] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def over_tokens(self, mask: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Values (b, T), of which those with mask 1 count, each alike."""
        count = mask.bool().sum()
        for name, value in values.items():
            self._add(name, losses.masked_sum(value, mask), count)

    def over_sequences(self, values: dict[str, torch.Tensor]) -> None:
        """Values (b,), one of each sequence."""
        for name, value in values.items():
            self._add(name, value.sum(), torch.tensor(len(value)))

    def over_updates(self, values: dict[str, torch.Tensor]) -> None:
        """Scalars that add up to the value of an update over its micro-batches and ranks, such as shares of a loss."""
        for name, value in values.items():
            self._add(name, value, None)

    def largest(self, mask: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """The largest of the values (b, T), 0 where the mask is 0."""
        for name, value in values.items():
            value = (value * mask).max().detach().double()
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value

    def _add(self, name: str, value: torch.Tensor, count: torch.Tensor | None) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value.detach().double()
        if count is not None:
            self.counts[name] = self.counts.get(name, 0.0) + count.to(value.device).double()

    def reduce(self) -> dict[str, float]:
        """{name: mean} and {name: maximum}; a mean of nothing is 0. All data ranks must enter."""
        result: dict[str, float] = {}
        if self.sums:
            sums = self.ranks.all_reduce_sum(torch.stack([*self.sums.values(), *self.counts.values()])).tolist()
            counts = dict(zip(self.counts, sums[len(self.sums) :], strict=True))
            for name, total in zip(self.sums, sums, strict=False):
                result[name] = total / max(counts[name], 1.0) if name in counts else total / self.num_updates
        if self.maxima:
            largest = self.ranks.all_reduce_max(torch.stack([*self.maxima.values()])).tolist()
            result |= dict(zip(self.maxima, largest, strict=True))
        return result


def gaps(logp: torch.Tensor, old_logp: torch.Tensor, rollout_logp: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far apart the policies are that sampled, began the step, and learn: log-probs and results all (b, T).

    actor/ppo_kl: old - logp, which estimates KL(old, policy) (k1). Of the engine against the trainer:
    rollout/logprob_gap_mean: |rollout - old|;  training/rollout_probs_diff_mean: |exp(rollout) - exp(old)|;
    rollout_corr/kl: rollout - old (k1 of KL(engine, trainer)).
    """
    return {
        "actor/ppo_kl": old_logp - logp,
        "rollout/logprob_gap_mean": (rollout_logp - old_logp).abs(),
        "training/rollout_probs_diff_mean": (rollout_logp.exp() - old_logp.exp()).abs(),
        "rollout_corr/kl": rollout_logp - old_logp,
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


def describe_tokens(prefix: str, values: torch.Tensor, mask: torch.Tensor, ranks: Ranks) -> dict[str, float]:
    """mean, max and min of the values (b, T) with mask 1 of all ranks: {prefix/mean: ...}; NaN if there are none.

    All data ranks must enter.
    """
    own = values[mask > 0].double()
    total, count = ranks.all_reduce_sum(torch.stack([own.sum(), torch.tensor(float(len(own))).double()])).tolist()
    edges = torch.stack([own.max(), -own.min()]) if len(own) else torch.full((2,), -math.inf).double()
    largest, negated = ranks.all_reduce_max(edges).tolist()
    found = (total / count, largest, -negated) if count else (math.nan,) * 3
    return {f"{prefix}/{kind}": value for kind, value in zip(("mean", "max", "min"), found, strict=True)}


def of_groups(scores: torch.Tensor) -> dict[str, float]:
    """scores (P, G), NaN where not scored -> the share of groups without any spread, which teach nothing.

    Nothing if a group is one response: no group could have a spread, and nothing is compared.
    """
    if scores.shape[1] == 1:
        return {}
    spread = torch.stack(
        [g[g.isfinite()].max() - g[g.isfinite()].min() if g.isfinite().any() else g.new_zeros(()) for g in scores]
    )
    return {"reward/zero_std_frac": (spread == 0).double().mean().item()}


def of_scores(responses: Sequence[Response], rows: Sequence[dict]) -> dict[str, float]:
    """critic/score/*, and how scoring went: shares of responses without a score by cause, seconds, and the mean of
    every component by data source, which `rows` say.
    """
    scores = [r.score for r in responses]
    values = torch.tensor([math.nan if x.value is None else x.value for x in scores])
    return describe("critic/score", values) | of_scoring(scores, _sources(responses, rows))


def of_lengths(responses: Sequence[Response]) -> dict[str, float]:
    """Lengths in tokens; `clip_ratio` is the share of responses that ended at the length limit, by finish reason."""
    response = torch.tensor([float(r.response_length) for r in responses])
    prompt = torch.tensor([float(len(r.prompt_ids)) for r in responses])
    truncated = sum(r.finish_reason == "length" for r in responses) / len(responses)
    return (
        describe("response_length", response)
        | {"response_length/clip_ratio": truncated}
        | describe("prompt_length", prompt)
    )


def of_critic(batch: Batch, ranks: Ranks) -> dict[str, float]:
    """Advantages, values and returns of the tokens of all ranks, and the share of the returns' variance that the values
    explain: 1 - var(returns - values) / var(returns), 0 for equal returns. All data ranks must enter.
    """
    mask = batch.response_mask
    found = {"advantages": batch.advantages, "values": batch.values, "returns": batch.returns}
    described = [describe_tokens(f"critic/{name}", x, mask, ranks) for name, x in found.items()]
    _, spread = ranks.moments(batch.returns, mask)
    _, rest = ranks.moments(batch.returns - batch.values, mask)
    explained = 1 - rest / spread if spread > 1e-8 else 0.0  # equal returns differ by rounding
    return {name: x for part in described for name, x in part.items()} | {"critic/vf_explained_var": explained}


def of_norms(norms: Sequence[dict[str, float]]) -> dict[str, float]:
    """Gradient norms of a step's updates, {"actor": norm, ...} each -> NAME/grad_norm, their mean, and how many updates
    were skipped because one of them was not finite.
    """
    found = {f"{name}/grad_norm": sum(x[name] for x in norms) / len(norms) for name in norms[0]}
    return found | {"actor/skipped_updates": float(sum(not all(map(math.isfinite, x.values())) for x in norms))}


def _sources(responses: Sequence[Response], rows: Sequence[dict]) -> list[str]:
    by_index = {row["row_index"]: row["data_source"] for row in rows}
    return [by_index[r.row_index] for r in responses]


def of_scoring(scores: Sequence[Score], sources: Sequence[str]) -> dict[str, float]:
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


def of_evaluation(responses: Sequence[Response], rows: Sequence[dict]) -> dict[str, float]:
    """One response per held-out prompt -> val-core/<source>/reward/mean@1, components, and val/accuracy over all of
    them.

    A response without a score counts as 0. The accuracy is the mean of the component `acc` (verl's name for right or
    wrong) where a reward has it, with or without a score, and of the score elsewhere.
    """
    values: dict[str, list[float]] = {}
    for r, source in zip(responses, _sources(responses, rows), strict=True):
        values.setdefault(f"val-core/{source}/reward/mean@1", []).append(r.score.value or 0.0)
        for name, value in r.score.components.items():
            values.setdefault(f"val-aux/{source}/{name}/mean@1", []).append(value)
    means = {name: sum(v) / len(v) for name, v in values.items()}
    return means | {"val/accuracy": sum(accuracy(r.score) for r in responses) / len(responses)}


def accuracy(score: Score) -> float:
    """The component `acc` if the reward has it, else the score; 0 without either."""
    return score.components.get("acc", score.value or 0.0)


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


def count(responses: Sequence[Response]) -> dict[str, int]:
    """Tokens of a step, and those of them that were sampled: what `Run.log_step` divides by its seconds."""
    return {"tokens": sum(r.num_tokens for r in responses), "generated": sum(r.response_length for r in responses)}
