"""Images of rows: every form that data has them in, what a model sees of them, and what is wrong with some."""

import io
import random

import helpers_vision as vision
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import eval
import sft
import train_grpo
from data import dots, files, geometry3k
from rl.data import images
from rl.data.batching import collate, shared_prefix
from rl.data.encode import encode_prompts, encode_sft, load_tokenizer
from rl.data.rows import read_rows, read_sft_rows
from rl.data.types import Sample
from rl.flags import build

PNG = dots.draw(2, random.Random(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("sees") / "model"
    dots.save_model(folder)
    (folder / "model.safetensors").unlink()  # rows are checked without weights
    return str(folder)


@pytest.fixture(autouse=True)
def own_images():
    vision.forget()
    yield
    vision.forget()


def png(width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def row(*pictures, text=dots.QUESTION, **changes):
    made = dots.rl_row("train", 0, random.Random(0)) | {"images": list(pictures)} | changes
    return made | {"prompt": [{"role": "user", "content": text}]}


def write(folder, *rows):
    files.write(folder, {"train": list(rows)})
    return folder / "train.parquet"


def test_paths_bytes_and_dicts_are_the_same_image(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    forms = [{"bytes": PNG}], [PNG], {"bytes": PNG, "path": "b.png"}, ["a.png"], [{"path": str(tmp_path / "a.png")}]
    found = [images.check({"images": x}, "x", tmp_path) for x in forms]
    assert found == [[1], [1], [1], [2], [2]]  # of equal bytes, and of one file
    own = Image.open(io.BytesIO(PNG))
    [three] = images.check({"images": own}, "x", tmp_path)
    wanted = np.asarray(own.convert("RGB"))
    assert all(np.array_equal(np.asarray(images.picture(k)), wanted) for k in (1, 2, three))
    grey = Image.fromarray(wanted).convert("LA")
    [four] = images.check({"images": [{"image": grey}]}, "x", tmp_path)
    assert images.picture(four).mode == "RGB"


def test_an_image_has_as_many_tokens_as_the_processor_gives_it(tmp_path, model):
    two = [{"bytes": png(96, 48)}, {"bytes": png(32, 64)}]
    [found] = encode_prompts(load_tokenizer(model), read_rows(write(tmp_path, row(*two, text="a<image>b<image>c"))))
    ids = torch.tensor(found["prompt_ids"])
    assert [(ids == images.FIRST + k).sum() for k in (1, 2)] == [6 * 3, 2 * 4]  # patches of 8 pixels, four make a token
    tokens, features, numbers = images.expanded(ids)
    assert numbers == [1, 2] and features.sum() == 26 and set(tokens[features].tolist()) == {vision.PLACEHOLDER}
    one = "<|vision_start|><|image_pad|><|vision_end|>"  # in a text, before the processor makes it more
    text = f"<|im_start|>user\na{one}b{one}c<|im_end|>\n<|im_start|>assistant\n"
    assert images.collapsed(ids.tolist()) == (load_tokenizer(model)(text)["input_ids"], [1, 2])
    assert images.most_in_row() == 2


def test_other_images_are_another_prompt(tmp_path, model):
    """Of three rows with the same text the first two have one image."""
    other = dots.draw(3, random.Random(1))
    rows = read_rows(write(tmp_path, *(row({"bytes": x}) for x in (PNG, PNG, other))))
    ids = [x["prompt_ids"] for x in encode_prompts(load_tokenizer(model), rows)]
    batch = collate([Sample(x, [5, 6], [1, 1], [0.0, 0.0], "stop", 0) for x in ids])
    assert shared_prefix(batch).tolist() == [0, len(ids[0]) + 2, ids[0].index(images.FIRST + 1)]
    assert load_tokenizer(model).decode(ids[2]).startswith("<|im_start|>user\n<|vision_start|><|vision_end|>how many?")


def test_demonstrations_learn_no_image(tmp_path, model):
    tokenizer = load_tokenizer(model)
    plain = dict(prompt=[{"role": "user", "content": dots.QUESTION}], images=[{"bytes": PNG}], response="#### 2")
    files.write(tmp_path, {"a": [plain]})
    turns = [*plain["prompt"], {"role": "assistant", "content": "#### 2"}]
    files.write(tmp_path, {"b": [dict(messages=turns, images=[{"bytes": PNG}])]})
    ids = [encode_sft(tokenizer, read_sft_rows(tmp_path / f"{name}.parquet")[0]) for name in "ab"]
    for found, mask in ids:
        learned = [token for token, is_learned in zip(found, mask, strict=True) if is_learned]
        assert learned == tokenizer("#### 2<|im_end|>", add_special_tokens=False)["input_ids"]
        assert found.count(images.FIRST + 1) == vision.TOKENS and len(mask) == len(found)


@pytest.mark.parametrize(
    "pictures, text, message",
    [
        ([{"bytes": b"no image"}], dots.QUESTION, r"images\[0\] cannot be read as an image \(cannot identify"),
        ([{"bytes": PNG}, {"bytes": PNG[:-60]}], "<image><image>", r"images\[1\] is a broken image \(.*; write it"),
        ([{"path": "a.png"}], dots.QUESTION, r"images\[0\]: no such file .*a\.png; give its path"),
        ([{"bytes": PNG}, {"bytes": PNG}], dots.QUESTION, r": has 2 image\(s\), and its messages 1 place\(s\) for"),
        ([{"bytes": PNG}], "how many?", r": has 1 image\(s\), and its messages 0 place\(s\).*write <image> for each"),
        ([{"bytes": PNG}], "<image><|image_pad|>", r": has 1 image\(s\), and its messages 2 place\(s\)"),
        ([{"bytes": png(900, 2)}], dots.QUESTION, r": the model's processor refuses an image \(.*ratio.*\); drop the"),
        ([{"bytes": png(480, 480)}], dots.QUESTION, r": the prompt has 66 tokens, over --max-prompt-length 40"),
    ],
)
def test_what_is_wrong_names_the_row(tmp_path, model, pictures, text, message):
    file = write(tmp_path, row({"bytes": PNG}), row(*pictures, text=text))
    with pytest.raises(ValueError, match=r"train\.parquet: row 1" + (": " if message[0] == "i" else "") + message):
        encode_prompts(load_tokenizer(model), read_rows(file), max_prompt_length=40)


@pytest.mark.parametrize("script", [sft, train_grpo, eval])
def test_scripts_name_the_row_before_they_look_for_weights(tmp_path, model, script):
    """The model's folder has none, so loading it would be another error."""
    file = write(tmp_path, *(row(x, response="#### 1") for x in ({"bytes": PNG}, {"path": "a.png"})))
    files_of = {"val_files" if script is eval else "train_files": (str(file),)}
    more = dict(max_length=64) if script is sft else dict(engine="hf", max_prompt_length=64, max_response_length=8)
    more |= dict(val_before_train=False, test_freq=-1) if script is train_grpo else {}
    with pytest.raises(ValueError, match=r"train\.parquet: row 1: images\[0\]: no such file .*a\.png; give its path"):
        script.main(build(script.Args, model=model, **files_of, **more))


def test_a_decompression_bomb_is_not_decoded(tmp_path):
    """A file of a few kilobytes that would take 300 MB."""
    Image.new("1", (10_000, 10_000)).save(tmp_path / "bomb.png")
    with pytest.raises(ValueError, match=r"images\[0\] has 10000 x 10000 pixels, over 67,108,864, as a decompression"):
        read_rows(write(tmp_path, row({"path": "bomb.png"})))
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")  # would start Ghostscript
    with pytest.raises(ValueError, match="cannot be read as an image"):
        read_rows(write(tmp_path, row({"path": "a.png"})))


def test_models_that_cannot_see_are_named(tmp_path, model, tiny_model):
    rows = read_rows(write(tmp_path / "rows", row({"bytes": PNG})))
    with pytest.raises(ValueError, match=r"row 0: has images, and --model .* \(qwen2\) reads text only; use"):
        encode_prompts(load_tokenizer(tiny_model), rows)
    blind = vision.without(model, "preprocessor_config.json", tmp_path / "blind")
    with pytest.raises(ValueError, match=r"row 0: has images, and --model .*blind has no processor that.*; give a"):
        encode_prompts(load_tokenizer(blind), rows)
    with pytest.raises(ValueError, match="row 0: the prompt is a text; rows with images need messages"):
        encode_prompts(load_tokenizer(model), [rows[0] | {"prompt": "<image>how many?"}])


def test_the_rows_of_geometry3k(tmp_path):
    source = {"images": [{"bytes": PNG, "path": None}], "problem": "<image>Find x.", "answer": "3"}
    for split in geometry3k.SPLITS:
        files.write(tmp_path / "data", {f"{split}-00000-of-00001": [source]})
    sizes = geometry3k.main(geometry3k.Args(str(tmp_path), tmp_path / "out"))
    assert sizes == {"train": 1, "test": 1}
    [found] = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert found["prompt"][0]["content"].startswith("<image>Find x. You FIRST think")
    assert read_rows(tmp_path / "out/train.parquet")[0]["images"] == [1]
    with pytest.raises(ValueError, match=r"train row 4: has 1 image\(s\), and the problem 0 place\(s\)"):
        geometry3k.to_row(source | {"problem": "Find x."}, "train", 4)


def test_dots_are_where_they_are_said_to_be():
    for count in range(1, 5):
        picture = np.asarray(Image.open(io.BytesIO(dots.draw(count, random.Random(count)))).convert("L"))
        cells = [picture[i : i + 16, j : j + 16].max() > 100 for i in range(0, 48, 16) for j in range(0, 48, 16)]
        assert sum(cells) == count
