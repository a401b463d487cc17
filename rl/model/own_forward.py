"""The padded way to run a model, a sequence in each row, by its own forward.

It is for models that cannot run packed, because layers have an attention of their own, or carry a state from token to
token in a way that no family knows. `load.choose_forward` finds out which way is right.
"""

import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from rl.data.types import Batch
from rl.model.attention import use_attention
from rl.model.family import Pass

SIMILAR = 0.8  # a row shorter than this share of the longest one in its padded pass begins the next pass


def use_forward(model: nn.Module, *, is_padded: bool, own_head: bool, apart: str = "") -> None:
    """Say how a model runs from now on: padded or packed, by whose head, and how its recurrent layers are apart."""
    model.packed = replace(model.packed, layout=pad if is_padded else None, own_logits=own_logits if own_head else None)
    for x in model.packed.families:
        x.use(apart)
    use_attention(model, model.get_correct_attn_implementation(None) if is_padded else model.packed.attention)


def way_now(model: nn.Module) -> dict[str, Any]:
    """What `use_forward` was told."""
    apart = next((x.apart for x in model.packed.families if x.apart), "")
    return dict(is_padded=model.packed.layout is pad, own_head=model.packed.own_logits is not None, apart=apart)


def pad(batch: Batch, model: nn.Module) -> tuple[list[Pass], Tensor]:
    """Passes over padded rows of a batch (b, T), those of similar length in one pass, and the place (b, T) of every
    token among those of all passes, one after the other.
    """
    ids, groups = batch.input_ids, []
    similar = 0.0 if any(x.one_pass for x in model.packed.families) else SIMILAR
    for row, length in sorted(enumerate(batch.lengths.tolist()), key=lambda pair: -pair[1]):
        if not groups or length < similar * batch.lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    passes, place, start = [], torch.zeros_like(ids), 0
    for rows in groups:
        width = int(batch.lengths[rows[0]])
        place[rows, :width] = start + torch.arange(len(rows) * width, device=ids.device).view(len(rows), width)
        real = torch.arange(width, device=ids.device) < batch.lengths[rows][:, None]
        passes.append(_pass(ids[rows, :width], real, rows))
        start += len(rows) * width
    if not model.packed.is_whole:  # every pass is a collective of all ranks; one without work runs a single token
        most = torch.tensor(len(passes), device=ids.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=dist.group.WORLD)
        one = _pass(ids[:1, :1], torch.ones_like(ids[:1, :1], dtype=torch.bool), [0])
        passes += itertools.repeat(one, int(most) - len(passes))
    return passes, place


def _pass(ids: Tensor, real: Tensor, rows: list[int]) -> Pass:
    inputs: dict[str, Any] = dict(input_ids=ids, attention_mask=real.long())
    return Pass(inputs, lambda x: x[rows, : ids.shape[1]].flatten(0, 1), ids, real)


class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """What a decoder returns; any field but hidden states is None."""

    def __getattr__(self, name):
        return None


def own_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """hidden (C, H) -> logits (C, V) by the model's own forward, which may scale, cap, or add a bias. For this one call
    the decoder returns `hidden`.
    """
    decoder, result = model.base_model, _HiddenStates(last_hidden_state=hidden[None])
    decoder.forward = lambda *args, **kwargs: result
    try:
        return type(model).forward(model, inputs_embeds=hidden[None], use_cache=False).logits[0]
    finally:
        del decoder.forward
