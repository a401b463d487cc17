"""What every rank knows of the responses of a step, and their scores and lengths as tensors."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rl.data.batching import common_prefix
from rl.data.types import Sample
from rl.ranks import Ranks


def gather_responses(own_samples: Sequence[Sample], rows: Sequence[dict], ranks: Ranks) -> list[Sample]:
    """The samples of all ranks, in rank order, with their scores and lengths. A rank has the tokens of its own samples.

    Tokens and texts stay where they are. `batching.make_batch` sends tokens to the rank that trains on them. Args:
    rows, with the prompts of all ranks' samples. All ranks must enter.
    """
    sources = {row["row_index"]: row.get("data_source", "") for row in rows}
    prompts = {row["row_index"]: np.asarray(row["prompt_ids"], np.int32) for row in rows}
    me, own, above, number = ranks.rank, [], None, 0
    for place, s in enumerate(x.without_texts() for x in own_samples):
        rows, source = [], sources[s.row_index]
        for row in s.as_rows:
            # See `Sample.shared`. It is counted here, since other ranks do not have the tokens that it compares.
            shared = 0
            if above is not None and above.row_index == row.row_index:
                shared = len(row.prompt_ids) + common_prefix(above.response_ids, row.response_ids)
            rows.append(replace(row, data_source=source, rank=me, number=number, shared=shared, score=s.score))
            above, number = row, number + 1
        whole = replace(s, data_source=source, rank=me, number=place, rows=tuple(rows))
        own.append(whole if s.rows else rows[0])
    # Every rank has the prompts from the data, so they are not sent. They are put back below.
    everyone = ranks.all_gather(replace(s.without_tokens(), prompt_ids=None) for s in own)
    return [own[s.number] if s.rank == me else replace(s, prompt_ids=prompts[s.row_index]) for s in everyone]


def scores_of(responses: Sequence[Sample]) -> torch.Tensor:
    """The score of each response, (B,) float32: NaN where there is none."""
    return torch.from_numpy(np.array([r.score.value for r in responses], np.float32))  # None becomes NaN


def lengths_of(responses: Sequence[Sample], *, whole: bool = False) -> torch.Tensor:
    """How many tokens of each response the policy sampled, or how many the `whole` response has, with the answers of a
    partner, which --max-response-length limits too: (B,) float32. If a response has several rows, each of them has this
    limit, so its whole length is that of the longest row.
    """
    lengths = (max(x.num_response_tokens for x in r.as_rows) if whole else r.num_sampled for r in responses)
    return torch.tensor([float(x) for x in lengths])
