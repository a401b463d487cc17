"""What the tests of images share: small models that see, rows of the dots task, prompts as a processor makes them."""

import io
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from data import dots, files
from rl.data import images
from rl.data.encode import encode_prompts, load_tokenizer
from rl.data.rows import read_rows

TOKENS = 9  # of an image of the dots task
PLACEHOLDER = dots.QWEN_IDS["image_token_id"]
HEAD, TAIL = "<|im_start|>user\n<|vision_start|>", "<|vision_end|>how many?<|im_end|>\n<|im_start|>assistant\n"


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
    """train.parquet with so many images and then one row without."""
    rng = random.Random(0)
    rows = [dots.rl_row("train", i, rng) for i in range(count)]
    plain = dots.rl_row("train", count, rng) | {"images": None, "prompt": [{"role": "user", "content": "1+2=?"}]}
    files.write(folder, {"train": [*rows, plain]})
    return folder / "train.parquet"


def encoded(model: str, file: Path) -> list[dict]:
    """The rows of a file with their token ids, as a script has them."""
    return encode_prompts(load_tokenizer(model), read_rows(file))


def as_processed(model: str, file: Path, row: int) -> dict[str, torch.Tensor]:
    """The model's inputs for a row's prompt, by its image processor and by hand: nine placeholders an image."""
    tokenizer, source = load_tokenizer(model), pq.read_table(file).to_pylist()[row]
    if not source["images"]:
        text = f"<|im_start|>user\n{source['prompt'][0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        return {"input_ids": torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])}
    head, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (HEAD, TAIL))
    ids = torch.tensor([head + [PLACEHOLDER] * TOKENS + tail])
    picture = Image.open(io.BytesIO(source["images"][0]["bytes"])).convert("RGB")
    seen = AutoImageProcessor.from_pretrained(model)(images=[picture], return_tensors="pt")
    types = torch.zeros_like(ids)
    types[0, len(head) : len(head) + TOKENS] = 1
    return {"input_ids": ids, "mm_token_type_ids": types, **seen}


def logits(model: torch.nn.Module, inputs: dict[str, torch.Tensor], response: list[int]) -> torch.Tensor:
    """(n, V) logits that predict the n tokens of a response, by its own forward; placeholders in it are text."""
    types, start = inputs.get("mm_token_type_ids"), inputs["input_ids"].shape[1]
    tokens = torch.tensor([response])
    text = tokens == PLACEHOLDER
    ids = torch.cat([inputs["input_ids"], tokens.masked_fill(text, 3)], 1)
    more = {} if types is None else {"mm_token_type_ids": torch.cat([types, torch.zeros_like(tokens)], 1)}
    embedding = model.get_input_embeddings()

    def put_back(module, given, out):
        found = torch.cat([torch.zeros_like(inputs["input_ids"]), text.long()], 1)[..., None]
        return torch.where(found.bool(), embedding.weight[PLACEHOLDER], out)

    hook = embedding.register_forward_hook(put_back)
    out = model(**inputs | more | {"input_ids": ids}, attention_mask=torch.ones_like(ids), use_cache=False)
    hook.remove()
    return out.logits[0, start - 1 : -1]


def forget() -> None:
    """Images that other tests have read."""
    images._numbers.clear()
    del images._known[1:]
    images._most[0] = 0
    images._current.clear()
    images._inputs.clear()


def without(folder: str, name: str, to: Path) -> str:
    """A copy of a model's folder that lacks a file."""
    shutil.copytree(folder, to)
    (to / name).unlink()
    return str(to)
