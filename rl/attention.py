"""Attention over packed sequences, plugged into unmodified Hugging Face models.

Sequences are concatenated into one row of N tokens; `cu_seq_lens_q` (b + 1,) int32 holds their borders. Hugging Face
passes both arguments through to the attention function. Two implementations, each causal within a sequence and blind
across them:

    packed_sdpa    any device: pads inside the attention only, then scaled_dot_product_attention
    packed_varlen  CUDA: torch.nn.attention.varlen, no padding at all
    packed_fa2     CUDA: the same by flash-attn, a little faster, where it is installed
"""

import inspect

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

if is_flash_attn_2_available():
    from flash_attn import flash_attn_varlen_func

# torch 2.13 wants to be told that several query heads share a key head; 2.11 just works.
GROUPED_HEADS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_sdpa(
    module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q, scaling=None, sliding_window=None, **rest
):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D). Right padding is exact under a causal mask."""
    _refuse_short_window(sliding_window, max_length_q)
    _refuse_options(rest)
    borders = cu_seq_lens_q.long()
    offset = torch.arange(max_length_q, device=query.device)  # (L,)
    valid = offset < borders.diff()[:, None]  # (b, L)
    index = (borders[:-1, None] + offset).where(valid, 0)  # (b, L) positions in the packed row
    q, k, v = (x[0][:, index].transpose(0, 1) for x in (query, key, value))  # (b, heads, L, D)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    position = torch.arange(query.shape[2], device=query.device)  # (N,)
    row = torch.searchsorted(borders[1:], position, right=True)
    return out.transpose(1, 2)[row, position - borders[row]][None], None


def packed_varlen(
    module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q, scaling=None, sliding_window=None, **rest
):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D), with torch's own variable-length kernel (CUDA
    only).
    """
    _refuse_short_window(sliding_window, max_length_q)
    _refuse_options(rest)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return varlen_attn(q, k, v, *lengths, window_size=(-1, 0), scale=scaling, **GROUPED_HEADS)[None], None


def packed_fa2(
    module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q, scaling=None, sliding_window=None, **rest
):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D), with flash-attn."""
    _refuse_short_window(sliding_window, max_length_q)
    _refuse_options(rest)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return flash_attn_varlen_func(q, k, v, *lengths, causal=True, softmax_scale=scaling)[None], None


def _refuse_short_window(sliding_window, max_length: int) -> None:
    if sliding_window is not None and sliding_window < max_length:
        raise ValueError(
            f"sliding-window attention ({sliding_window}) below the sequence length ({max_length}) is not supported"
        )


def _refuse_options(options: dict) -> None:
    for name in ("softcap", "s_aux"):  # Gemma 2's capped scores, gpt-oss' sinks: dropping them would change the numbers
        if options.get(name) is not None:
            raise ValueError(f"--model: its attention uses {name}, which packed attention does not compute")


def choose_attention(device: torch.device, dtype: torch.dtype) -> str:
    """The attention implementation for packed sequences on this device: a name transformers accepts."""
    AttentionInterface.register("packed_sdpa", packed_sdpa)
    AttentionInterface.register("packed_varlen", packed_varlen)
    AttentionInterface.register("packed_fa2", packed_fa2)
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "packed_sdpa"
    return "packed_fa2" if is_flash_attn_2_available() else "packed_varlen"
