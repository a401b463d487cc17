"""Images of rows: every form that data has them in, what a model sees of them, and what is wrong with some."""

import io
import random
import struct
import zlib

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
from extras import images
from extras.demonstrations.encode import encode_demonstration
from extras.demonstrations.rows import read_demonstrations
from rl.data.batching import collate, shared_prefix
from rl.data.encode import encode_prompts
from rl.data.rows import read_rows
from rl.data.template import load_tokenizer
from rl.data.types import Sample
from rl.flags import build

PNG = dots.draw(2, random.Random(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("sees") / "model"
    dots.save_model(folder)
    return str(folder)


known = images.of_process


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
    found = [known().read(x, "x", tmp_path) for x in forms]
    assert found == [[1], [1], [1], [2], [2]]  # of equal bytes, and of one file
    own = Image.open(io.BytesIO(PNG))
    [three] = known().read(own, "x", tmp_path)
    wanted = np.asarray(own.convert("RGB"))
    assert all(np.array_equal(np.asarray(known().picture(k)), wanted) for k in (1, 2, three))
    grey = Image.fromarray(wanted).convert("LA")
    [four] = known().read([{"image": grey}], "x", tmp_path)
    assert known().picture(four).mode == "RGB"


def test_an_image_has_as_many_tokens_as_the_processor_gives_it(tmp_path, model):
    two = [{"bytes": png(96, 48)}, {"bytes": png(32, 64)}]
    [found] = encode_prompts(load_tokenizer(model), read_rows(write(tmp_path, row(*two, text="a<image>b<image>c"))))
    ids = torch.tensor(found["prompt_ids"])
    assert [(ids == images.FIRST + k).sum() for k in (1, 2)] == [6 * 3, 2 * 4]  # patches of 8 pixels, four make a token
    tokens, features, numbers = known().expanded(ids)
    assert numbers == [1, 2] and features.sum() == 26 and set(tokens[features].tolist()) == {vision.PLACEHOLDER}
    one = "<|vision_start|><|image_pad|><|vision_end|>"  # in a text, before the processor makes it more
    text = f"<|im_start|>user\na{one}b{one}c<|im_end|>\n<|im_start|>assistant\n"
    assert known().collapsed(ids.tolist()) == (load_tokenizer(model)(text)["input_ids"], [1, 2])
    assert known().most_in_row == 2


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
    ids = [encode_demonstration(tokenizer, read_demonstrations(tmp_path / f"{name}.parquet")[0]) for name in "ab"]
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
def test_scripts_name_the_row_of_an_image_that_is_not_there(tmp_path, model, script):
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


# --- what an image becomes -------------------------------------------------------------------------------------------


def saved(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def raw_png(width, depth, color, pixels, before=(), behind=()):
    """A PNG with one line of pixels, of any depth and color type, and chunks before and behind them."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, color, 0, 0, 0))
    body = [chunk(*x) for x in before] + [chunk(b"IDAT", zlib.compress(b"\0" + pixels))] + [chunk(*x) for x in behind]
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(body) + chunk(b"IEND", b"")


def of(mode, *pixels):
    """An image of one line."""
    image = Image.new(mode, (len(pixels), 1))
    for i, pixel in enumerate(pixels):
        image.putpixel((i, 0), pixel)
    return image


def palette(*pixels, transparency):
    image = of("P", *pixels)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.info["transparency"] = transparency
    return image


def grey(*values):
    return [(value,) * 3 for value in values]


def deep(*values, dtype=np.uint16):
    return Image.fromarray(np.array([values], dtype))


RED, GREEN, WHITE = (255, 0, 0), (0, 255, 0), (255, 255, 255)
# With alpha a / 255 a channel c shows c a / 255 + 255 - a.
SHOWN = {
    "RGBA": (of("RGBA", (*RED, 0), (*RED, 255), (0, 100, 200, 102)), [WHITE, RED, (153, 193, 233)]),
    "RGBA in a PNG": (saved(of("RGBA", (*RED, 0), (*GREEN, 255), (0, 0, 0, 51)), "PNG"), [WHITE, GREEN, *grey(204)]),
    "RGBA in a WEBP": (saved(of("RGBA", (*RED, 0), (*RED, 255)), "WEBP", lossless=True, exact=True), [WHITE, RED]),
    "RGBA in a TIFF": (saved(of("RGBA", (*RED, 0), (*RED, 255)), "TIFF"), [WHITE, RED]),
    "LA": (of("LA", (0, 0), (80, 255), (0, 204)), grey(255, 80, 51)),
    "LA in a PNG": (saved(of("LA", (0, 0), (80, 255)), "PNG"), grey(255, 80)),
    "La": (of("LA", (0, 0), (80, 255)).convert("La"), grey(255, 80)),
    "RGBa": (of("RGBA", (*RED, 0), (*RED, 255)).convert("RGBa"), [WHITE, RED]),
    "PA": (palette(0, 1, transparency=0).convert("PA"), [WHITE, GREEN]),
    "palette, one color transparent": (saved(palette(0, 1, transparency=0), "PNG", transparency=0), [WHITE, GREEN]),
    "palette, a byte for each color": (
        saved(palette(0, 1, 2, transparency=b""), "PNG", transparency=b"\xff\x00\x99"),
        [RED, WHITE, (102, 102, 255)],
    ),
    "palette of 4 bits": (
        raw_png(2, 4, 3, b"\x01", [(b"PLTE", bytes([*RED, *GREEN])), (b"tRNS", b"\x00")]),
        [WHITE, GREEN],
    ),
    "GIF, the first of two frames": (
        saved(of("RGBA", (*RED, 0), (*GREEN, 255)), "GIF", save_all=True, append_images=[Image.new("RGB", (2, 1))]),
        [WHITE, GREEN],
    ),
    "WEBP, the first of two frames": (
        saved(
            of("RGBA", (*RED, 0), (*RED, 255)),
            "WEBP",
            save_all=True,
            append_images=[Image.new("RGBA", (2, 1))],
            lossless=True,
            exact=True,
        ),
        [WHITE, RED],
    ),
    "grey, one value transparent": (saved(of("L", 0, 7, 9), "PNG", transparency=7), grey(0, 255, 9)),
    "grey of 2 bits": (raw_png(4, 2, 0, b"\x1b", [(b"tRNS", b"\x00\x02")]), grey(0, 85, 255, 255)),
    "grey of 4 bits": (raw_png(2, 4, 0, b"\x1f", [(b"tRNS", b"\x00\x01")]), grey(255, 255)),
    "grey of 1 bit": (raw_png(2, 1, 0, b"\x40", [(b"tRNS", b"\x00\x00")]), grey(255, 255)),
    "black and white": (of("1", 0, 255), grey(0, 255)),
    "RGB, one color transparent": (saved(of("RGB", RED, GREEN), "PNG", transparency=GREEN), [RED, WHITE]),
    "grey of 16 bits": (deep(0, 257, 32896, 65535), grey(0, 1, 128, 255)),
    "grey of 16 bits in a PNG": (saved(deep(0, 2570, 65535), "PNG"), grey(0, 10, 255)),
    "grey of 16 bits, dark": (saved(deep(0, 100, 200), "PNG"), grey(0, 0, 1)),
    "grey of 16 bits, one value transparent": (
        saved(deep(0, 2570, 65535), "PNG", transparency=2570),
        grey(0, 255, 255),
    ),
    "grey of 16 bits in a TIFF": (saved(deep(0, 2570, 65535), "TIFF"), grey(0, 10, 255)),
    "grey of 16 bits, big-endian": (deep(0, 2570, 65535, dtype=">u2"), grey(0, 10, 255)),
    "grey of 16 bits in a PGM": (saved(deep(0, 257, 200), "PPM"), grey(0, 1, 1)),
    "grey of 16 bits in a PGM, dark": (saved(deep(0, 2, 200), "PPM"), grey(0, 0, 1)),
    "integers of 32 bits": (deep(0, 2570, 65535, dtype=np.int32), grey(0, 10, 255)),
    "small integers of 32 bits": (deep(0, 10, 255, dtype=np.int32), grey(0, 10, 255)),
    "floats to 1": (deep(0.0, 0.2, 1.0, dtype=np.float32), grey(0, 51, 255)),
    "floats to 255": (saved(deep(0.0, 51.2, 255.0, dtype=np.float32), "TIFF"), grey(0, 51, 255)),
    "RGB of 16 bits": (
        raw_png(2, 16, 2, struct.pack(">6H", 65535, 0, 2570, 0, 257, 65535)),
        [(255, 0, 10), (0, 1, 255)],
    ),
    "RGB of 16 bits, one color transparent": (
        raw_png(
            2, 16, 2, struct.pack(">6H", 65535, 0, 2570, 0, 257, 65535), [(b"tRNS", struct.pack(">3H", 65535, 0, 2570))]
        ),
        [WHITE, (0, 1, 255)],
    ),
    "RGBA of 16 bits": (raw_png(2, 16, 6, struct.pack(">8H", 65535, 0, 0, 65535, 0, 0, 0, 0)), [RED, WHITE]),
    "grey of 16 bits with alpha": (raw_png(2, 16, 4, struct.pack(">4H", 2570, 65535, 0, 0)), grey(10, 255)),
    "CMYK": (of("CMYK", (0, 255, 255, 0), (255, 0, 255, 0), (0, 0, 0, 255)), [RED, GREEN, (0, 0, 0)]),
    "CMYK in a TIFF": (saved(of("CMYK", (0, 255, 255, 0), (0, 0, 0, 0)), "TIFF"), [RED, WHITE]),
    "YCbCr": (of("YCbCr", (0, 128, 128), (200, 128, 128)), grey(0, 200)),
    "HSV": (of("HSV", (0, 255, 255), (0, 0, 80)), [RED, *grey(80)]),
    "LAB": (of("LAB", (255, 128, 128), (0, 128, 128)), grey(255, 0)),
    "RGBX": (of("RGBX", (*RED, 0), (*GREEN, 7)), [RED, GREEN]),
    "BMP": (saved(of("RGB", RED, GREEN), "BMP"), [RED, GREEN]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_an_image_is_what_a_person_would_see(tmp_path, name):
    """On white, and in 8 bits."""
    source, wanted = SHOWN[name]
    forms = [{"bytes": source}] if isinstance(source, bytes) else [{"image": source}, source]
    if isinstance(source, bytes):
        (tmp_path / "a").write_bytes(source)
        forms += ["a", Image.open(io.BytesIO(source))]
    numbers = known().read(forms, "x", tmp_path)
    known().check_pixels()
    for number in numbers * 2:  # an image object is not changed by a look at it
        found = known().picture(number)
        assert found.mode == "RGB" and found.size == known().known[number][1:] == (len(wanted), 1)
        difference = np.abs(np.asarray(found)[0].astype(int) - np.array(wanted))
        assert difference.max() <= (3 if name == "LAB" else 1 if "16 bits" in name else 0), np.asarray(found)


TURNED = {  # EXIF orientation -> the picture a b c / d e f as it is to be seen
    1: ["abc", "def"],
    2: ["cba", "fed"],
    3: ["fed", "cba"],
    4: ["def", "abc"],
    5: ["ad", "be", "cf"],
    6: ["da", "eb", "fc"],
    7: ["fc", "eb", "da"],
    8: ["cf", "be", "ad"],
}


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP", "JPEG", "late", "RGBA"])
@pytest.mark.parametrize("orientation", TURNED)
def test_an_image_is_upright(tmp_path, model, form, orientation):
    """Its pixels, its size and its tokens; `late` is a PNG that says so behind its pixels."""
    values = np.array([[10, 50, 90], [130, 170, 210]], np.uint8).repeat(32, 0).repeat(32, 1)
    image, exif = Image.fromarray(values).convert("RGBA" if form == "RGBA" else "RGB"), Image.Exif()
    exif[0x112] = orientation
    options = dict(lossless=True) if form == "WEBP" else dict(quality=100) if form == "JPEG" else {}
    content = saved(image, "PNG" if form in ("late", "RGBA") else form, exif=exif, **options)
    if form == "late":
        start = content.index(b"eXIf") - 4
        end = start + 12 + int.from_bytes(content[start : start + 4], "big")
        content = content[:start] + content[end:-12] + content[start:end] + content[-12:]
    rows = read_rows(write(tmp_path, row({"bytes": content})))
    [number] = rows[0]["images"]
    opened = Image.open(io.BytesIO(content))
    [same] = known().read([opened], "x", tmp_path)
    assert known().known[same][1:] == known().known[number][1:]
    assert all(np.array_equal(known().picture(same), known().picture(number)) for _ in range(2))
    seen, letters = (
        np.asarray(known().picture(number))[..., 0],
        dict(zip("abcdef", (10, 50, 90, 130, 170, 210), strict=True)),
    )
    wanted = np.array([[letters[x] for x in line] for line in TURNED[orientation]]).repeat(32, 0).repeat(32, 1)
    assert seen.shape == wanted.shape == known().known[number][2:0:-1]
    assert np.abs(seen.astype(int) - wanted).max() <= 2
    [encoded] = encode_prompts(load_tokenizer(model), rows)
    assert encoded["prompt_ids"].count(images.FIRST + number) == 24  # patches of 8 pixels, four make a token
    grid = known().inputs(number)["image_grid_thw"][0].tolist()
    assert grid == [1, *(n // 8 for n in wanted.shape)]


@pytest.mark.parametrize(
    "source, message",
    [
        (deep(-1, 5, dtype=np.int32), "its numbers go from -1 to 5; save it with 8 or 16 bits"),
        (deep(0, 70000, dtype=np.int32), "its numbers go from 0 to 70000"),
        (deep(0.0, float("nan"), dtype=np.float32), "its numbers go from nan to nan"),
        (deep(-0.5, 0.5, dtype=np.float32), "its numbers go from -0.5 to 0.5"),
        (saved(deep(0, 70000, dtype=np.int32), "TIFF"), "its numbers go from 0 to 70000"),
        (PNG[:-60], "truncated|broken"),
        (saved(Image.new("RGB", (64, 64)), "JPEG")[:-300], "[Tt]runcated"),
        (saved(Image.effect_noise((64, 64), 50).convert("RGB"), "WEBP")[:-300], "decode|truncated"),
        (saved(Image.effect_noise((64, 64), 50), "GIF")[:-900], "[Tt]runcated"),
        (
            saved(Image.effect_noise((64, 64), 50), "TIFF", compression="tiff_lzw")[:2000] + bytes(3000),
            "cannot|decoder|truncated",
        ),
    ],
)
def test_images_that_cannot_be_shown_are_named(tmp_path, source, message):
    with pytest.raises(
        ValueError, match=rf"^here: images\[0\] (is a broken image|cannot be read as an image) \(.*({message})"
    ):
        known().read([source], "here", tmp_path)
        known().check_pixels()
