"""Attention over packed sequences, plugged into unmodified Hugging Face models.

The model runs over one row of N tokens. `Packing` says which of them every sequence consists of. Hugging Face passes it
through to the attention function. Three implementations, each causal within a sequence and blind across sequences:

    packed_sdpa    any device: pads inside the attention only, then scaled_dot_product_attention
    packed_varlen  CUDA: torch.nn.attention.varlen, no padding at all
    packed_fa2     CUDA: the same by flash-attn, where it is installed

Sliding windows are those of the layer. A model with another attention, such as one with capped scores or sinks, is
refused here, and then runs padded (`self_test.choose_forward`).

The tokens that a sequence shares with the one before it stand in the packed row once. Only its other tokens, the last
ones, are queries, but they see the keys and values of all. The kernel aligns the last query with the last key.
"""

from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

if is_flash_attn_2_available():
    from flash_attn import flash_attn_varlen_func

# torch 2.13 wants to be told that several query heads share a key head. 2.11 just works.
GROUPED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class Packing(NamedTuple):
    """Where b sequences stand in a packed row. Together they have N' tokens. The row has N <= N' tokens, since tokens
    that a sequence shares with the one before it stand in the row once.

    Of sequence i, the tokens that it does not share stand in the row from borders[i] to borders[i + 1], and the places
    of all its tokens stand in key_index from key_borders[i] to key_borders[i + 1].
    """

    borders: Tensor  # (b + 1,) int32
    key_borders: Tensor  # (b + 1,) int32
    key_index: Tensor  # (N',) int64, position in the packed row of every token of every sequence
    offset: Tensor  # (L,) int64, 0 ... L - 1, L tokens being the longest sequence


def packed_sdpa(module, query, key, value, attention_mask, *, packing, scaling=None, sliding_window=None, **rest):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D). Right padding is exact under a causal mask."""
    refuse_options(rest)
    borders, key_borders, offset = packing.borders.long(), packing.key_borders.long(), packing.offset
    valid = offset < key_borders.diff()[:, None]  # (b, L)
    index = packing.key_index[(key_borders[:-1, None] + offset).where(valid, 0)]  # (b, L) positions in the packed row
    q, k, v = (x[0][:, index].transpose(0, 1) for x in (query, key, value))  # (b, heads, L, D)
    mask = None
    if sliding_window is not None and sliding_window < len(offset):
        back = offset[:, None] - offset  # (L, L) from query to key
        mask = (back >= 0) & (back < sliding_window)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
    position = torch.arange(query.shape[2], device=query.device)  # (N,)
    row = torch.searchsorted(borders[1:], position, right=True)
    place = key_borders.diff()[row] - (borders[row + 1] - position)  # in its sequence, counted from the end
    return out.transpose(1, 2)[row, place][None], None


def packed_varlen(module, query, key, value, attention_mask, *, packing, scaling=None, sliding_window=None, **rest):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D)."""
    inputs, window = _for_kernel(query, key, value, packing, sliding_window, rest)
    out = varlen_attn(*inputs, window_size=window, scale=scaling, **GROUPED_HEADS)
    return out[None], None  # pyrefly: ignore[bad-index]  # a pair only with return_aux


def packed_fa2(module, query, key, value, attention_mask, *, packing, scaling=None, sliding_window=None, **rest):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D). FlashAttention-2, arXiv 2307.08691."""
    inputs, window = _for_kernel(query, key, value, packing, sliding_window, rest)
    return flash_attn_varlen_func(*inputs, causal=True, window_size=window, softmax_scale=scaling)[None], None


def _for_kernel(query, key, value, packing, sliding_window, rest) -> tuple[tuple, tuple[int, int]]:
    """The positional arguments of a varlen kernel, and its window. Raises ValueError as `refuse_options`."""
    refuse_options(rest)
    q, k, v = query[0].transpose(0, 1), _expand(key, packing), _expand(value, packing)  # (N or N', heads, D)
    lengths = (packing.borders, packing.key_borders, len(packing.offset), len(packing.offset))
    # How many keys before and after the query's may be attended to. -1 means all.
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    return (q, k, v, *lengths), window


def _expand(x: Tensor, packing: Packing) -> Tensor:
    """Keys or values (1, Hkv, N, D) -> (N', Hkv, D), sequence by sequence. Gradients are added up in float32."""
    return x[0].transpose(0, 1).float().index_select(0, packing.key_index).to(x.dtype)


def refuse_options(options: dict) -> None:
    """Raise ValueError if a layer gives its attention an option that packed attention does not compute."""
    # Gemma 2's capped scores, gpt-oss' sinks, chosen keys, and learned biases. Dropping them would change the numbers.
    for name in ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices"):
        if options.get(name) is not None:
            raise ValueError(f"its attention uses {name}, which packed attention does not compute")


def choose_attention(device: torch.device, dtype: torch.dtype) -> str:
    """The attention implementation for packed sequences on this device, by a name that transformers accepts."""
    for implementation in (packed_sdpa, packed_varlen, packed_fa2):
        AttentionInterface.register(implementation.__name__, implementation)
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "packed_sdpa"
    return "packed_fa2" if is_flash_attn_2_available() else "packed_varlen"


def use_attention(model: nn.Module, name: str) -> None:
    """Let a model of transformers compute its attention by the implementation `name` from now on: that of its text."""
    text = getattr(model.base_model, "language_model", None) or getattr(model.base_model, "text_model", model)
    for module in text.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = name
