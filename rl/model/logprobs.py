"""Log-probabilities and entropies of sampled tokens. For every loss, packing and the shift by one are done here.

`token_logprobs` strips the padding of a (b, T) batch, and runs the model once over one packed row of N real tokens. It
applies the LM head in chunks to the positions that predict response tokens, and scatters the results back to (b, T). No
caller sees a packed tensor. A prompt that neighboring rows of a micro-batch share is computed once. Models that cannot
run in this way use another layout, such as padded rows. Other heads use `run_on_responses` or `run_packed`. family.py
has what models other than dense decoders of text need besides.
"""

import functools
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from extras.families import families_of
from extras.truncation import truncation_of
from rl.data.batching import Update, shared_prefix
from rl.data.types import Batch, Sampling, places, take_rows
from rl.model.attention import Packing
from rl.model.family import Family, Pass

FULL = Sampling()  # temperature 1, from the whole vocabulary
HEAD_CHUNK = 2048  # tokens whose (tokens, V) logits exist at a time, which is 2048 x 152k x 4 bytes = 1.2 GB in fp32


@dataclass(frozen=True)
class Packed:
    """How a model runs on sequences. It is the model's attribute `packed`, from `add_packed_forward`."""

    attention: str  # name of the attention function for packed sequences
    device: torch.device  # where it computes
    families: tuple[Family, ...]
    head_chunk: Callable  # the LM head on HEAD_CHUNK tokens, perhaps compiled, from `head_on_chunk`
    is_whole: bool = True  # whether every rank has all of the model on its device, see `sharding.backward`
    way: str = "packed"  # how it runs, in words, see `self_test.choose_forward`
    layout: Callable | None = None  # used in the place of `pack`, with its arguments and results
    own_logits: Callable | None = None  # (model, hidden (C, H)) -> logits (C, V), if more than a product with a weight
    max_tokens: int = sys.maxsize  # of a micro-batch, which `check_engine` may not exceed either
    slices: Callable | None = None  # cuts a packed row into slices for several ranks, see extras/sequence_parallel


def token_logprobs(
    model: PreTrainedModel, batch: Batch, *, sampling: Sampling = FULL, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """log pi(token t | tokens before t) and the entropy of that distribution, for every token with response_mask 1.

        logp[i, t]    = z[y_t] - logsumexp_S(z),   z = logits at t-1 / temperature
        entropy[i, t] = logsumexp_S(z) - sum over v in S of softmax_S(z)_v z_v

    S is the set of tokens that `sampling` draws from, see extras/truncation, and the sampled token. Without top_k,
    top_p and min_p it is the whole vocabulary. So the policy is the distribution that the engine has sampled from.

    Args: model, a causal LM that went through `add_packed_forward`; batch (b, T); entropy_grad, whether gradients flow
    through the entropy. Returns: logp and entropy (b, T), float32 (float64 for a float64 model), zero where
    response_mask is zero. Source of S: DeepSeek-V3.2 (arXiv 2512.02556), "keep sampling mask".
    """
    # pyrefly: ignore[bad-return]  # there are as many tensors as the head gives
    return run_on_responses(model, batch, response_logprobs, sampling, entropy_grad)


def fixed_logprobs(model: nn.Module, batch: Batch, updates: Sequence[Update], *, sampling: Sampling = FULL) -> Tensor:
    """`token_logprobs` without gradients of all rows of a batch: (b, T) on the host. All ranks must enter."""
    return over_micro_batches(model, batch, updates, response_logprobs, sampling, False)[0]


@torch.no_grad()
def over_micro_batches(
    model: PreTrainedModel, batch: Batch, updates: Sequence[Update], head: Callable, *args: Any
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


def run_on_responses(model: PreTrainedModel, batch: Batch, head: Callable, *args: Any) -> tuple[Tensor, ...]:
    """One pass over a batch (b, T), with a head on the R positions that predict a token with response_mask 1.

    `head` takes the model, the hidden states (R, H) of the tokens right before those R, their ids (R,), and `args`, and
    returns tensors (R, ...). Returns: these as (b, T, ...), zero where response_mask is zero.
    """
    scored = sampled_positions(batch)
    before = scored.roll(-1, 1)  # the hidden state that predicts token t sits at t - 1
    # An id beyond the vocabulary, such as that of an image, is here only if no token is scored, with the weight zero.
    targets = batch.input_ids[scored].clamp(max=model.config.get_text_config().vocab_size - 1)
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


def run_packed(model: PreTrainedModel, batch: Batch, wanted: Tensor, head: Callable, *args: Any) -> Any:
    """`head(model, hidden, *args)` after one pass over a batch (b, T), for hidden states (R, H) of the `wanted` tokens
    (b, T) bool, row after row. FSDP2 holds the root's weights gathered for the head.

    What neighboring rows have in common at their start, such as the prompt of a group, is computed once, unless the
    model runs padded or has recurrent layers. This is right because under a causal mask its hidden states do not depend
    on what follows.

    Source: Krell et al. 2021, arXiv 2107.02027, for packing.
    """
    for family in model.packed.families:
        batch, wanted = family.widen(batch, wanted)
    passes, place = (model.packed.layout or pack)(batch, model)
    places = place[wanted]
    if model.packed.slices:
        passes, places, head = model.packed.slices(passes, places, head)
    for family in model.packed.families:
        family.begin(batch, passes)
    # `args` go in through a lambda. As arguments, FSDP2 would round their floats, such as a teacher's log-probs, to the
    # compute precision.
    inputs = [x.inputs for x in passes]
    out = model.packed_forward(lambda module, hidden: head(module, hidden, *args), inputs, places)
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 keeps the gathered weights of some for a backward pass, which will not come
    return out


def pack(batch: Batch, model: PreTrainedModel) -> tuple[list[Pass], Tensor]:
    """A pass over a batch (b, T) in one packed row, and the place (b, T) of every token in it."""
    b, T = batch.input_ids.shape
    # Example: rows p q a and p q b c, which share p q, become the packed row p q a b c. Their tokens have the places
    # 0 1 2 and 0 1 3 4. The borders of the tokens that a row has to itself are 0 3 5. Those of all that it attends to
    # are 0 3 7.
    row, position = (torch.arange(n, device=batch.input_ids.device) for n in (b, T))
    real = position < batch.lengths[:, None]  # (b, T)
    # Per row, the tokens that the row above has computed already, or 0 if a family of the model forbids that.
    shared = shared_prefix(batch) * all(x.shares_beginnings for x in model.packed.families)
    is_own = real & (position >= shared[:, None])  # (b, T) computed for this row, the others for one above
    place = is_own.flatten().cumsum(0).view(b, T) - 1  # (b, T) in the packed row, of each row's own tokens
    owner = torch.where(is_own, row[:, None], 0).cummax(0).values  # (b, T) row that computes it, this or one above
    place = place.gather(0, owner)  # of all tokens
    borders, key_borders = (F.pad(n.cumsum(0), (1, 0)).to(torch.int32) for n in (is_own.sum(1), batch.lengths))
    packing = Packing(borders, key_borders, place[real], position[: batch.lengths.max()])
    ids, positions = batch.input_ids[is_own][None], position.expand(b, T)[is_own][None]
    inputs = dict(input_ids=ids, position_ids=positions, packing=packing)
    return [Pass(inputs, lambda x: x[is_own], batch.input_ids, real)], place


def add_packed_forward(model: PreTrainedModel) -> PreTrainedModel:
    """Give a Hugging Face model its attribute `packed` and the method `packed_forward`. This takes inputs, a head and
    the wanted tokens, and returns what the head makes of their hidden states. FSDP2 learns of this second forward in
    `sharding.shard`.
    """
    attention, device = model.config.get_text_config()._attn_implementation, next(model.parameters()).device
    model.packed = Packed(attention, device, families_of(model), head_on_chunk())
    model.packed_forward = types.MethodType(_forward, model)
    return model


def head_on_chunk(*, compile: bool = False, keep_logits: bool = False) -> Callable:
    """The LM head for HEAD_CHUNK tokens. Args: compile, whether it runs compiled; keep_logits, whether the backward
    pass finds the logits (2 V bytes per token in bfloat16) or computes them again.
    """
    chunk = torch.compile(_head_chunk, dynamic=True) if compile else _head_chunk
    return chunk if keep_logits else functools.partial(checkpoint, chunk, use_reentrant=False)


def _forward(self, head, inputs, wanted):
    """What `head` makes of the hidden states (R, H) at the places `wanted` (R,) of all tokens in `inputs`."""
    hidden = [self.base_model(**x, use_cache=False).last_hidden_state.flatten(0, 1) for x in inputs]
    hidden = torch.cat(hidden) if len(hidden) > 1 else hidden[0]
    return head(self, hidden[wanted])


def in_chunks(head: Callable, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What a head gives for tensors (R, ...), computed on at most HEAD_CHUNK rows at a time, since logits are large."""
    # Chunks have about equal sizes, since one of a single token would be compiled for itself.
    count = math.ceil(len(tensors[0]) / HEAD_CHUNK)
    results = [head(*parts) for parts in zip(*(x.tensor_split(count) for x in tensors), strict=True)]
    return tuple(torch.cat(x) for x in zip(*results, strict=True))


def response_logprobs(
    model: PreTrainedModel, hidden: Tensor, targets: Tensor, sampling: Sampling, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """The head of `token_logprobs`: hidden (R, H), targets (R,) -> log-probs (R,) and entropies (R,)."""
    source = source_of_logits(model)
    head_chunk = model.packed.head_chunk if isinstance(source, Tensor) else head_on_chunk()
    way = sampling.temperature, truncation_of(sampling), entropy_grad
    # pyrefly: ignore[bad-return]  # as many tensors as the head gives
    return in_chunks(lambda h, y: head_chunk(source, h, y, *way), hidden, targets)


def source_of_logits(model: PreTrainedModel) -> PreTrainedModel | Tensor:
    """The weight of a model's head, or the model itself if its logits are more than a product with that."""
    return model if model.packed.own_logits else model.get_output_embeddings().weight


def logits_of(source: PreTrainedModel | Tensor, hidden: Tensor, temperature: float) -> Tensor:
    """hidden (C, H) -> logits (C, V) over the temperature, in at least float32. For `source` see `source_of_logits`."""
    logits = F.linear(hidden, source) if isinstance(source, Tensor) else source.packed.own_logits(source, hidden)
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature


def _head_chunk(source, hidden, targets, temperature, truncate, entropy_grad):
    """hidden (C, H), targets (C,) -> logp (C,), entropy (C,), in at least float32."""
    logits = logits_of(source, hidden, temperature)
    sampled = logits.gather(-1, targets[:, None])[:, 0]
    if truncate is not None:
        logits = truncate(logits, targets)
    log_z = logits.logsumexp(-1)
    logp = sampled - log_z
    if not entropy_grad:
        logits, log_z = logits.detach(), log_z.detach()
    logps = logits - log_z[:, None]  # log_z - sum of p * logits would lose digits to logits far from 0
    return logp, -(logps.exp() * logps).sum(-1)
