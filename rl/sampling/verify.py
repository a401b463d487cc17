"""Does the engine hold the policy's weights? The trainer computes the log-probs of a few samples and compares."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from rl.data.batching import collate
from rl.data.types import Sample, Sampling, take_rows, unknown
from rl.model.logprobs import token_logprobs
from rl.ranks import Ranks
from rl.sampling.engines.flags import EngineFlags

USUAL_GAPS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.06}  # limits of the gap by compute precision


def sampled_by(version: int, sample: Sample) -> np.ndarray:
    """Which tokens of the response weights of this version have sampled: (n,) bool. Raises RuntimeError if the response
    mask does not mark the tokens that were sampled.
    """
    versions = sample.columns["versions"][len(sample.prompt_ids) :]
    is_sampled = versions < unknown(versions)
    if (is_sampled != (sample.response_mask > 0)).any():
        raise RuntimeError(
            f"a response to row {sample.row_index} has {sample.num_sampled} tokens of mask 1, and the engine sampled "
            f"{is_sampled.sum()}: the response mask has tokens that it did not sample, as of a tool, or lacks some"
        )
    return versions == version


@torch.no_grad()
def check_engine(
    policy: PreTrainedModel,
    samples: Sequence[Sample],
    sampling: Sampling,
    rollout: EngineFlags,
    ranks: Ranks,
    *,
    num_probe: int = 4,
    version: int | None = None,
) -> float:
    """Compute the log-probs of a few fresh samples of every rank with the trainer, and compare them with the engine's.

    With `version`, `engine.policy_version`, only tokens count that the weights of the last push have sampled. There are
    fewer samples if those of a rank have more tokens than a micro-batch may have.

    Returns the mean absolute difference over all probed tokens of all ranks, which must enter. Raises RuntimeError on
    every rank if it is not finite or exceeds --max-logprob-gap. The cause may be weights that did not reach the engine,
    a different temperature, or a broken kernel. The default limit is 1e-4 in float32, 0.01 in float16, and 0.06 in
    bfloat16, where 0.004 to 0.04 is normal, more for larger models. For a quantized engine it is 0.3.

    Rounding errors have both signs, so the signed mean of the differences stays near 0.001 in bfloat16. It is therefore
    also an error if tokens are likelier to the engine by more than a sixth of the limit on average, after four
    standard errors are subtracted to allow for chance. With top-k and the like that is normal. The engine samples
    tokens at the edge that rounding has moved into its set.

    Families of the policy, such as experts, may measure something in this pass. `policy.family_metrics` gets it.
    """
    usual = 0.3 if rollout.is_quantized else USUAL_GAPS.get(ranks.dtype, 0.06)
    limit = rollout.max_logprob_gap or usual
    samples = [row for s in samples for row in s.as_rows]
    if version is not None:
        fresh = [replace(s, response_mask=sampled_by(version, s)) for s in samples]
        samples = [s for s in fresh if s.num_sampled]
    probe = list(samples[:: max(1, len(samples) // num_probe)])[:num_probe]  # spread over the prompts
    probe = [s for part in ranks.of_same_rows(probe) for s in part]  # since these ranks compute together
    while sum(s.num_tokens for s in probe) > policy.packed.max_tokens:  # there is room for the longest one
        probe.pop()
    batch = collate(probe, width=max((s.num_tokens for s in probe), default=2))
    batch = take_rows(batch, range(len(probe)), ranks.device)  # a rank without samples takes part in the pass too
    with contextlib.ExitStack() as stack:
        seen = [(x, stack.enter_context(x.watched())) for x in policy.packed.families]
        logp, _ = token_logprobs(policy, batch, sampling=sampling)
    gap = ((batch.rollout_logp - logp) * batch.response_mask).double()  # above 0 if it is likelier to the engine
    sums = torch.stack([gap.abs().sum(), gap.sum(), gap.square().sum(), batch.response_mask.double().sum()])
    policy.family_metrics = {name: x for kind, what in seen for name, x in kind.metrics(what, ranks).items()}
    *sums, count = ranks.all_reduce_sum(sums).tolist()
    mean, bias, square = (x / max(count, 1) for x in sums)
    error = math.sqrt(max(square - bias**2, 0.0) / max(count, 1))  # standard error of the bias
    if not mean <= limit or (not sampling.is_truncated and bias - 4 * error > limit / 6):
        raise RuntimeError(
            f"engine and trainer disagree: their log-probs differ by {mean:.2e} on average over {count:.0f} tokens, "
            f"more than --max-logprob-gap {limit:.0e}, or by more than a sixth of it in one direction ({bias:.2e}). "
            "The engine does not hold the policy's weights: not all were pushed, or numerics differ. Or, if nearly all "
            "tokens are likelier to the engine, so that both numbers are close: it samples from fewer tokens than the "
            "trainer knows of (--top-p, --top-k, --min-p), or the response mask has tokens that it did not sample, as "
            "of a tool."
        )
    return mean
