"""Metrics under verl's names: means over the tokens, sequences or updates of a step, and gradient norms.

Each function returns {name: float}. docs/metrics.md says what is healthy. metrics.py adds those of responses.
"""

import math
from collections.abc import Sequence

import torch

from rl.data.types import Batch
from rl.ranks import Ranks

DESCRIBED = ("mean", "max", "min")


class Means:
    """Means of a step over its micro-batches and all ranks, whether of tokens, of sequences, or of updates.

    `num_updates` is how many optimizer steps the step makes. Every rank must add the same names. `reduce` adds up what
    they have.
    """

    def __init__(self, ranks: Ranks, *, num_updates: int = 1):
        self.ranks, self.num_updates = ranks, num_updates
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}
        # Extremes: those of (name, 1) are maxima, and those of (name, -1) are minima times -1.
        self.ends: dict[tuple[str, int], torch.Tensor] = {}

    def over_tokens(self, mask: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Values (b, T), of which those with mask 1 count, each alike."""
        count = mask.bool().sum()
        for name, value in values.items():
            self._add(name, torch.where(mask.bool(), value, 0.0).sum(), count)

    def over_sequences(self, values: dict[str, torch.Tensor]) -> None:
        """Values (b,), one of each sequence."""
        for name, value in values.items():
            self._add(name, value.sum(), torch.tensor(len(value)))

    def over_updates(self, values: dict[str, torch.Tensor]) -> None:
        """Scalars that add up to the value of an update over its micro-batches and ranks, such as shares of a loss."""
        for name, value in values.items():
            self._add(name, value, None)

    def largest(self, mask: torch.Tensor, values: dict[str, torch.Tensor], *, sign: int = 1) -> None:
        """The largest of the values (b, T) with mask 1. With sign -1 the smallest."""
        for name, value in values.items():
            value = (sign * value).masked_fill(mask == 0, -math.inf).max().detach().double()
            self.ends[name, sign] = torch.maximum(self.ends.get((name, sign), value), value)

    def between_policies(
        self,
        batch: Batch,
        logp: torch.Tensor,
        old_logp: torch.Tensor,
        weights: torch.Tensor | None = None,
        proximal: str = "recomputed",
    ) -> None:
        """How far apart the policies are that sampled, that began the step and that learn.

        Args:
            batch: the rows of a pass (b, T), with the log-probs of the policy that sampled.
            logp, old_logp: (b, T), by the policy that learns and by the one that began the step.
            weights: (b, T), of `Correction.weights`, if the loss is multiplied with them.
            proximal: whose log-probs old_logp has, see --proximal-policy of train_async.py. Only "recomputed" ones are
                the trainer's. With others nothing is known of the ratio and the gap between trainer and engine.

        With the ratio r = exp(old - rollout) of a token between the trainer and the engine, tokens t of sequences i,
        and means over all tokens where nothing else is said:

            actor/ppo_kl                        mean of old - logp: KL(old, policy) by k1
            rollout/logprob_gap_mean, _max      |rollout - old|, of tokens that the newest weights have sampled
            rollout/stale_gap_mean              the same of older tokens, if there are any: there the policy has changed
            training/rollout_probs_diff_mean    mean of |exp(rollout) - exp(old)|
            rollout_corr/kl, k3_kl              means of -log r and of r - log r - 1: KL(engine, trainer) by k1 and k3
            rollout_corr/rollout_is_mean, _min, _max          r itself, before any cap
            rollout_corr/chi2_token, chi2_seq   mean of r^2 - 1; mean over i of (prod_t r_t)^2 - 1
            rollout_corr/rollout_is_eff_sample_size           (mean of r)^2 / mean of r^2: 1 if all are alike
            rollout_corr/ppl_ratio              mean over i of exp(mean_t of -log r): perplexity, trainer's by engine's
            rollout_corr/weight_mean            mean of the weights that the loss is multiplied with
            rollout_corr/rollout_rs_masked_fraction           share of the tokens whose weight is 0

        These are verl's metrics (rollout_corr_helper.py), except for three things. The ratio is always that of tokens,
        whatever --rollout-is says. The effective sample size is that of r itself, while verl first cuts r to the
        threshold. Logarithms are cut at +-20 before they are raised, which verl does not do in k3_kl and ppl_ratio.
        """
        mask, rollout_logp = batch.response_mask, batch.rollout_logp
        self.over_tokens(mask, {"actor/ppo_kl": old_logp - logp})
        if weights is not None:
            masked = (weights == 0).to(weights.dtype)
            of_weights = {"rollout_corr/weight_mean": weights, "rollout_corr/rollout_rs_masked_fraction": masked}
            self.over_tokens(mask, of_weights)
        if proximal != "recomputed":
            return
        gap = torch.where(mask.bool(), rollout_logp - old_logp, 0.0).detach()
        log_ratio, count = (-gap).clamp(-20, 20), mask.sum(1)
        ratio = log_ratio.exp()
        whole = (-gap.sum(1)).clamp(-20, 20).exp().square() - 1
        fresh = mask * (batch.columns["ages"] <= 0) if "ages" in batch.columns else mask
        self.over_tokens(fresh, {"rollout/logprob_gap_mean": gap.abs()})
        self.over_tokens(mask - fresh, {"rollout/stale_gap_mean": gap.abs()})
        self.over_tokens(
            mask,
            {
                "training/rollout_probs_diff_mean": (rollout_logp.exp() - old_logp.exp()).abs(),
                "rollout_corr/kl": gap,
                "rollout_corr/k3_kl": log_ratio.expm1() + gap,
                "rollout_corr/rollout_is_mean": ratio,
                "rollout_corr/chi2_token": ratio.square() - 1,
            },
        )
        perplexities = (gap.sum(1) / count.clamp(min=1)).clamp(-20, 20).exp()
        of_rows = {"rollout_corr/chi2_seq": whole, "rollout_corr/ppl_ratio": perplexities}
        self.over_sequences({name: x[count > 0] for name, x in of_rows.items()})
        self.largest(fresh, {"rollout/logprob_gap_max": gap.abs()})
        self.largest(mask, {"rollout_corr/rollout_is_max": ratio})
        self.largest(mask, {"rollout_corr/rollout_is_min": ratio}, sign=-1)

    def _add(self, name: str, value: torch.Tensor, count: torch.Tensor | None) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value.detach().double()
        if count is not None:
            self.counts[name] = self.counts.get(name, 0.0) + count.to(value.device).double()

    def reduce(self) -> dict[str, float]:
        """{name: mean} and {name: maximum} of the names that have any value on any rank. All data ranks must enter."""
        result: dict[str, float] = {}
        if self.sums:
            sums = self.ranks.all_reduce_sum(torch.stack([*self.sums.values(), *self.counts.values()])).tolist()
            counts = dict(zip(self.counts, sums[len(self.sums) :], strict=True))
            for name, total in zip(self.sums, sums, strict=False):
                if count := counts.get(name, self.num_updates):
                    result[name] = total / count
        if self.ends:
            ends = self.ranks.all_reduce_max(torch.stack([*self.ends.values()])).tolist()
            pairs = zip(self.ends, ends, strict=True)
            result |= {name: sign * end for (name, sign), end in pairs if end != -math.inf}
        if (squares := result.get("rollout_corr/chi2_token")) is not None:
            mean = result["rollout_corr/rollout_is_mean"]
            result["rollout_corr/rollout_is_eff_sample_size"] = mean**2 / (1 + squares)
        return result


def describe(prefix: str, values: torch.Tensor) -> dict[str, float]:
    """mean, max and min of the finite entries of values of any shape: {prefix/mean: ...}, or NaN if there are none."""
    values = values[values.isfinite()].double()
    mean_max_min = (values.mean(), values.max(), values.min()) if len(values) else (math.nan,) * 3
    return {f"{prefix}/{kind}": float(x) for kind, x in zip(DESCRIBED, mean_max_min, strict=True)}


def describe_tokens(prefix: str, values: torch.Tensor, mask: torch.Tensor, ranks: Ranks) -> dict[str, float]:
    """mean, max and min of the values (b, T) with mask 1 of all ranks: {prefix/mean: ...}, or NaN if there are none.

    All data ranks must enter.
    """
    of_rank = values[mask > 0].double()
    ends = torch.stack([of_rank.max(), -of_rank.min()]) if len(of_rank) else torch.full((2,), -math.inf).double()
    high, low = (ranks.all_reduce_max(ends) * torch.tensor([1, -1])).tolist()
    mean_max_min = (ranks.mean(values, mask), high, low) if low <= high else (math.nan,) * 3
    return {f"{prefix}/{kind}": value for kind, value in zip(DESCRIBED, mean_max_min, strict=True)}


def of_staleness(batch: Batch, ranks: Ranks) -> dict[str, float]:
    """How old the sampled tokens of a batch are. The age of a token is the number of pushes of weights since then.
    Returns its mean and maximum over tokens, and the share of rows that several versions have sampled. All data ranks
    must enter.
    """
    ages = batch.columns.get("ages", torch.full_like(batch.input_ids, -1))
    oldest, youngest = ages.amax(1), ages.where(ages >= 0, ages.amax(1, keepdim=True)).amin(1)  # of each row
    return {
        "rollout/staleness_mean": ranks.mean(ages, ages >= 0),
        "rollout/staleness_max": ranks.all_reduce_max(torch.tensor(float(max([0, *oldest.tolist()])))).item(),
        "rollout/mixed_frac": ranks.mean(oldest > youngest, torch.ones_like(oldest)),
    }


def of_norms(norms: Sequence[dict[str, float]]) -> dict[str, float]:
    """Gradient norms of a step's updates, {"actor": norm, ...} each -> NAME/grad_norm, their mean, and how many updates
    were skipped because one of them was not finite. A step may have no updates.
    """
    mean_norms = {f"{name}/grad_norm": sum(x[name] for x in norms) / len(norms) for name in (norms[0] if norms else ())}
    return mean_norms | {"actor/skipped_updates": float(sum(not all(map(math.isfinite, x.values())) for x in norms))}
