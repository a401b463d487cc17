"""Tiny models of many families, and what transformers itself loads for them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from extras.families import ways
from extras.lora import adapters as lora
from rl.data.types import Batch
from rl.model import load as models
from rl.model.sharding import Memory
from rl.ranks import Ranks

SIZES = dict(
    vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
IDS = dict(vocab_size=80, bos_token_id=1, eos_token_id=2, pad_token_id=0)
ONE_KIND_OF_HEAD = {name: x for name, x in SIZES.items() if name != "num_key_value_heads"}
EXPERTS = dict(moe_intermediate_size=24, num_experts=6, num_local_experts=6, num_experts_per_tok=2)
DELTA = dict(
    head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
STATES = dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=16, mamba_expand=2)
PACKED, OWN_HEAD, BORDERS, BORDERS_OWN_HEAD, ROWS, ROWS_OWN_HEAD, PADDED = ways.WAYS

FAMILIES = {  # what is special -> config, its options, and the way that such a model runs
    "short windows": ("MistralConfig", SIZES | dict(sliding_window=8), PACKED),
    "windows in some layers": ("Gemma3TextConfig", SIZES | dict(head_dim=8, sliding_window=8), PACKED),
    "dropout of functions": ("SeedOssConfig", SIZES | dict(head_dim=8, residual_dropout=0.1), PACKED),
    "constants in its files": ("ApertusConfig", SIZES, PACKED),
    "other names in its files": ("GPTNeoXConfig", ONE_KIND_OF_HEAD, PACKED),
    "scaled logits": ("GraniteConfig", SIZES | dict(logits_scaling=8.0), OWN_HEAD),
    "scaled hidden states": (
        "MiniCPM3Config",
        ONE_KIND_OF_HEAD
        | dict(dim_model_base=8, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
        OWN_HEAD,
    ),
    "a head with a bias": ("PhiConfig", SIZES, OWN_HEAD),
    "experts": ("Qwen3MoeConfig", SIZES | EXPERTS | dict(head_dim=8), PACKED),
    "eight experts": (
        "Qwen3MoeConfig",
        SIZES | EXPERTS | dict(head_dim=8, num_experts=8, num_local_experts=8),
        PACKED,
    ),
    "experts of Mixtral": ("MixtralConfig", SIZES | EXPERTS, PACKED),
    "experts in groups": (
        "Glm4MoeConfig",
        SIZES
        | EXPERTS
        | dict(head_dim=8, n_routed_experts=6, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1),
        PACKED,
    ),
    "capped scores": ("Gemma2Config", SIZES | dict(head_dim=8, sliding_window=8), PADDED),
    "convolutions": ("Lfm2Config", SIZES | dict(layer_types=["conv", "full_attention"]), BORDERS),
    "delta nets": ("Qwen3_5TextConfig", SIZES | DELTA, ROWS),
    "delta nets and experts": (
        "Qwen3NextConfig",
        SIZES | DELTA | EXPERTS | dict(shared_expert_intermediate_size=9),
        ROWS,
    ),
    "delta nets of OLMo": ("OlmoHybridConfig", SIZES | DELTA, ROWS),
    "Mamba-2 of Granite": (
        "GraniteMoeHybridConfig",
        SIZES
        | STATES
        | dict(layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=48)
        | dict(logits_scaling=8.0),
        ROWS_OWN_HEAD,
    ),
    "Mamba-2 beside attention": ("FalconH1Config", SIZES | STATES | dict(head_dim=8, mamba_d_ssm=64), ROWS),
    "a state": (
        "MambaConfig",
        IDS | dict(hidden_size=32, num_hidden_layers=2, state_size=8, residual_in_fp32=False),
        ROWS,
    ),
    "distances instead of positions": ("BloomConfig", IDS | dict(hidden_size=32, n_layer=2, n_head=4), PADDED),
    "attention without options": ("StableLmConfig", SIZES, PADDED),
}
# One of each way to run, and what else is special; a test of every family has the others in `make thorough` only.
FEW = ("short windows", "constants in its files", "experts", "scaled logits", "capped scores", "convolutions")
FEW += ("delta nets", "Mamba-2 of Granite")
assert {FAMILIES[name][2] for name in FEW} == {way for _, _, way in FAMILIES.values()}


class Made(dict):
    """What `make` returns for a name, once it is asked for."""

    def __init__(self, make: Callable[[str], Any]):
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self.make(name)
        return self[name]


def save(name: str, folder: Path) -> str:
    """A random model of the family. Weights are livelier than at the start of a training: see `conftest.tiny_model`."""
    kind, options, _ = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.1 if parameter.ndim > 1 else 0.3) * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return str(folder)


def load(path: str, ranks: Ranks, **memory: object) -> nn.Module:
    """As scripts load a policy."""
    return load_with_adapters(path, ranks, lora_rank=0, **memory)


def load_with_adapters(path: str, ranks: Ranks, *, frozen: bool = False, **changes: object) -> nn.Module:
    """As scripts load a policy with LoRA of rank 4. Changes are flags of LoRA or memory."""
    lora_names = {field.name for field in fields(lora.LoRA)}
    adapters = dict(lora_rank=4) | {name: x for name, x in changes.items() if name in lora_names}
    memory = dict(compile=False) | {name: x for name, x in changes.items() if name not in lora_names}
    learning = None if frozen else lora.LoRA(**adapters)
    return models.load_model(path, ranks, learning, Memory(**memory), longest=64)


def experts_of(model: nn.Module, ids: Sequence[int]) -> np.ndarray:
    """(n, layers, k): which experts a plain model chooses for the tokens of a sequence; 0 in a dense layer."""
    shape = len(ids), model.config.num_hidden_layers, model.config.num_experts_per_tok
    found, hooks = np.zeros(shape, np.uint8), []
    for name, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            note = functools.partial(lambda layer, m, i, out: found.__setitem__((slice(None), layer), out[2]))
            hooks.append(module.register_forward_hook(functools.partial(note, int(name.split(".")[2]))))
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return found


def make_them_count(model: nn.Module) -> nn.Module:
    """Adapters of a model that add something: their second matrices are random, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if ".lora_B." in name:
                noise = 0.1 * torch.randn(x.shape, generator=generator)
                x.copy_(distribute_tensor(noise, x.device_mesh, x.placements) if isinstance(x, DTensor) else noise)
    return model


def in_float32(batch: Batch) -> Batch:
    """A batch with its numbers, if they are in float64, in float32."""
    return batch.map(lambda _, x: x.float() if x.is_floating_point() else x)


def way_of(model: nn.Module) -> str:
    """Which of `ways.WAYS` a model runs."""
    return model.packed.way


def plain(path: str) -> nn.Module:
    """As transformers loads it, with experts one after the other: its faster ways know no float64."""
    options = dict(dtype=torch.float32, experts_implementation="eager")
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, of what has one."""
    return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
