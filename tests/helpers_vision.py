"""What the tests of images share: small models that see, rows of the dots task, prompts as a processor makes them."""

import functools
import io
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from data import dots, files
from extras import images
from rl.data.encode import encode_prompts
from rl.data.rows import read_rows
from rl.data.template import load_tokenizer

TOKENS = 9  # of an image of the dots task that have features
PLACEHOLDER = dots.QWEN_IDS["image_token_id"]  # of most families
TYPES = dict.fromkeys(("qwen3_vl", "qwen2_5_vl", "qwen3_5"), "mm_token_type_ids") | {"gemma3": "token_type_ids"}
# What the processors make of an image in a text
EXPANDED = dict.fromkeys(dots.FAMILIES, "<|vision_start|>" + "<|image_pad|>" * TOKENS + "<|vision_end|>") | {
    "gemma3": "\n\n<start_of_image>" + "<image_soft_token>" * TOKENS + "<end_of_image>\n\n",
    "smolvlm": "<fake_token_around_image><global-img>" + "<image>" * TOKENS + "<fake_token_around_image>",
}


def save_lively(folder: Path, family: str) -> str:
    """A model of a family whose weights are livelier than new ones: see `conftest.tiny_model`."""
    dots.save_model(folder, family)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            x.add_((0.1 if x.ndim > 1 else 0.3) * torch.randn(x.shape, generator=generator))
    model.save_pretrained(folder)
    return str(folder)


def write_rows(folder: Path, count: int) -> Path:
    """train.parquet with this many images and then one row without."""
    rng = random.Random(0)
    rows = [dots.rl_row("train", i, rng) for i in range(count)]
    plain = dots.rl_row("train", count, rng) | {"images": None, "prompt": [{"role": "user", "content": "1+2=?"}]}
    files.write(folder, {"train": [*rows, plain]})
    return folder / "train.parquet"


def encoded(model: str, file: Path) -> list[dict]:
    """The rows of a file with their token ids, as a script has them."""
    return encode_prompts(load_tokenizer(model), read_rows(file))


@functools.cache
def as_processed(model: str, file: Path, row: int) -> dict[str, torch.Tensor]:
    """The model's inputs for a row's prompt, by its image processor and by hand: nine placeholders an image."""
    tokenizer, source = load_tokenizer(model), pq.read_table(file).to_pylist()[row]
    config, content = AutoConfig.from_pretrained(model), source["prompt"][0]["content"]
    content = content.replace("<image>", EXPANDED[config.model_type])
    text = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    if not source["images"]:
        return {"input_ids": ids}
    picture = Image.open(io.BytesIO(source["images"][0]["bytes"])).convert("RGB")
    seen = AutoImageProcessor.from_pretrained(model)(images=[picture], return_tensors="pt")
    wanted = ("input_ids", "pixel_values", "pixel_attention_mask", "image_grid_thw")
    types = {TYPES[config.model_type]: (ids == config.image_token_id).long()} if config.model_type in TYPES else {}
    return {name: x for name, x in {"input_ids": ids, **seen}.items() if name in wanted} | types


def logits(model: torch.nn.Module, inputs: dict[str, torch.Tensor], response: list[int]) -> torch.Tensor:
    """(n, V) logits that predict the n tokens of a response, by its own forward; placeholders in it are text."""
    start, tokens = inputs["input_ids"].shape[1], torch.tensor([response])
    placeholder = model.config.image_token_id
    text = tokens == placeholder
    ids = torch.cat([inputs["input_ids"], tokens.masked_fill(text, 3)], 1)
    types = {name: x for name, x in inputs.items() if name in TYPES.values()}
    more = {name: torch.cat([x, torch.zeros_like(tokens)], 1) for name, x in types.items()}
    embedding = model.get_input_embeddings()

    def put_back(module, given, out):
        found = torch.cat([torch.zeros_like(inputs["input_ids"]), text.long()], 1)[..., None]
        return torch.where(found.bool(), type(module).forward(module, torch.tensor([[placeholder]])), out)

    hook = embedding.register_forward_hook(put_back)
    out = model(**inputs | more | {"input_ids": ids}, attention_mask=torch.ones_like(ids), use_cache=False)
    hook.remove()
    return out.logits[0, start - 1 : -1]


def forget() -> None:
    """Images that other tests have read."""
    images.of_process.cache_clear()


def without(folder: str, name: str, to: Path) -> str:
    """A copy of a model's folder that lacks a file."""
    shutil.copytree(folder, to)
    (to / name).unlink()
    return str(to)
