"""Write a randomly initialized Qwen of a named shape: real memory and speed where no weights can be downloaded.

    python benchmarks/make_model.py --shape 1.5B --tokenizer path/to/qwen2_tokenizer --out models/qwen-1.5b-random

    python benchmarks/make_model.py --shape 30B-A3B --layers 8 --tokenizer ... --out models/qwen3-8-layers

Its responses are noise that runs to the length limit, and so are its rewards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SHAPES = {  # Qwen2.5: hidden, layers, heads, kv heads, intermediate, tied
    "0.5B": (896, 24, 14, 2, 4864, True),
    "1.5B": (1536, 28, 12, 2, 8960, True),
    "7B": (3584, 28, 28, 4, 18944, False),
    "14B": (5120, 48, 40, 8, 13824, False),
    "32B": (5120, 64, 40, 8, 27648, False),
    "72B": (8192, 80, 64, 8, 29568, False),
}
QWEN3 = {  # hidden, layers, heads, kv heads, intermediate (of an expert), experts, and how many of them a token gets
    "30B-A3B": (2048, 48, 32, 4, 768, 128, 8),
    "235B-A22B": (4096, 94, 64, 4, 1536, 128, 8),
    "3B-dense": (2048, 48, 32, 4, 8 * 768, 0, 0),  # has as many active parameters
}
HYBRIDS = {  # Qwen3.5: hidden, layers, heads, kv heads, intermediate, and key and value heads of gated delta nets
    "4B-hybrid": (2560, 32, 16, 4, 9216, 16, 32),
}
Shape = Literal["0.5B", "1.5B", "7B", "14B", "32B", "72B", "30B-A3B", "235B-A22B", "3B-dense", "4B-hybrid"]


@dataclass(frozen=True)
class Args:
    tokenizer: str
    """This is the folder or Hugging Face id of a Qwen2 tokenizer."""
    out: Path
    """Results are written to this folder."""
    shape: Shape = "1.5B"
    """This is the shape of a Qwen2.5. 30B-A3B is Qwen3's mixture of experts, and 3B-dense is as large as what a token
    uses of it. 4B-hybrid is the text of Qwen3.5 with a vision tower of one small layer."""
    layers: int | None = None
    """The model has only this many layers."""
    seed: int = 0
    """The seed decides the weights."""


def config_of(shape: str, layers: int | None = None, **options: Any) -> PreTrainedConfig:
    """The config of a shape, with all of its layers or this many, and with other options."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    common = dict(vocab_size=151936, max_position_embeddings=32768, bos_token_id=None, dtype=torch.bfloat16)
    common["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    common |= dict(zip(names, {**SHAPES, **QWEN3, **HYBRIDS}[shape], strict=False))
    if layers is not None:
        common["num_hidden_layers"] = layers
    if shape in SHAPES:
        return Qwen2Config(**common | dict(tie_word_embeddings=SHAPES[shape][-1]) | options)
    if shape in HYBRIDS:
        return hybrid(common | options, *HYBRIDS[shape][-2:])
    *_, width, experts, top_k = QWEN3[shape]
    common |= dict(head_dim=128, tie_word_embeddings=False)
    of_experts = dict(num_experts=experts, num_experts_per_tok=top_k, moe_intermediate_size=width, norm_topk_prob=True)
    return Qwen3MoeConfig(**common | of_experts | options) if experts else Qwen3Config(**common | options)


def hybrid(common: dict[str, Any], key_heads: int, value_heads: int) -> PreTrainedConfig:
    """As Qwen publishes them. Three of four layers are gated delta nets. Ids of images end the vocabulary."""
    heads = dict(head_dim=256, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads)
    heads["mamba_ssm_dtype"] = "float32"  # of vLLM's states
    rope = common["rope_parameters"] | dict(partial_rotary_factor=0.25, mrope_section=[11, 11, 10], rope_theta=1e7)
    text = common | heads | dict(rope_parameters=rope, tie_word_embeddings=True)
    tower = dict(depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=common["hidden_size"])
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = {name: common["vocab_size"] - 1 - i for i, name in enumerate(names)}
    return Qwen3_5Config(text_config=text, vision_config=tower, tie_word_embeddings=True, **special)


class Random:
    """In the place of a class of transformers: a model of new weights, which stands in no file."""

    @staticmethod
    def from_pretrained(path: str, *, dtype: torch.dtype, **options: object) -> tuple[PreTrainedModel, dict]:
        """Only the config is read. Options of files say nothing."""
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
        return model.eval(), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}


def save(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, out: Path, *, seed: int = 0) -> int:
    """Write a model of new weights with this config, and the tokenizer. Returns the number of parameters."""
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.bfloat16).cpu()
    torch.cuda.empty_cache()  # somebody may want the GPU while the files are written
    model.save_pretrained(out, max_shard_size="2GB")  # which are copied in memory, one at a time
    tokenizer.save_pretrained(out)
    return sum(p.numel() for p in model.parameters())


def main(args: Args) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    config = config_of(args.shape, args.layers, eos_token_id=tokenizer.eos_token_id)
    count = save(config, tokenizer, args.out, seed=args.seed)
    print(f"{args.out}: {args.shape} shape, {count / 1e9:.2f}B parameters, random")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
