"""Images of prompts: from the columns of the data to numbers among the token ids, and from these to a model's inputs.

An image is read once and gets a number k. In `prompt_ids` each of its tokens has the id FIRST + k, which is in no
vocabulary: so prompts with different images differ, a placeholder that the policy samples is text, and the ids of a
sample are all that engines and ranks need. Every process reads the same files in the same order and has the same
numbers. What stands behind a number is decoded when a model or an engine needs it.

The model's own processor says which tokens an image becomes, and what the model gets to see of it.

Numbers stand for images of this process, so the table of them is the module's own. Handing it to every policy, engine
and batch would put an argument for images into each script, also into those that train on texts.
"""

import functools
import hashlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

FIRST = 2**30  # id of the tokens of image 0
PLACE = "<image>"  # in the text of a message, as verl has it
MAX_PIXELS = 2**26  # of an image file; more may be a decompression bomb
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of Pillow; others may start programs
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow raises for a broken file
LATE_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # of a PNG; they may tell its orientation behind its pixels
KEY_SCALES = {"L;2": lambda x: x * 85, "L;4": lambda x: x * 17, "RGB;16B": lambda x: tuple(v >> 8 for v in x)}
KEPT_BYTES = 2**31  # of the inputs of images that were used last

Source = str | bytes | Image.Image  # a path, what a file holds, or an image


class Known(NamedTuple):
    """An image of the data."""

    source: Source
    width: int
    height: int


class Tokens(NamedTuple):
    """What a processor makes of an image in a text."""

    before: str  # text in front of the tokens
    ids: tuple[int, ...]
    after: str


_known: list[Known] = [Known(Image.new("RGB", (28, 28)), 28, 28)]  # image 0 is for ranks that have no other
_numbers: dict[Any, int] = {}  # by path or hash of the content
_most = [0]  # images in a row
_processors: dict[str, ProcessorMixin] = {}  # by model; the one that was asked for last stands last
_inputs: dict[tuple[ProcessorMixin, int], dict[str, torch.Tensor]] = {}  # the last ones that were used


def in_use() -> bool:
    """Whether the data of this process has images: the same on all ranks."""
    return len(_known) > 1


def most_in_row() -> int:
    """The most images that a row has."""
    return _most[0]


def check(row: dict[str, Any], where: str, folder: Path) -> list[int]:
    """The numbers of a row's `images`: paths (as they are, or from the `folder` of the data file), dicts with `bytes`,
    `path` or `image`, or PIL images. Raises ValueError naming the row for one that is not there or cannot be read.
    """
    given = row["images"] if isinstance(row["images"], list) else [row["images"]]
    _most[0] = max(_most[0], len(given))
    return [_number(x, f"{where}: images[{i}]", folder) for i, x in enumerate(given)]


def _number(given: Any, where: str, folder: Path) -> int:
    if isinstance(given, dict):
        given = next((x for name in ("bytes", "image", "path") if (x := given.get(name)) is not None), given)
    if isinstance(given, str):
        path = Path(given.removeprefix("file://"))
        given = str(path if path.is_file() or path.is_absolute() else folder / path)
        if not os.path.isfile(given):
            raise ValueError(f"{where}: no such file {given}; give its path, or put its bytes into the data")
    elif not isinstance(given, (bytes, Image.Image)):
        kind = f"{given!r:.100} ({type(given).__name__})"
        raise ValueError(f'{where} is {kind}; it must be a path, a dict with "bytes" or "path", or a PIL image')
    key = hashlib.sha256(given).digest() if isinstance(given, bytes) else given if isinstance(given, str) else id(given)
    if key not in _numbers:
        try:
            image = _open(given)
            if image.width * image.height > MAX_PIXELS:
                size = f"{image.width} x {image.height} pixels, over {MAX_PIXELS:,}"
                raise ValueError(f"{where} has {size}, as a decompression bomb has; make it smaller, or drop the row")
            size = _upright_size(image, given)
        except UNREADABLE as error:
            raise ValueError(f"{where} cannot be read as an image ({error}); write it again, or drop the row") from None
        _numbers[key] = len(_known)
        _known.append(Known(given, *size))
    return _numbers[key]


def _open(source: Source) -> Image.Image:
    """An image whose pixels are not decoded yet."""
    if isinstance(source, Image.Image):
        return source
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


def _load(image: Image.Image) -> None:
    """Decode the pixels. Pillow makes 8 bits of those of some PNGs, but not of the color that is transparent there."""
    packing = "".join(str(x.args) for x in getattr(image, "tile", ())[:1])  # how the file has pixels, such as L;4
    image.load()
    if packing in KEY_SCALES and "transparency" in image.info:
        image.info["transparency"] = KEY_SCALES[packing](image.info["transparency"])


def _upright_size(image: Image.Image, source: Source) -> tuple[int, int]:
    """Width and height of what `rgb` makes of an image. Only an image whose head does not tell is decoded for it."""
    if image.format == "PNG":
        content = Path(source).read_bytes() if isinstance(source, str) else source
        if isinstance(source, Image.Image) or any(name in content for name in LATE_CHUNKS):
            _load(image)
    is_turned = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1) >= 5
    return image.size[::-1] if is_turned and image.format != "TIFF" else image.size  # Pillow has turned that of a TIFF


def rgb(source: Source) -> Image.Image:
    """An image as its author means it to be seen, which is what the trainer, the engine and every processor get.

    It is upright, as its EXIF orientation says. Where it is transparent it shows white. It has 8 bits per channel: with
    v a number of a deeper image, and top its largest possible number, 65,535 for 16 bits, a channel is
    round(255 v / top). Of 32-bit numbers, which have no such range, top is the first of 1 (for floats), 255 and 65,535
    that none is above. Of an animation it is the first frame.

    Raises ValueError for numbers below 0 or above 65,535, and what Pillow raises for a broken file (UNREADABLE).
    """
    image = _open(source)
    form = image.format
    _load(image)
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _in_8_bits(image, has_16=image.mode.startswith("I;16") or form in ("PNG", "PPM"))
    image = image.convert("LA") if image.mode == "La" else image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def _in_8_bits(image: Image.Image, *, has_16: bool) -> Image.Image:
    """Grey numbers of 16 or 32 bits as an image of 8, see `rgb`, with a second channel if one is transparent."""
    values = np.asarray(image).astype(np.float64)
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= 65535):
        raise ValueError(f"its numbers go from {low:g} to {high:g}; save it with 8 or 16 bits per channel")
    top = 65535 if has_16 else next(x for x in (1, 255, 65535) if high <= x and (x > 1 or image.mode == "F"))
    grey = Image.fromarray((values * 255 / top).round().astype(np.uint8))
    if (key := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def check_pixels(places: dict[int, str]) -> None:
    """Decode images, given by number with the place in the data; of several ranks, each decodes some. Raises ValueError
    naming the place of one that is broken.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))

    def decode(item: tuple[int, str]) -> None:
        try:
            picture(item[0])
        except UNREADABLE as error:
            raise ValueError(f"{item[1]} is a broken image ({error}); write it again, or drop the row") from error

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # decoding lets go of Python's lock
        list(threads.map(decode, sorted(places.items())[rank::size]))  # raises what `decode` does


def picture(number: int) -> Image.Image:
    """Image `number`, see `rgb`."""
    return rgb(_known[number].source)


# ---------------------------------------------------------------------------------------------------------------------
# The model's own processor


def load_processor(model: str, tokenizer: PreTrainedTokenizerBase, where: str) -> ProcessorMixin:
    """The processor of a model. Raises ValueError, naming the row and --model, if it has none or reads no images."""
    if model not in _processors:
        config = AutoConfig.from_pretrained(model)
        if not hasattr(config, "vision_config"):
            what = f"{where}: has images, and --model {model} ({config.model_type}) reads text only"
            raise ValueError(f"{what}; use a model that sees, or leave such rows out")
        try:
            _processors[model] = _without_videos(model, tokenizer, config)
            # what a model replaces by features of an image; older configs have the other name
            own = getattr(config, "image_token_id", None) or config.image_token_index
            _processors[model].feature_token_id = own
        except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{where}: has images, and --model {model} has no processor that can be loaded ({reason}); give a "
                "folder with processor_config.json or preprocessor_config.json, or install what is missing"
            ) from error
    _processors[model] = _processors.pop(model)
    return processor()


def _without_videos(model: str, tokenizer: PreTrainedTokenizerBase, config: Any) -> ProcessorMixin:
    """A processor whose part for videos, which wants torchvision, is left out: there are no videos here."""
    if type(config) not in PROCESSOR_MAPPING:
        return AutoProcessor.from_pretrained(model)
    kind = PROCESSOR_MAPPING[type(config)]
    image_processor = AutoImageProcessor.from_pretrained(model)

    def parts(cls, *args: Any, **kwargs: Any) -> list[Any]:
        return [
            image_processor if name == "image_processor" else tokenizer if "tokenizer" in name else None
            for name in cls.get_attributes()
        ]

    own = dict(
        _get_arguments_from_pretrained=classmethod(parts), check_argument_for_proper_class=lambda self, *args: None
    )
    return type(kind.__name__, (kind,), own).from_pretrained(model)


def processor() -> ProcessorMixin:
    """The one that was asked for last: a run has one."""
    return next(reversed(_processors.values()))


@functools.lru_cache(None)
def _tokens_of_size(processor: ProcessorMixin, width: int, height: int) -> Tokens:
    blank = Image.new("RGB", (width, height))
    found = processor(text=[processor.image_token], images=[blank], add_special_tokens=False)["input_ids"][0]
    tokenizer = processor.tokenizer
    special = [i for i, token in enumerate(found) if token in tokenizer.added_tokens_decoder]
    start, end = special[0], special[-1] + 1
    return Tokens(tokenizer.decode(found[:start]), tuple(found[start:end]), tokenizer.decode(found[end:]))


def tokens(number: int) -> Tokens:
    """What stands in a text for image `number`."""
    return _tokens_of_size(processor(), *_known[number][1:])


def inputs(number: int) -> dict[str, torch.Tensor]:
    """What a model gets to see of image `number`, such as `pixel_values`, on the host."""
    key = processor(), number
    if key not in _inputs:
        found = processor().image_processor(images=[picture(number)], return_tensors="pt")
        unused = getattr(processor(), "unused_input_names", ())
        _inputs[key] = {name: x for name, x in found.items() if name not in unused}
        while len(_inputs) > 1 and sum(x.nbytes for xs in _inputs.values() for x in xs.values()) > KEPT_BYTES:
            del _inputs[next(iter(_inputs))]
    _inputs[key] = _inputs.pop(key)  # now the last one
    return _inputs[key]


# ---------------------------------------------------------------------------------------------------------------------
# Texts and token ids


def in_parts(messages: Sequence[dict]) -> list[dict]:
    """Messages whose contents are lists of parts where a text has `<image>`, as chat templates want them: texts, and
    images in these places.
    """
    found = []
    for message in messages:
        texts, parts = message["content"].split(PLACE), []
        for i, text in enumerate(texts):
            parts += [{"type": "image"}] if i else []
            parts += [{"type": "text", "text": text}] if text else []
        found.append(message | {"content": parts if len(texts) > 1 else message["content"]})
    return found


def fill(text: str, numbers: Sequence[int]) -> str:
    """The text of a chat template with what belongs in front of and behind its images."""
    token = processor().image_token
    first, *rest = text.split(token)
    around = [tokens(k) for k in numbers] + [Tokens("", (), "")] * len(rest)
    return first + "".join(x.before + token + x.after + piece for x, piece in zip(around, rest, strict=False))


def place(
    ids: Sequence[int], numbers: Sequence[int], where: str, mask: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Token ids with those of images where the chat template has a token for each, and their mask, 0 for images. Raises
    ValueError, naming the row, if there are more or fewer such places than images.
    """
    token = processor().tokenizer.convert_tokens_to_ids(processor().image_token)
    if (count := list(ids).count(token)) != len(numbers):
        problem = f"has {len(numbers)} image(s), and its messages {count} place(s) for them"
        fix = f"write {PLACE} for each image, in their order, or mend the column images"
        raise ValueError(f"{where}: {problem}; {fix}")
    rest, found, kept = iter(numbers), [], []
    for token_id, is_learned in zip(ids, mask or [0] * len(ids), strict=True):
        k = next(rest) if token_id == token else None
        own = [token_id] if k is None else [FIRST + k] * len(tokens(k).ids)
        found += own
        kept += [is_learned if k is None else 0] * len(own)
    return found, kept


def collapsed(ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Token ids with one token for each image, as a chat template has it, and the numbers of the images."""
    numbers = []
    if not in_use() or max(ids, default=0) < FIRST:
        return list(ids), numbers
    found, token = [], processor().tokenizer.convert_tokens_to_ids(processor().image_token)
    for kind, group in itertools.groupby(ids):
        count = len(list(group))
        if kind >= FIRST:
            count //= len(tokens(kind - FIRST).ids)
            numbers += [kind - FIRST] * count
        found += [token if kind >= FIRST else kind] * count
    return found, numbers


def runs(ids: Sequence[int] | np.ndarray | torch.Tensor) -> Iterator[tuple[int, int]]:
    """(number, how often) of the images in token ids (n,), in their order."""
    found = torch.as_tensor(np.asarray(ids))
    kinds, counts = found[found >= FIRST].unique_consecutive(return_counts=True)
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        yield kind - FIRST, count // len(tokens(kind - FIRST).ids)


def expanded(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Token ids of any shape -> those that a model knows, where it sees an image's features, and the numbers of the
    images.
    """
    own = ids >= FIRST
    if not own.any():
        return ids, own, []
    numbers = [k for k, count in runs(ids[own].cpu()) for _ in range(count)]
    real = torch.tensor([token for k in numbers for token in tokens(k).ids], dtype=ids.dtype)
    features = torch.zeros_like(own)
    features[own] = (real == processor().feature_token_id).to(ids.device)
    found = ids.clone()
    found[own] = real.to(ids.device)
    return found, features, numbers
