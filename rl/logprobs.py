"""Log-probabilities and entropies of sampled tokens. Packing and the shift by one live here and nowhere else.

`token_logprobs` strips the padding of a (b, T) batch, runs the model once over one packed row of N real tokens, applies
the LM head to the positions that predict response tokens only, in chunks, and scatters the results back to (b, T). No
caller ever sees a packed tensor; no model ever sees a padded one, nor the prompt of a group more than once. Other heads
share `run_on_responses`, or `run_packed` if they read other positions.
"""

import functools
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from rl.attention import Packing
from rl.batching import Update, shared_prefix
from rl.types import Batch, places, select

HEAD_CHUNK = 2048  # tokens whose (tokens, V) logits exist at a time: 2048 x 152k x 4 bytes = 1.2 GB in fp32


@dataclass(frozen=True)
class Packed:
    """How a model runs on packed sequences: what `add_packed_forward` adds to it, as its attribute `packed`."""

    forward: Callable  # packed ids and a head -> what the head makes of the hidden states; known to FSDP2
    head_chunk: Callable  # the LM head on HEAD_CHUNK tokens, perhaps compiled
    longest: float  # tokens up to which the rotary embedding of a sequence does not depend on others packed with it
    is_whole: bool  # whether every rank has all of the model, see `sharding.last_micro_batch`


def token_logprobs(
    model: nn.Module, batch: Batch, *, temperature: float = 1.0, entropy_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(token t | tokens before t) and the entropy of that distribution, for every token with response_mask 1.

        logp[i, t]    = z[y_t] - logsumexp(z),   z = logits at t-1 / temperature
        entropy[i, t] = logsumexp(z) - sum_v softmax(z)_v z_v

    Args: model, a causal LM prepared by `add_response_logprobs`; batch (b, T); temperature > 0, the one the rollout
    used; entropy_grad, whether gradients flow through the entropy (for an entropy bonus). Returns: logp (b, T) and
    entropy (b, T), float32 (float64 for a float64 model), zero where response_mask is zero.
    """
    return run_on_responses(model, batch, response_logprobs, temperature, entropy_grad)


def fixed_logprobs(model: nn.Module, batch: Batch, updates: Sequence[Update], *, temperature: float) -> torch.Tensor:
    """`token_logprobs` without gradients of all rows of a batch: (B, T) on the host. All ranks must enter."""
    return over_micro_batches(
        model, batch, updates, lambda micro: token_logprobs(model, micro, temperature=temperature)[0]
    )


@torch.no_grad()
def over_micro_batches(
    model: nn.Module, batch: Batch, updates: Sequence[Update], per_token: Callable[[Batch], torch.Tensor]
) -> torch.Tensor:
    """What `per_token`, from (b, T') to (b, T'), gives for each of this rank's micro-batches, without gradients.

    Micro-batches go to the device of the model. Returns: (B, T) of the type of batch.rollout_logp, on the host.
    """
    device, result = next(model.parameters()).device, torch.zeros_like(batch.rollout_logp)
    for rows in (rows for update in updates for rows in update.micro_batches):
        part = per_token(select(batch, rows, device))
        if rows:
            result[places(batch, rows), : part.shape[1]] = part.cpu().to(result.dtype)
    return result


def run_on_responses(model: nn.Module, batch: Batch, head: Callable, *args: Any) -> tuple[torch.Tensor, ...]:
    """One pass over a batch (b, T), with a head on the R positions that predict a token with response_mask 1.

    Args: model, as in `run_packed`; head, a function that takes the model, the hidden states (R, H) of the tokens right
    before those R, their ids (R,), and `args`, and returns tensors (R,). Returns: each of these as (b, T), where
    position t is about token t, zero where response_mask is zero.
    """
    b, T = batch.input_ids.shape
    assert batch.response_mask.shape == (b, T) and batch.lengths.shape == (b,), (
        f"input_ids {(b, T)}, response_mask {tuple(batch.response_mask.shape)}, lengths {tuple(batch.lengths.shape)}"
    )
    position = torch.arange(T, device=batch.input_ids.device)
    scored = (batch.response_mask > 0) & (position < batch.lengths[:, None]) & (position > 0)  # before 0 there is none
    scored[0, 1] |= ~scored.any()  # an empty row still runs the head, with weight zero, so that collectives match
    before = scored.roll(-1, 1)  # the hidden state that predicts token t sits at t - 1
    outputs = run_packed(model, batch, before, head, batch.input_ids[scored], *args)
    grids = (torch.zeros(b, T, dtype=x.dtype, device=x.device).masked_scatter(scored, x) for x in outputs)
    return tuple(grid * batch.response_mask.to(grid.dtype) for grid in grids)


def run_packed(model: nn.Module, batch: Batch, wanted: torch.Tensor, head: Callable, *args: Any) -> Any:
    """One pass over the tokens of a batch in one packed row, then `head(model, hidden, *args)`.

    What rows have in common at their start, such as the prompt of a group, is computed once for neighbours: under a
    causal mask its hidden states do not depend on what follows.

    Args: model, a Hugging Face model that went through `add_packed_forward`; batch (b, T); wanted (b, T) bool, the R
    tokens whose hidden states the head needs; head, a function that takes the model, these hidden states (R, H), row
    after row, and `args`. It runs while FSDP2 holds the root's weights gathered, those of the model's head among them.
    Returns: what `head` returns.
    """
    b, T = batch.input_ids.shape
    if model.packed.longest < T:
        raise ValueError(
            f"--model: {model.config.model_type} turns positions by another angle once a sequence has more than "
            f"{model.packed.longest} tokens, also for shorter ones packed with it, and here one has {T}; lower "
            "--max-prompt-length and --max-response-length (or --max-length), or choose another model"
        )
    # Example: rows p q a and p q b c, which share p q, become the packed row p q a b c. Their tokens have the places
    # 0 1 2 and 0 1 3 4; borders are 0 3 5, of the tokens that a row has to itself, and 0 3 7, of all it attends to.
    row, position = (torch.arange(n, device=batch.input_ids.device) for n in (b, T))
    real = position < batch.lengths[:, None]  # (b, T)
    own = real & (position >= shared_prefix(batch)[:, None])  # (b, T) computed for this row, the others for one above
    place = own.flatten().cumsum(0).view(b, T) - 1  # (b, T) in the packed row, of each row's own tokens
    owner = torch.where(own, row[:, None], 0).cummax(0).values  # (b, T) the nearest row, from here up, that has its own
    place = place.gather(0, owner)  # of all tokens
    borders, key_borders = (F.pad(n.cumsum(0), (1, 0)).to(torch.int32) for n in (own.sum(1), batch.lengths))
    packing = Packing(borders, key_borders, place[real], position[: batch.lengths.max()])
    ids, positions = batch.input_ids[own][None], position.expand(b, T)[own][None]
    out = model.packed.forward(head, ids, positions, packing, place[wanted], *args)
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # FSDP2 keeps the gathered weights of some for a backward pass, which will not come
    return out


def add_packed_forward(
    model: nn.Module, *, compile: bool = False, keep_logits: bool = False, is_whole: bool = True
) -> nn.Module:
    """Give a Hugging Face model its attribute `packed`, whose forward FSDP2 knows as a second forward of the model.

    `sharding.shard` calls it again: FSDP2 must learn of the forward, and a compiled head replaces the plain one.

    Args: compile, whether the LM head runs compiled; keep_logits, whether the backward pass finds the logits (2 V bytes
    a token in bfloat16) or computes them again; is_whole, whether every rank has all of the model. Raises ValueError
    for architectures that have more than plain attention.
    """
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if model._is_stateful or others or any(isinstance(module, nn.Conv1d) for module in model.modules()):
        raise ValueError(
            f"--model: {config.model_type} has layers that carry a state from token to token, across the borders of "
            f"packed sequences, or attend in chunks {sorted(others)}; choose a model that has plain attention only"
        )
    chunk = torch.compile(_head_chunk, dynamic=True) if compile else _head_chunk
    model.packed = types.MethodType(_packed_forward, model)
    register_fsdp_forward_method(model, "packed")  # no-op on a model that is not sharded
    model.packed = Packed(
        forward=model.packed,
        head_chunk=chunk if keep_logits else functools.partial(checkpoint, chunk, use_reentrant=False),
        longest=_longest_with_fixed_rotation(config),
        is_whole=is_whole,
    )
    return model


def _longest_with_fixed_rotation(config: PreTrainedConfig) -> float:
    """Tokens up to which the rotary embedding of a sequence does not depend on the longest one packed with it."""
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = (rope, *rope.values())  # one for all layers, or one for each type of layer
    kinds = {x.get("rope_type") for x in ropes if isinstance(x, dict)}
    if not kinds & {"dynamic", "longrope"}:
        return math.inf
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return original or config.max_position_embeddings


def add_response_logprobs(model: nn.Module) -> nn.Module:
    """Prepare a Hugging Face causal LM that is not sharded for `token_logprobs`.

    Raises ValueError for architectures that transform logits after the LM head.
    """
    config = model.config.get_text_config().to_dict()
    for name in ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        if config.get(name) not in (None, 1, 1.0):
            raise ValueError(f"--model: {model.config.model_type} scales its logits ({name}), which is not supported")
    if model.get_output_embeddings().bias is not None:
        raise ValueError(f"--model: the LM head of {model.config.model_type} has a bias, which is not supported")
    return add_packed_forward(model)


def _packed_forward(self, head, input_ids, position_ids, packing, wanted, *args):
    """Packed ids (1, N) -> what `head` makes of the hidden states (R, H) at the positions `wanted` (R,)."""
    hidden = self.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, packing=packing
    ).last_hidden_state[0]
    return head(self, hidden[wanted], *args)


def response_logprobs(
    model: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of `token_logprobs`: hidden (R, H), targets (R,) -> log-probs (R,) and entropies (R,)."""
    weight, head_chunk = model.get_output_embeddings().weight, model.packed.head_chunk
    logps, entropies = [], []
    chunks = math.ceil(len(targets) / HEAD_CHUNK)  # of equal size: one of a single token would be compiled for itself
    for h, y in zip(hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True):
        logp, entropy = head_chunk(weight, h, y, temperature, entropy_grad)  # one chunk of logits at a time
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def _head_chunk(weight, hidden, targets, temperature, entropy_grad):
    """hidden (C, H), targets (C,) -> logp (C,), entropy (C,), computed in at least float32."""
    logits = nn.functional.linear(hidden, weight)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature  # (C, V)
    log_z = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None])[:, 0] - log_z
    if not entropy_grad:
        logits, log_z = logits.detach(), log_z.detach()
    entropy = log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)
    return logp, entropy
