"""Logits of the tokens that are sampled from, by --min-p, --top-k and --top-p."""

import math

import torch
from torch import Tensor


def truncated(logits: Tensor, targets: Tensor | None = None, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Logits (C, V), divided by the temperature, with -1e30 for tokens outside of S, see `truncation`. The sampled
    tokens `targets` (C,) are in S, whatever rounding says.
    """
    left_out = logits.detach() < truncation(logits.detach(), top_k, top_p, min_p)[:, None]
    if targets is not None:
        left_out = left_out.scatter(-1, targets[:, None], False)
    return logits.masked_fill(left_out, -1e30)  # exp of it is 0. With -inf, 0 x inf would be NaN.


def truncation(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The smallest logit that is sampled from: logits (C, V), divided by the temperature -> (C,).

    S = {v: z_v >= limit} by min-p, then top-k, then nucleus sampling (top-p) among the tokens that are left. Ties at
    the limit are in S. The last limit is found by halving an interval of logits 24 times: faster than sorting. It ends
    60 below the largest logit: tokens below that, such as those that a model masks, are too unlikely to matter.
    """
    largest = logits.amax(-1)
    limit = largest + math.log(min_p) if min_p > 0 else logits.amin(-1)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.topk(top_k, sorted=False).values  # (C, k)
        limit = torch.maximum(limit, logits.amin(-1))
    if top_p < 1:
        weight = (logits - largest[:, None]).exp().masked_fill(logits < limit[:, None], 0.0)
        wanted = top_p * weight.sum(-1)
        low, high = torch.maximum(limit, largest - 60), torch.nextafter(largest, largest + 1)
        # From `low` up there is enough weight, from `high` up too little.
        for _ in range(24):
            middle = (low + high) / 2
            enough = (weight * (logits >= middle[:, None])).sum(-1) >= wanted
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        limit = low
    return limit
