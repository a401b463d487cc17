"""Metrics under verl's names, as scripts that sample responses report them: those of means.py, and of responses.

Each function returns {name: float}. docs/metrics.md says what is healthy.
"""

import math
from collections.abc import Sequence

import torch

from extras import agents
from rl.data.types import Sample
from rl.run.means import Means as Means
from rl.run.means import describe as describe
from rl.run.means import describe_tokens as describe_tokens
from rl.run.means import of_norms as of_norms
from rl.sampling.evaluation import of_scoring
from rl.sampling.responses import lengths_of, scores_of


def of_groups(scores: torch.Tensor) -> dict[str, float]:
    """scores (P, G), NaN where not scored -> the share of groups without any spread, which teach nothing.

    Nothing if a group is one response, since no group could have a spread, and nothing is compared.
    """
    if scores.shape[1] == 1:
        return {}
    spread = scores.nan_to_num(-math.inf).amax(1) - scores.nan_to_num(math.inf).amin(1)  # -inf without any score
    return {"reward/zero_std_frac": (spread <= 0).double().mean().item()}


def of_sampled(responses: Sequence[Sample], n: int) -> dict[str, float]:
    """`of_scores`, `of_lengths`, `of_groups`, `agents.metrics_of` of n responses to each prompt, if there are any."""
    if not responses:
        return {}
    metrics = of_scores(responses) | of_lengths(responses) | agents.metrics_of(responses)
    return metrics | of_groups(scores_of(responses).view(-1, n))


def of_scores(responses: Sequence[Sample]) -> dict[str, float]:
    """critic/score/*, and how scoring went. These are shares of responses without a score by cause, seconds, and the
    mean of every component by data source.
    """
    scoring = of_scoring([r.score for r in responses], [r.data_source for r in responses])
    return describe("critic/score", scores_of(responses)) | scoring


def of_lengths(responses: Sequence[Sample]) -> dict[str, float]:
    """Lengths in tokens that the policy sampled. `clip_ratio` is the share of responses that ended at the length limit,
    by finish reason.
    """
    truncated = sum(r.finish_reason == "length" for r in responses) / len(responses)
    lengths = describe("response_length", lengths_of(responses)) | {"response_length/clip_ratio": truncated}
    return lengths | describe("prompt_length", torch.tensor([float(len(r.prompt_ids)) for r in responses]))
