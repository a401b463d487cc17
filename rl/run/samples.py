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
    1 if it was sampled, 0 if the policy was told it. A response with `rows`, as that of an agent, has `tokens` for each
    of them, and what stands before the first sampled token of a row is its `prompt`.

    Args: samples, of this rank, with scores; batch, what this rank trains on in the step; None if in nothing.
    """
    return [
        {"prompt": tokenizer.decode(x.prompt_ids), **x.record, "finish_reason": x.finish_reason}
        | ({"rows": [_row(tokenizer, row, batch) for row in x.rows]} if x.rows else _row(tokenizer, x, batch))
        for x in samples[:MOST]
        if x.row_index == samples[0].row_index
    ]


def _row(tokenizer: PreTrainedTokenizerBase, sample: Sample, batch: Batch | None) -> dict[str, Any]:
    # Of a row without a prompt of its own, that is what stands before the first token that was sampled.
    start = 0 if len(sample.prompt_ids) else int(sample.response_mask.argmax())
    tokens = {"text": [tokenizer.decode([i]) for i in sample.response_ids[start:].tolist()]}
    if sample.outcome or not len(sample.prompt_ids):
        tokens["mask"] = sample.response_mask[start:].tolist()
    tokens["engine_logp"] = _rounded(torch.tensor(sample.rollout_logprobs[start:]))
    if batch is not None and (row := _row_of(sample, batch)) is not None:
        place = row, slice(len(sample.prompt_ids) + start, sample.num_tokens)
        names = dict(advantage="advantages", trainer_logp="old_logp", reference_logp="ref_logp", value="values")
        columns = ((name, getattr(batch, field)) for name, field in names.items())
        tokens |= {name: _rounded(x[place]) for name, x in columns if x is not None}
    return {"prompt": tokenizer.decode([*sample.prompt_ids, *sample.response_ids[:start]]), "tokens": tokens}


def _row_of(sample: Sample, batch: Batch) -> int | None:
    """Which row of the batch has these tokens, if any."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
    rows = (batch.lengths == len(ids)).nonzero().flatten().tolist()
    return next((row for row in rows if torch.equal(batch.input_ids[row, : len(ids)], ids)), None)


def _rounded(values: torch.Tensor) -> list[float | None]:
    """Five decimals, or None for what is not finite, which JSON does not have."""
    return [round(x, 5) if math.isfinite(x) else None for x in values.detach().double().tolist()]
