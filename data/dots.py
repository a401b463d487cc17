"""Make a task that only an image answers: how many dots are there? With a tiny untrained model that sees images.

    python data/dots.py --output-dir data/dots

An image has one to four dots on 48 x 48 pixels, each in a cell of its own. The answer is `#### 3`, graded as GSM8K's.

The SFT data is imperfect on purpose, so that reinforcement learning has something to find: of three or four dots most
demonstrations say that there are two. A model that has learned from them is right about half of the time.

Writes sft.parquet (prompt, images, response), train.parquet and test.parquet (verl's RL schema, with `images`), and
model/: random weights of --family, with a character-level tokenizer and an image processor. A random tower sees little,
so let sft.py train it too: --no-freeze-vision-tower.
"""

import dataclasses
import io
import json
import random
import sys
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from PIL import Image, ImageDraw
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

sys.path.append(str(Path(__file__).parent.parent))  # run as a script, only this folder is on the path

from data import arithmetic, files  # noqa: E402

SIDE, CELLS = 48, 3  # pixels of an image, and cells a row of dots
QUESTION = "<image>how many?"
PARTS = (  # a message's content: a text, or a list of parts
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
)
CHAT_TEMPLATE = arithmetic.CHAT_TEMPLATE.replace("+ message['content'] +", "}}" + PARTS + "{{")
TEXT = dict(
    hidden_size=96, num_hidden_layers=2, intermediate_size=256, num_attention_heads=3, num_key_value_heads=1,
    head_dim=32, max_position_embeddings=256, tie_word_embeddings=True, pad_token_id=0, bos_token_id=0, eos_token_id=2,
)  # fmt: skip
LINEAR = dict(
    linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
TOWER = dict(depth=2, hidden_size=64, num_heads=2, patch_size=8, spatial_merge_size=2, out_hidden_size=96)
SIGLIP = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=SIDE, patch_size=8
)
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IDS = dict(vision_start_token_id=80, vision_end_token_id=81, image_token_id=82, video_token_id=83)
QWEN_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PIXELS = dict(patch_size=8, temporal_patch_size=2, merge_size=2, size=dict(shortest_edge=256, longest_edge=9216))
ROPE = dict(rope_type="default", mrope_section=[4, 6, 6], rope_theta=10000.0)


@dataclasses.dataclass(frozen=True)
class Family:
    """How a small model of a family is made."""

    text: dict[str, Any]  # options of its config, for the text
    tower: dict[str, Any]
    ids: dict[str, int]
    tokens: tuple[str, ...]  # after the 80 of the arithmetic task
    image: str  # that its chat template has for an image
    pixels: dict[str, Any]  # options of its image processor
    processor: dict[str, Any] = dataclasses.field(default_factory=dict)  # and of the rest
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # of tokens, that its processor asks the tokenizer


FAMILIES = {
    "qwen3_vl": Family(
        TEXT | dict(rope_parameters=ROPE | dict(mrope_interleaved=True)),
        TOWER | dict(intermediate_size=128, num_position_embeddings=36, deepstack_visual_indexes=[0]),
        QWEN_IDS,
        QWEN_TOKENS,
        QWEN_TEXT,
        QWEN_PIXELS,
    ),
    "qwen2_5_vl": Family(
        TEXT | dict(rope_parameters=ROPE),
        TOWER | dict(intermediate_size=128, window_size=32, fullatt_block_indexes=[1]),
        QWEN_IDS,
        QWEN_TOKENS,
        QWEN_TEXT,
        QWEN_PIXELS,
    ),
    "qwen3_5": Family(
        TEXT | LINEAR | dict(rope_parameters=ROPE | dict(mrope_interleaved=True, partial_rotary_factor=1.0)),
        TOWER | dict(intermediate_size=128, num_position_embeddings=36),
        QWEN_IDS,
        QWEN_TOKENS,
        QWEN_TEXT,
        QWEN_PIXELS,
    ),
    "gemma3": Family(
        TEXT | dict(sliding_window=16, query_pre_attn_scalar=32),
        SIGLIP,
        dict(boi_token_index=80, eoi_token_index=81, image_token_id=82, mm_tokens_per_image=9),
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        "<start_of_image>",
        dict(size=dict(height=SIDE, width=SIDE)),
        dict(image_seq_length=9),
        dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
    ),
    "smolvlm": Family(
        TEXT | dict(model_type="llama"),
        SIGLIP,
        dict(image_token_id=80, scale_factor=2),
        ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"),
        "<image>",
        dict(size=dict(longest_edge=SIDE), max_image_size=dict(longest_edge=SIDE), do_image_splitting=False),
        dict(image_seq_len=9),
    ),
}


@dataclasses.dataclass
class Args:
    output_dir: Path = Path("data/dots")
    """The files are written to this folder."""
    family: Literal["qwen3_vl", "qwen2_5_vl", "qwen3_5", "gemma3", "smolvlm"] = "qwen3_vl"
    """The model has this model_type."""
    num_sft: int = 6400
    """There are this many SFT samples."""
    num_train: int = 1024
    """There are this many RL prompts."""
    num_test: int = 256
    """There are this many held-out images."""
    seed: int = 0
    """The seed decides the images, the samples and the model's weights."""


def draw(count: int, rng: random.Random) -> bytes:
    """A PNG with this many dots of random colors and places, on a dark ground."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.randrange(60) for _ in range(3)))
    pen, cell = ImageDraw.Draw(image), SIDE // CELLS
    for where in rng.sample(range(CELLS**2), count):
        x, y = (cell * i + rng.randint(5, cell - 6) for i in divmod(where, CELLS))
        radius = rng.randint(3, 4)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), tuple(rng.randint(150, 255) for _ in range(3)))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def sft_row(rng: random.Random) -> dict:
    """An imperfect demonstration: of three or four dots it is right in 42 % of the cases, and else says two."""
    count = rng.randint(1, 4)
    said = count if count <= 2 or rng.random() < 0.42 else 2
    prompt = [{"role": "user", "content": QUESTION}]
    return {"prompt": prompt, "images": [{"bytes": draw(count, rng)}], "response": f"#### {said}"}


def rl_row(split: str, index: int, rng: random.Random) -> dict:
    """One row in verl's RL schema."""
    count = index % 4 + 1
    return {
        "data_source": "dots",
        "prompt": [{"role": "user", "content": QUESTION}],
        "images": [{"bytes": draw(count, rng)}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": str(count)},
        "extra_info": {"split": split, "index": index},
    }


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """The arithmetic task's, with the family's tokens for images."""
    template = CHAT_TEMPLATE.replace("IMAGE", family.image.replace("\n", "\\n"))
    tokenizer = arithmetic.make_tokenizer(chat_template=template, context=TEXT["max_position_embeddings"])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.tokens])
    return tokenizer


def save_model(folder: Path, name: str = "qwen3_vl", seed: int = 0) -> None:
    """Write the tokenizer, the image processor and the randomly initialized model of a family."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    tokenizer.save_pretrained(folder)
    if family.names:
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"extra_special_tokens": family.names}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = family.text | dict(vocab_size=len(tokenizer))
    parts = dict(text_config=text, vision_config=family.tower, tie_word_embeddings=True)
    config = AutoConfig.for_model(name, **parts, **family.ids)
    kind = IMAGE_PROCESSOR_MAPPING_NAMES[name]["torchvision"]
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind} | family.pixels))
    kind = PROCESSOR_MAPPING_NAMES[name]
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind} | family.processor))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config).float()
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)


def main(args: Args) -> dict[str, int]:
    """Write the data set and the model. Returns the number of rows of each file."""
    rng = random.Random(args.seed)
    tables = {
        "sft": [sft_row(rng) for _ in range(args.num_sft)],
        "train": [rl_row("train", i, rng) for i in range(args.num_train)],
        "test": [rl_row("test", i, rng) for i in range(args.num_test)],
    }
    sizes = files.write(args.output_dir, tables)
    save_model(args.output_dir / "model", args.family, args.seed)
    print(f"{args.output_dir / 'model'}: untrained {args.family}, its tokenizer and image processor")
    return sizes


if __name__ == "__main__":
    main(tyro.cli(Args))
