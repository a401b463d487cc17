"""Sizes of models from their configs alone, against numbers that are worked out by hand."""

import math

import helpers_scripts as h
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from benchmarks import make_model, models
from extras.families import auto_class
from extras.lora import LoRA, adapters
from extras.plan.sizes import sizes_of


@pytest.fixture
def folder_of(tmp_path):
    def write(config):
        config.save_pretrained(tmp_path)
        return str(tmp_path)

    return write


QWEN2 = dict(
    vocab_size=100,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=20,
)


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_by_hand(folder_of, tied):
    found = sizes_of(folder_of(Qwen2Config(**QWEN2, tie_word_embeddings=tied)), lora=LoRA(lora_rank=2))
    # q 8x8+8, k and v 8x4+4 each, o 8x8, gate, up and down 8x20 each, two norms of 8
    layer = 72 + 36 + 36 + 64 + 3 * 160 + 16
    assert [x.parameters for x in found.layers] == [layer] * 3
    assert found.root == 800 * (1 if tied else 2) + 8 and found.head == 800
    assert found.active == 3 * layer and found.total == found.root + 3 * layer
    first = found.layers[0]
    # of down, which is added to the residual, nothing is needed
    assert first.results == 8 + 4 + 4 + 8 + 20 + 20 and (first.inner, first.attention) == (20, 8)
    assert (first.cache, first.window, first.state) == (2 * 2 * 2, math.inf, 0)
    assert found.cached(10) == 3 * 8 * 10
    # r (in + out) of each linear layer; the head has none
    pairs = [(8, 8), (8, 4), (8, 4), (8, 8), (8, 20), (8, 20), (20, 8)]
    assert list(first.adapted) == pairs and sum(found.adapters(2)) == 3 * 2 * sum(a + b for a, b in pairs)
    assert found.adapters(2)[:4] == (16, 16, 16, 8)
    assert (found.vocabulary, found.hidden, found.key_heads, found.tower, found.experts) == (100, 8, 2, 0, 0)
    assert sum(found.tensors) == found.total and found.tensors[0] == 800
    assert len(found.tensors) == 3 * 12 + (2 if tied else 3)


def test_adapters_of_some_layers(folder_of):
    path = folder_of(Qwen2Config(**QWEN2))
    found = sizes_of(path, lora=LoRA(lora_rank=2, target_modules=("q_proj", "v_proj")))
    assert found.layers[2].adapted == ((8, 8), (8, 4)) and len(found.adapters(2)) == 3 * 4
    assert sizes_of(path).layers[0].adapted == ()
    with pytest.raises(ValueError, match="--target-modules nothing"):
        sizes_of(path, lora=LoRA(lora_rank=2, target_modules=("nothing",)))


def test_a_score_head_takes_the_place_of_the_lm_head(folder_of):
    path = folder_of(Qwen2Config(**QWEN2, tie_word_embeddings=False))
    assert sizes_of(path, has_score=True).root == 800 + 8 + 8 and sizes_of(path, has_score=True).head == 0


def test_a_mixture_of_experts_by_hand(folder_of):
    config = Qwen3MoeConfig(
        vocab_size=100,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        intermediate_size=20,
        moe_intermediate_size=5,
        num_experts=16,
        num_experts_per_tok=3,
        tie_word_embeddings=False,
    )
    found = sizes_of(folder_of(config), lora=LoRA(lora_rank=8, lora_experts=True))
    attention = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 2 * 6  # q, k, v, o, norms of q and k
    experts = 16 * (2 * 5 * 8 + 5 * 8)
    assert {x.parameters for x in found.layers} == {attention + experts + 16 * 8 + 16}  # router, two norms
    first = found.layers[0]
    assert first.experts == experts and (found.experts, found.expert_share) == (2 * experts, 3 / 16)
    assert found.active == found.total - found.root - 2 * experts * 13 / 16
    # q, k, v, o, and of three experts gate and up together, and down
    assert first.results == 24 + 12 + 12 + 8 + 3 * (10 + 8)
    assert first.inner == 3 * 5 and first.attention == 24 and first.cache == 2 * 2 * 6
    # of each expert A and B beside (10, 8) and (8, 5)
    assert first.expert_adapters == 16 * (10 + 8 + 8 + 5)
    linear = 8 + 24 + 2 * (8 + 12) + 24 + 8
    assert sum(found.adapters(8)) == 2 * 8 * (linear + first.expert_adapters)


@pytest.mark.parametrize("shape", ["1.5B", "7B", "30B-A3B", "4B-hybrid"])
def test_the_sizes_are_those_of_the_model_and_of_the_adapters_that_it_gets(folder_of, shape):
    config = make_model.config_of(shape)
    found = sizes_of(folder_of(config), lora=LoRA(lora_rank=8))
    with torch.device("meta"):
        model = auto_class(config.name_or_path or folder_of(config)).from_config(config)
    assert sorted(found.tensors) == sorted(x.numel() for x in model.parameters())
    assert found.total == sum(found.tensors) and len(found.layers) == config.get_text_config().num_hidden_layers
    adapters.add(model, LoRA(lora_rank=8), path="", seed=0)
    assert sorted(found.adapters(8)) == sorted(x.numel() for x in model.parameters() if x.requires_grad)


def test_layers_with_windows_keep_what_is_in_them(folder_of):
    config = Gemma3TextConfig(
        vocab_size=100,
        hidden_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=20,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    found = sizes_of(folder_of(config))
    assert [x.window for x in found.layers] == [16, 16, math.inf] and {x.cache for x in found.layers} == {8}
    assert found.cached(10) == 3 * 8 * 10 and found.cached(100) == 8 * (16 + 16 + 100)


def test_recurrent_layers_have_a_state_and_no_keys(folder_of):
    config = Qwen3NextConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        shared_expert_intermediate_size=6,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )
    found = sizes_of(folder_of(config))
    assert [x.state for x in found.layers] == [4 * 8 * 6] * 3 + [0]
    assert [x.cache for x in found.layers] == [0] * 3 + [2 * 2 * 8]
    assert found.layers[0].attention == 4 * 6 and found.layers[3].attention == 4 * 8
    assert found.cached(50) == 50 * 32 and found.state == 3 * 192


def test_latent_attention_keeps_one_vector(folder_of):
    config = DeepseekV3Config(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=6,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=6,
        first_k_dense_replace=1,
        intermediate_size=20,
    )
    found = sizes_of(folder_of(config))
    assert {x.cache for x in found.layers} == {6 + 4}
    assert [x.experts > 0 for x in found.layers] == [False, True]


@pytest.mark.parametrize("name", h.some([*models.FAMILIES], "openai-gpt", "mamba2", "gemma4_text", "qwen3_5"))
def test_every_family_has_sizes(folder_of, name):
    """Of models without classes for their layers, and of layers without attention too."""
    config = CONFIG_MAPPING[models.ALIASES.get(name, name)](**models.FAMILIES[name])
    found = sizes_of(folder_of(config))
    assert sum(found.tensors) == found.total and found.root > 0 and found.hidden == 128
    assert len(found.layers) >= 2 and all(x.parameters > 0 and x.results > 0 for x in found.layers)
    states = sum(x.cache + x.state for x in found.layers)
    assert states > 0 or name in ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")  # vLLM's own sizes


def test_a_model_that_cannot_be_made_is_named(folder_of, tmp_path):
    path = folder_of(GraniteConfig(**QWEN2))  # transformers has no class of it with a score head
    with pytest.raises(ValueError, match=f"--critic-model {path}: no model can be made of its config"):
        sizes_of(path, has_score=True, flag="--critic-model")
    with pytest.raises(ValueError, match="--reward-model nowhere/at/all: there is no such folder"):
        sizes_of("nowhere/at/all", flag="--reward-model")


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=100, n_embd=8, n_layer=2, n_head=2, n_positions=64),
        LlamaConfig(**QWEN2),
    ],
    ids=lambda x: x.model_type,
)
def test_other_families_add_up(folder_of, config):
    found = sizes_of(folder_of(config))
    assert sum(found.tensors) == found.total and len(found.layers) == config.num_hidden_layers
    if config.model_type == "gpt2":  # its linear layers are of a class of its own
        assert found.layers[0].results == 24 + 8 + 32 and found.layers[0].inner == 32
