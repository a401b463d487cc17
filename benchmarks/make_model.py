"""Write a randomly initialised Qwen2.5 of a named shape: real memory and speed where no weights can be downloaded.

    python benchmarks/make_model.py --shape 1.5B --tokenizer path/to/qwen2_tokenizer --out models/qwen-1.5b-random

Its responses are noise that runs to the length limit, and so are its rewards.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

SHAPES = {  # hidden, layers, heads, kv heads, intermediate, tied
    "0.5B": (896, 24, 14, 2, 4864, True),
    "1.5B": (1536, 28, 12, 2, 8960, True),
    "7B": (3584, 28, 28, 4, 18944, False),
    "14B": (5120, 48, 40, 8, 13824, False),
    "32B": (5120, 64, 40, 8, 27648, False),
}


@dataclass(frozen=True)
class Args:
    tokenizer: str
    """Folder or Hugging Face id of a Qwen2 tokenizer."""
    out: Path
    """Folder to write."""
    shape: Literal["0.5B", "1.5B", "7B", "14B", "32B"] = "1.5B"
    """Which Qwen2.5."""
    seed: int = 0
    """Seed of the weights."""


def main(args: Args) -> None:
    hidden, layers, heads, kv_heads, intermediate, tied = SHAPES[args.shape]
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(args.seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cpu()
    torch.cuda.empty_cache()  # somebody may want the GPU while the files are written
    model.save_pretrained(args.out, max_shard_size="2GB")  # which are copied in memory, one at a time
    tokenizer.save_pretrained(args.out)
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.out}: {args.shape} shape, {count / 1e9:.2f}B parameters, random")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
