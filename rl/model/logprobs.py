"""Log-probabilities and entropies of sampled tokens. For every loss, packing and the shift by one are done here.

`token_logprobs` strips the padding of a (b, T) batch, runs the model once over one packed row of N real tokens, applies
the LM head in chunks to the positions that predict response tokens, and scatters the results back to (b, T). No caller
sees a packed tensor, and the model sees the prompt of a group once. Other heads use `run_on_responses` or `run_packed`.

Some models cannot run packed, because layers have an attention of their own, or carry a state from token to token in a
way that recurrent.py does not know. They run their own forward on padded rows, a sequence each. `load.choose_forward`
finds out which way is right.
"""

import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from rl.data.batching import Update, shared_prefix
from rl.data.images import FIRST
from rl.data.types import Batch, Sampling, places, take_rows
from rl.model import experts, recurrent, vision
from rl.model.attention import Packing, use_attention

FULL = Sampling()  # temperature 1, from the whole vocabulary
HEAD_CHUNK = 2048  # tokens whose (tokens, V) logits exist at a time: 2048 x 152k x 4 bytes = 1.2 GB in fp32
SIMILAR = 0.8  # a row shorter than this share of the longest one in its padded pass begins the next pass


@dataclass(frozen=True)
class Packed:
    """How a model runs on sequences: its attribute `packed`, from `add_packed_forward`."""

    forward: Callable  # inputs and a head -> what the head makes of the hidden states; known to FSDP2
    head_chunk: Callable  # the LM head on HEAD_CHUNK tokens, perhaps compiled
    attention: str  # name of the attention function for packed sequences
    device: torch.device  # where it computes
    on_host: bool = False  # whether its weights live in host memory all the same
    is_whole: bool = True  # whether every rank has all of the model on its device, see `sharding.backward`
    is_padded: bool = False  # whether each sequence has a row of its own, which the model's own attention computes
    own_head: bool = False  # whether the model's own forward makes the logits: more than a product with a weight
    mixers: tuple[nn.Module, ...] = ()  # its recurrent layers
    apart: recurrent.Apart = ""  # how these keep packed sequences apart, which then share nothing
    routers: tuple[tuple[int, nn.Module], ...] = ()  # of a mixture of experts, with the numbers of their layers
    replays: bool = False  # whether these use the experts that a batch names
    balance: float = 0.0  # the coefficient of their auxiliary loss, which evens out the load
    max_tokens: int = sys.maxsize  # of a micro-batch, which `check_engine` may not exceed either


def token_logprobs(
    model: nn.Module, batch: Batch, *, sampling: Sampling = FULL, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """log pi(token t | tokens before t) and the entropy of that distribution, for every token with response_mask 1.

        logp[i, t]    = z[y_t] - logsumexp_S(z),   z = logits at t-1 / temperature
        entropy[i, t] = logsumexp_S(z) - sum over v in S of softmax_S(z)_v z_v

    S is the set of tokens that `sampling` draws from, see `truncation`, and the sampled token; without top_k, top_p and
    min_p the whole vocabulary. So the policy is the distribution that the engine has sampled from.

    Args: model, a causal LM that went through `add_packed_forward`; batch (b, T); entropy_grad, whether gradients flow
    through the entropy. Returns: logp and entropy (b, T), float32 (float64 for a float64 model), zero where
    response_mask is zero. Source of S: DeepSeek-V3.2 (arXiv 2512.02556), "keep sampling mask".
    """
    return run_on_responses(model, batch, response_logprobs, sampling, entropy_grad)


def fixed_logprobs(model: nn.Module, batch: Batch, updates: Sequence[Update], *, sampling: Sampling = FULL) -> Tensor:
    """`token_logprobs` without gradients of all rows of a batch: (B, T) on the host. All ranks must enter."""
    return over_micro_batches(model, batch, updates, response_logprobs, sampling, False)[0]


def fixed_entropies(model: nn.Module, batch: Batch, updates: Sequence[Update], *, sampling: Sampling = FULL) -> Tensor:
    """As `fixed_logprobs`, the entropy of the distribution that every token was drawn from."""
    return over_micro_batches(model, batch, updates, response_logprobs, sampling, False)[1]


def fixed_collisions(model: nn.Module, batch: Batch, updates: Sequence[Update], *, sampling: Sampling = FULL) -> Tensor:
    """As `fixed_logprobs`, the chance that two draws of a token agree: the sum over all tokens v of pi(v)^2."""
    return over_micro_batches(model, batch, updates, response_collisions, sampling)[0]


@torch.no_grad()
def over_micro_batches(
    model: nn.Module, batch: Batch, updates: Sequence[Update], head: Callable, *args: Any
) -> list[Tensor]:
    """`run_on_responses` without gradients on each of this rank's micro-batches, which go to where the model computes.

    Returns: (B, T, ...) on the host, floats in the type of batch.rollout_logp. All ranks must enter.
    """
    results, like = [], batch.rollout_logp
    for rows in [rows for update in updates for rows in update.micro_batches] or [[]]:  # [[]]: nothing to learn from
        parts = run_on_responses(model, take_rows(batch, rows, model.packed.device), head, *args)
        if not results:
            dtypes = [like.dtype if x.is_floating_point() else x.dtype for x in parts]
            results = [torch.zeros(*like.shape, *x.shape[2:], dtype=y) for x, y in zip(parts, dtypes, strict=True)]
        for result, part in zip(results, parts, strict=True) if rows else ():
            result[places(batch, rows), : part.shape[1]] = part.cpu().to(result.dtype)
    return results


def run_on_responses(model: nn.Module, batch: Batch, head: Callable, *args: Any) -> tuple[Tensor, ...]:
    """One pass over a batch (b, T), with a head on the R positions that predict a token with response_mask 1.

    `head` takes the model, the hidden states (R, H) of the tokens right before those R, their ids (R,), and `args`, and
    returns tensors (R, ...). Returns: these as (b, T, ...), zero where response_mask is zero.
    """
    scored = sampled_positions(batch)
    before = scored.roll(-1, 1)  # the hidden state that predicts token t sits at t - 1
    targets = batch.input_ids[scored]
    targets = targets.where(targets < FIRST, 0)  # where a row of no weight begins with an image
    outputs = run_packed(model, batch, before, head, targets, *args)
    return tuple(_to_grid(x, scored, batch.response_mask) for x in outputs)


def sampled_positions(batch: Batch) -> Tensor:
    """Which tokens of a batch `run_on_responses` hands to a head: (b, T) bool, those with response_mask 1."""
    b, T = batch.input_ids.shape
    shapes = tuple(batch.response_mask.shape), tuple(batch.lengths.shape)
    assert shapes == ((b, T), (b,)), f"input_ids {(b, T)}, response_mask {shapes[0]}, lengths {shapes[1]}"
    position = torch.arange(T, device=batch.input_ids.device)
    scored = (batch.response_mask > 0) & (position < batch.lengths[:, None]) & (position > 0)  # before 0 there is none
    scored[0, 1] |= ~scored.any()  # an empty row still runs the head, with weight zero, so that collectives match
    return scored


def _to_grid(x: Tensor, scored: Tensor, mask: Tensor) -> Tensor:
    """x (R, ...), one entry for each scored token -> (b, T, ...), zero where the mask (b, T) is."""
    here, mask = (y.view(*y.shape, *[1] * (x.ndim - 1)) for y in (scored, mask))
    return x.new_zeros(*scored.shape, *x.shape[1:]).masked_scatter(here, x) * mask.to(x.dtype)


def run_packed(model: nn.Module, batch: Batch, wanted: Tensor, head: Callable, *args: Any) -> Any:
    """`head(model, hidden, *args)` after one pass over a batch (b, T), for hidden states (R, H) of the `wanted` tokens
    (b, T) bool, row after row. FSDP2 holds the root's weights gathered for the head.

    What neighbouring rows have in common at their start, such as the prompt of a group, is computed once (unless the
    model runs padded or has recurrent layers): under a causal mask its hidden states do not depend on what follows.
    """
    if vision.sees(model):
        batch, rows = vision.with_image(batch), len(wanted)
        wanted = F.pad(wanted, (0, batch.input_ids.shape[1] - wanted.shape[1], 0, len(batch.lengths) - rows))
    inputs, place = _pad(batch, model) if model.packed.is_padded else _pack(batch, model)
    recurrent.separate(model.packed.mixers, model.packed.apart, inputs[0].get("packing"))
    routed = [x.pop("routed_experts", None) for x in inputs]  # all in one pass, or none
    experts.replay(model.packed.routers, routed[0] if model.packed.replays else None)
    experts.balance(model.packed.routers, model.packed.balance, batch.share, inputs[0])
    # FSDP2 would round every float tensor among the arguments to the compute precision, such as a teacher's log-probs.
    out = model.packed.forward(lambda module, hidden: head(module, hidden, *args), inputs, place[wanted])
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 keeps the gathered weights of some for a backward pass, which will not come
    return out


def _pack(batch: Batch, model: nn.Module) -> tuple[list[dict[str, Any]], Tensor]:
    """The decoder's arguments for a batch (b, T) in one packed row, and the place (b, T) of every token in it."""
    b, T = batch.input_ids.shape
    # Example: rows p q a and p q b c, which share p q, become the packed row p q a b c. Their tokens have the places
    # 0 1 2 and 0 1 3 4; borders are 0 3 5, of the tokens that a row has to itself, and 0 3 7, of all it attends to.
    row, position = (torch.arange(n, device=batch.input_ids.device) for n in (b, T))
    real = position < batch.lengths[:, None]  # (b, T)
    shared = shared_prefix(batch) * (model.packed.apart == "")  # a recurrent layer shares nothing
    own = real & (position >= shared[:, None])  # (b, T) computed for this row, the others for one above
    place = own.flatten().cumsum(0).view(b, T) - 1  # (b, T) in the packed row, of each row's own tokens
    owner = torch.where(own, row[:, None], 0).cummax(0).values  # (b, T) the nearest row, from here up, that has its own
    place = place.gather(0, owner)  # of all tokens
    borders, key_borders = (F.pad(n.cumsum(0), (1, 0)).to(torch.int32) for n in (own.sum(1), batch.lengths))
    packing = Packing(borders, key_borders, place[real], position[: batch.lengths.max()])
    ids, positions = batch.input_ids[own][None], position.expand(b, T)[own][None]
    inputs = dict(input_ids=ids, position_ids=positions, packing=packing)
    if vision.sees(model):
        positions = vision.positions_of(model, batch.input_ids, real)  # (b, T) or (3, b, T)
        inputs |= vision.inputs_of(model, ids) | dict(position_ids=positions[..., own].unsqueeze(-2))
    return [inputs if batch.routed_experts is None else inputs | dict(routed_experts=batch.routed_experts[own])], place


def _pad(batch: Batch, model: nn.Module) -> tuple[list[dict[str, Any]], Tensor]:
    """The decoder's arguments for passes over padded rows of a batch (b, T), those of similar length in one pass, and
    the place (b, T) of every token among those of all passes, one after the other.
    """
    ids, groups, routed = batch.input_ids, [], batch.routed_experts if model.packed.replays else None
    sees = vision.sees(model)
    one_pass = routed is not None or model.packed.balance or sees  # which routers remember
    similar = 0.0 if one_pass else SIMILAR
    for row, length in sorted(enumerate(batch.lengths.tolist()), key=lambda pair: -pair[1]):
        if not groups or length < similar * batch.lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    inputs, place, start = [], torch.zeros_like(ids), 0
    for rows in groups:
        width = int(batch.lengths[rows[0]])
        place[rows, :width] = start + torch.arange(len(rows) * width, device=ids.device).view(len(rows), width)
        real = torch.arange(width, device=ids.device) < batch.lengths[rows][:, None]
        inputs.append(dict(input_ids=ids[rows, :width], attention_mask=real.long()))
        if sees:
            inputs[-1] |= vision.inputs_of(model, ids[rows, :width])
            inputs[-1]["position_ids"] = vision.positions_of(model, ids[rows, :width], real)
        if routed is not None:
            inputs[-1]["routed_experts"] = routed[rows, :width].flatten(0, 1)
        start += len(rows) * width
    if not model.packed.is_whole:  # every pass is a collective of all ranks; one without work runs a single token
        most = torch.tensor(len(inputs), device=ids.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=dist.group.WORLD)
        one = dict(input_ids=ids[:1, :1], attention_mask=torch.ones_like(ids[:1, :1]))
        inputs += itertools.repeat(one, int(most) - len(inputs))
    return inputs, place


def add_packed_forward(
    model: nn.Module, *, compile: bool = False, keep_logits: bool = False, **fields: Any
) -> nn.Module:
    """Give a Hugging Face model its attribute `packed`, whose forward FSDP2 knows as a second forward of the model.

    `sharding.shard` calls it once more, since FSDP2 must learn of the forward. Args: compile, whether the LM head runs
    compiled; keep_logits, whether the backward pass finds the logits (2 V bytes a token in bfloat16) or computes them
    again; fields of `Packed`, the device by default that of the model.
    """
    config = model.config.get_text_config()
    attention = model.packed.attention if hasattr(model, "packed") else config._attn_implementation
    chunk = torch.compile(_head_chunk, dynamic=True) if compile else _head_chunk
    chunk = chunk if keep_logits else functools.partial(checkpoint, chunk, use_reentrant=False)
    model.packed = types.MethodType(_forward, model)
    register_fsdp_forward_method(model, "packed")  # no-op on a model that is not sharded
    own = dict(routers=experts.add_routers(model), mixers=recurrent.add_mixers(model))
    fields = dict(device=next(model.parameters()).device) | own | fields
    model.packed = Packed(model.packed, chunk, attention, **fields)
    return model


def use_forward(model: nn.Module, *, is_padded: bool, own_head: bool, apart: recurrent.Apart = "") -> None:
    """Say how a model runs from now on; see `Packed`."""
    model.packed = replace(model.packed, is_padded=is_padded, own_head=own_head, apart=apart)
    recurrent.separate(model.packed.mixers, "", None)  # until the next pass, for the model's own forward
    use_attention(model, model.get_correct_attn_implementation(None) if is_padded else model.packed.attention)


def _forward(self, head, inputs, wanted):
    """What `head` makes of the hidden states (R, H) at the places `wanted` (R,) of all tokens in `inputs`."""
    hidden = [self.base_model(**x, use_cache=False).last_hidden_state.flatten(0, 1) for x in inputs]
    hidden = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
    return head(self, hidden[wanted])


class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):
    """What a decoder returns; any field but hidden states is None."""

    def __getattr__(self, name):
        return None


def _own_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """hidden (C, H) -> logits (C, V) by the model's own forward, which may scale, cap, or add a bias. For this one call
    the decoder returns `hidden`.
    """
    decoder, result = model.base_model, _HiddenStates(last_hidden_state=hidden[None])
    decoder.forward = lambda *args, **kwargs: result
    try:
        return type(model).forward(model, inputs_embeds=hidden[None], use_cache=False).logits[0]
    finally:
        del decoder.forward


def in_chunks(head: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What a head gives for tensors (R, ...), computed on at most HEAD_CHUNK rows at a time, since logits are large."""
    count = math.ceil(len(tensors[0]) / HEAD_CHUNK)  # of equal size: a chunk of one token would be compiled for itself
    found = [head(*parts) for parts in zip(*(x.tensor_split(count) for x in tensors), strict=True)]
    return tuple(torch.cat(x) for x in zip(*found, strict=True))


def response_logprobs(
    model: nn.Module, hidden: Tensor, targets: Tensor, sampling: Sampling, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """The head of `token_logprobs`: hidden (R, H), targets (R,) -> log-probs (R,) and entropies (R,)."""
    if model.packed.own_head:
        source, head_chunk = model, functools.partial(checkpoint, _head_chunk, use_reentrant=False)
    else:
        source, head_chunk = model.get_output_embeddings().weight, model.packed.head_chunk
    kept = (sampling.top_k, sampling.top_p, sampling.min_p) if sampling.is_truncated else None
    return in_chunks(lambda h, y: head_chunk(source, h, y, sampling.temperature, kept, entropy_grad), hidden, targets)


def logits_of(source: nn.Module | Tensor, hidden: Tensor, temperature: float) -> Tensor:
    """hidden (C, H) -> logits (C, V) over the temperature, in at least float32, by a model or its head's weight."""
    if not isinstance(source, Tensor) and not source.packed.own_head:
        source = source.get_output_embeddings().weight
    logits = F.linear(hidden, source) if isinstance(source, Tensor) else _own_logits(source, hidden)
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature


def response_collisions(model: nn.Module, hidden: Tensor, targets: Tensor, sampling: Sampling) -> tuple[Tensor]:
    """The head of `fixed_collisions`: hidden (R, H), targets (R,), not used -> (R,)."""

    def collisions(h: Tensor) -> tuple[Tensor]:
        logits = truncated(logits_of(model, h, sampling.temperature), sampling)
        return (logits.softmax(-1).square().sum(-1),)

    return in_chunks(collisions, hidden)


def _head_chunk(source, hidden, targets, temperature, kept, entropy_grad):
    """hidden (C, H), targets (C,) -> logp (C,), entropy (C,), in at least float32. For `source` see `logits_of`."""
    logits = logits_of(source, hidden, temperature)
    sampled = logits.gather(-1, targets[:, None])[:, 0]
    if kept is not None:
        left_out = logits.detach() < truncation(logits.detach(), *kept)[:, None]
        left_out = left_out.scatter(-1, targets[:, None], False)  # a sampled token is in S, whatever rounding says
        logits = logits.masked_fill(left_out, -1e30)  # exp of it is 0; with -inf, 0 x inf would be NaN
    log_z = logits.logsumexp(-1)
    logp = sampled - log_z
    if not entropy_grad:
        logits, log_z = logits.detach(), log_z.detach()
    logps = logits - log_z[:, None]  # log_z - sum of p * logits would lose digits to logits far from 0
    return logp, -(logps.exp() * logps).sum(-1)


def truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits (C, V), divided by the temperature, with -inf for tokens that `sampling` leaves out: see `truncation`."""
    if not sampling.is_truncated:
        return logits
    limit = truncation(logits, sampling.top_k, sampling.top_p, sampling.min_p)
    return logits.masked_fill(logits < limit[:, None], -torch.inf)


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
