"""Attention over packed sequences, plugged into unmodified Hugging Face models.

Sequences are concatenated into one row of N tokens; `cu_seq_lens_q` (b + 1,) int32 holds their borders. Hugging Face
passes both arguments through to the attention function. Two implementations, each causal within a sequence and blind
across them:

    packed_sdpa    any device: pads inside the attention only, then scaled_dot_product_attention
    packed_varlen  CUDA: torch.nn.attention.varlen, no padding at all

`flash_attention_2` of transformers understands the same arguments and is used where flash-attn is installed.
"""

import inspect

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available


def packed_sdpa(
    module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q, scaling=None, sliding_window=None, **rest
):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D). Right padding is exact under a causal mask."""
    _refuse_short_window(sliding_window, max_length_q)
    _refuse_options(rest)
    offset = torch.arange(max_length_q, device=query.device)  # (L,)
    valid = offset < cu_seq_lens_q.diff()[:, None]  # (b, L)
    index = (cu_seq_lens_q[:-1, None] + offset).where(valid, 0).long()  # (b, L) positions in the packed row
    q, k, v = (x[0][:, index].transpose(0, 1) for x in (query, key, value))  # (b, heads, L, D)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)[valid][None], None  # row-major (b, L) order is packed order


def packed_varlen(
    module, query, key, value, attention_mask, *, cu_seq_lens_q, max_length_q, scaling=None, sliding_window=None, **rest
):
    """query (1, H, N, D), key and value (1, Hkv, N, D) -> (1, N, H, D), with torch's own variable-length kernel (CUDA
    only).
    """
    from torch.nn.attention.varlen import varlen_attn

    _refuse_short_window(sliding_window, max_length_q)
    _refuse_options(rest)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (N, heads, D)
    grouped = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )  # torch 2.13; 2.11 just works
    out = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, window_size=(-1, 0), scale=scaling, **grouped
    )
    return out[None], None


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
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "packed_sdpa"
    return "flash_attention_2" if is_flash_attn_2_available() else "packed_varlen"
