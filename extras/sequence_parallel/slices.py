"""Ulysses: N ranks compute one packed row, and each has a slice of its tokens (Jacobs et al. 2023, arXiv 2309.14509).

All of a layer except for its attention works token by token. Before the attention the ranks exchange what they have.
Each gets the queries, keys and values of all tokens for an Nth of the heads. The kernels of rl/model/attention.py
compute with these as with whole rows. Then the results go back to the ranks that have the tokens.

Each rank has n tokens. The row has fewer than n * N, so the last slices end in padding, which no token attends to. The
head of the model runs on the wanted tokens of a rank's own slice, and all ranks get the results for all wanted tokens.
So they compute the same loss, and each takes its gradient for its own tokens. FSDP2 adds up what these are for the
weights, so the loss needs no factor.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rl.model.attention import Packing
from rl.model.family import Pass


class SlicedPacking(NamedTuple):
    """What the attention is told in the place of `Packing`."""

    whole: Packing  # of the row that the ranks share
    tokens: Tensor  # (T,) of that row. Only its length counts: compiled code would be made anew for each int.
    group: dist.ProcessGroup  # of these ranks


def slice_tokens(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a model run on slices of its packed rows, which the ranks of a group share."""
    kernel, name = ALL_ATTENTION_FUNCTIONS[model.packed.attention], f"sliced_{model.packed.attention}"
    AttentionInterface.register(name, over_slices(kernel))
    model.packed = replace(model.packed, attention=name, slices=functools.partial(cut, group=group))


def cut(passes: list[Pass], places: Tensor, head: Callable, *, group: dist.ProcessGroup) -> tuple:
    """Cut a pass over one packed row, in which R tokens are wanted.

    Args: passes, that one; places (R,), of the wanted tokens in the row; head, whose tensor arguments have R entries.
    Returns: the pass over this rank's slice, the places in it of the wanted tokens that are there, and a head. It runs
    `head` on these tokens, and gives on all ranks what `head` gives for all R.
    """
    [whole], rank, size = passes, dist.get_rank(group), dist.get_world_size(group)
    tokens = whole.inputs["input_ids"][0]
    # There always is padding, and n is never 1. Compiled code would be made anew for a row without padding, or for 1.
    n = max(2, len(tokens) // size + 1)

    def own(x: Tensor, fill: int) -> Tensor:
        """(T, ...) -> (n, ...)"""
        x = x[rank * n : (rank + 1) * n]
        return torch.cat([x, x.new_full((n - len(x), *x.shape[1:]), fill)])

    def take(x: Tensor) -> Tensor:
        """As `Pass.take`, with the largest number of the type, which stands for "not known", for padding."""
        return own(whole.take(x), torch.iinfo(x.dtype).max)

    inputs = {name: own(whole.inputs[name][0], 0)[None] for name in ("input_ids", "position_ids")}
    inputs["packing"] = SlicedPacking(whole.inputs["packing"], tokens, group)
    here = places - rank * n
    mine = ((here >= 0) & (here < n)).nonzero()[:, 0]
    # A rank without wanted tokens runs the head too, so that the collectives match, and the results are dropped. A rank
    # runs it on at least two, since compiled code would be made anew for one.
    dropped = (0, max(0, 2 - len(mine)))
    computed = F.pad(mine, dropped)

    def sliced_head(module: nn.Module, hidden: Tensor, *args: Any) -> tuple[Tensor, ...]:
        parts = head(module, hidden, *(x[computed] if isinstance(x, Tensor) else x for x in args))
        return tuple(_OfAllSlices.apply(x, mine, len(places), group) for x in parts)

    return [whole._replace(inputs=inputs, take=take)], F.pad(here[mine], dropped), sliced_head


class _OfAllSlices(torch.autograd.Function):
    """x (r, ...), the entries `mine` of R -> (R, ...), those of all ranks of a group. All of them compute the same loss
    of it, so each takes the gradient of its own entries as it is.
    """

    @staticmethod
    def forward(ctx, x, mine, size, group):
        """Sums in which each entry is added to zeros."""
        ctx.save_for_backward(mine)
        ctx.shape = x.shape
        result = x.new_zeros(size, *x.shape[1:]).index_copy(0, mine, x[: len(mine)])
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx, gradient):
        """No collective. An entry that was dropped gets zero."""
        (mine,) = ctx.saved_tensors
        own = gradient.new_zeros(ctx.shape)
        own[: len(mine)] = gradient[mine]
        return own, None, None, None


def over_slices(kernel: Callable) -> Callable:
    """An attention function for slices, of one for whole packed rows."""

    @functools.wraps(kernel)
    def run(module, query, key, value, attention_mask, *, packing, **rest):
        """query (1, H, n, D), key and value (1, Hkv, n, D) -> (1, n, H, D)."""
        whole, T, group = packing.whole, len(packing.tokens), packing.group
        size, n = dist.get_world_size(group), query.shape[2]
        if key.shape[1] < size:  # every rank needs a head of keys. The gradients of its copies are added up.
            key, value = (x.repeat_interleave(size // key.shape[1], 1) for x in (key, value))
        by_rank = [x[0].unflatten(0, (size, -1)) for x in (query, key, value)]  # (size, heads of a rank, n, D)
        widths = [x[0].numel() for x in by_rank]
        received = _exchange(torch.cat([x.flatten(1) for x in by_rank], 1), group).split(widths, 1)
        q, k, v = (  # (1, heads of this rank, T, D)
            x.view(like.shape).transpose(0, 1).flatten(1, 2)[None, :, :T]
            for x, like in zip(received, by_rank, strict=True)
        )
        out, _ = kernel(module, q, k, v, attention_mask, packing=whole, **rest)  # (1, T, heads of this rank, D)
        out = F.pad(out[0], (0, 0, 0, 0, 0, size * n - T)).unflatten(0, (size, n))
        return _exchange(out, group).transpose(0, 1).flatten(1, 2)[None], None

    return run


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x (size, ...), a part for each rank of the group -> (size, ...), a part from each. Gradients go the same way."""
    sizes = [x[0].numel()] * len(x)
    return all_to_all_single_autograd(x.flatten(), sizes, sizes, group).view(x.shape)
