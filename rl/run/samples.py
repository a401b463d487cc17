"""What generations.jsonl says of a few responses of a training step: scores, and numbers of each token."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rl.data.types import Batch, Sample

MOST = 4  # responses that a step shows, all to one prompt


def shown(tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample], batch: Batch | None) -> list[dict[str, Any]]:
    """The first responses to the first prompt, as JSON.

    `tokens` has lists with an entry for each token of the response. `text` has the tokens, and `engine_logp` their
    log-probs when they were sampled. If this rank trains on the response, there is `advantage` too. Where the script
    computes them, there are `trainer_logp` (by the policy that starts the step), `reference_logp` and the critic's
    `value`.

    A response that a partner has answered also has what the partner says, see `Outcome`, and for each token its `mask`:
    1 if it was sampled, 0 if the policy was told it. Of a response with several rows the last one is shown.

    Args: samples, of this rank, with scores; batch, what this rank trains on in the step; None if in nothing.
    """
    return [
        {
            "prompt": tokenizer.decode(sample.prompt_ids),
            **sample.record,
            "finish_reason": sample.finish_reason,
            "tokens": _tokens(tokenizer, sample.as_rows[-1], batch),
        }
        for sample in samples[:MOST]
        if sample.row_index == samples[0].row_index
    ]


def _tokens(tokenizer: PreTrainedTokenizerBase, sample: Sample, batch: Batch | None) -> dict[str, list]:
    tokens = {"text": [tokenizer.decode([i]) for i in sample.response_ids.tolist()]}
    if sample.outcome or not len(sample.prompt_ids):
        tokens["mask"] = sample.response_mask.tolist()
    tokens["engine_logp"] = _rounded(torch.tensor(sample.rollout_logprobs))
    if batch is None or (row := _row_of(sample, batch)) is None:
        return tokens
    response = slice(len(sample.prompt_ids), sample.num_tokens)
    columns = dict(
        advantage=batch.advantages, trainer_logp=batch.old_logp, reference_logp=batch.ref_logp, value=batch.values
    )
    return tokens | {name: _rounded(x[row, response]) for name, x in columns.items() if x is not None}


def _row_of(sample: Sample, batch: Batch) -> int | None:
    """Which row of the batch has these tokens, if any."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
    rows = (batch.lengths == len(ids)).nonzero().flatten().tolist()
    return next((row for row in rows if torch.equal(batch.input_ids[row, : len(ids)], ids)), None)


def _rounded(values: torch.Tensor) -> list[float | None]:
    """Five decimals, or None for what is not finite, which JSON does not have."""
    return [round(x, 5) if math.isfinite(x) else None for x in values.detach().double().tolist()]
