"""Images as numbers among token ids, and what the model's own processor makes of them.

An image is read once and gets a number k. In `prompt_ids` each of its tokens has the id FIRST + k, which is in no
vocabulary. So prompts with different images differ, a placeholder that the policy samples is text, and the ids of a
sample are all that engines and ranks need. Every process reads the same files in the same order and has the same
numbers. What a number stands for is decoded when a model or an engine needs it.

The processor says which tokens an image becomes, and what the model gets to see of it.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from extras.images import FIRST
from extras.images.pixels import UNREADABLE, Source, content, opened, rgb, upright_size

MAX_PIXELS = 2**26  # of an image file. More may be a decompression bomb.
INPUT_BYTES = 2**31  # of the inputs of images that are kept, those that were used last


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


class Images:
    """The images of the rows that a process has read. It is true if there are any, on all ranks alike."""

    def __init__(self):
        self.known = [Known(Image.new("RGB", (28, 28)), 28, 28)]  # image 0 is for ranks that have no other
        self.most_in_row = 0
        self._numbers: dict[Any, int] = {}  # by path, hash of the content, or id of a PIL image
        self._unchecked: dict[int, str] = {}  # numbers of images that `check_pixels` has to decode, with their places
        self.model, self.processor = "", None  # from `load_processor`
        self.token_id = -1  # what stands for an image where a chat template has written it
        self._tokens: dict[tuple[int, int], Tokens] = {}  # by width and height
        self._inputs: dict[int, dict[str, torch.Tensor]] = {}  # by number, those used last at the end

    def __bool__(self) -> bool:
        return len(self.known) > 1

    def read(self, column: Any, where: str, folder: Path) -> list[int]:
        """The numbers of the images in a row's column: paths (as they are, or from the `folder` of the data file),
        dicts with `bytes`, `path` or `image`, or PIL images, one or a list. Raises ValueError naming the row for one
        that is not there or cannot be read.
        """
        sources = column if isinstance(column, list) else [column]
        self.most_in_row = max(self.most_in_row, len(sources))
        places = [f"{where}: images[{i}]" for i in range(len(sources))]
        numbers = [self._number(x, place, folder) for x, place in zip(sources, places, strict=True)]
        self._unchecked |= zip(numbers, places, strict=True)
        return numbers

    def _number(self, source: Any, where: str, folder: Path) -> int:
        if isinstance(source, dict):
            source = next((x for name in ("bytes", "image", "path") if (x := source.get(name)) is not None), source)
        if isinstance(source, str):
            path = Path(source.removeprefix("file://"))
            source = str(path if path.is_file() or path.is_absolute() else folder / path)
            if not os.path.isfile(source):
                raise ValueError(f"{where}: no such file {source}; give its path, or put its bytes into the data")
        elif not isinstance(source, (bytes, Image.Image)):
            kind = f"{source!r:.100} ({type(source).__name__})"
            raise ValueError(f'{where} is {kind}; it must be a path, a dict with "bytes" or "path", or a PIL image')
        is_bytes, is_path = isinstance(source, bytes), isinstance(source, str)
        key = hashlib.sha256(source).digest() if is_bytes else source if is_path else id(source)
        if key not in self._numbers:
            self._numbers[key] = len(self.known)
            self.known.append(_measured(source, where))
        return self._numbers[key]

    def encoded(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """What the files of these images hold, by number, for `learn` of another process."""
        return {k: content(self.known[k].source) for k in numbers}

    def expect(self, count: int, most_in_row: int) -> None:
        """Be ready for the numbers of a process that has read `count` images, image 0 among them, and up to
        `most_in_row` in a row. What they stand for comes by `learn`.
        """
        self.known, self.most_in_row = [self.known[0]] * count, most_in_row

    def learn(self, encoded: Mapping[int, bytes]) -> None:
        """Take what another process has encoded. Its numbers are below `count` of `expect`."""
        for k, source in encoded.items():
            self.known[k] = _measured(source, f"image {k}")

    def check_pixels(self) -> None:
        """Decode the images that were read since the last call. Of several ranks, each decodes some. Raises ValueError
        naming the place of one that is broken.
        """
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        places, self._unchecked = sorted(self._unchecked.items()), {}

        def decode(item: tuple[int, str]) -> None:
            try:
                self.picture(item[0])
            except UNREADABLE as error:
                raise ValueError(f"{item[1]} is a broken image ({error}); write it again, or drop the row") from error

        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:  # decoding lets go of Python's lock
            list(threads.map(decode, places[rank::size]))  # raises what `decode` does

    def picture(self, number: int) -> Image.Image:
        """Image `number`, see `pixels.rgb`."""
        return rgb(self.known[number].source)

    # -----------------------------------------------------------------------------------------------------------------
    # The model's own processor

    def load_processor(self, model: str, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
        """Use the processor of a model from now on. Raises ValueError, naming the row and --model, if it has none or
        reads no images.
        """
        if self.model == model:
            return
        config = AutoConfig.from_pretrained(model)
        if not hasattr(config, "vision_config"):
            what = f"{where}: has images, and --model {model} ({config.model_type}) reads text only"
            raise ValueError(f"{what}; use a model that sees, or leave such rows out")
        try:
            processor = _without_videos(model, tokenizer, config)
            # what a model replaces by features of an image. Older configs have the other name
            processor.feature_token_id = getattr(config, "image_token_id", None) or config.image_token_index
        except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{where}: has images, and --model {model} has no processor that can be loaded ({reason}); give a "
                "folder with processor_config.json or preprocessor_config.json, or install what is missing"
            ) from error
        self.model, self.processor, self._tokens, self._inputs = model, processor, {}, {}
        self.token_id = processor.tokenizer.convert_tokens_to_ids(processor.image_token)

    def tokens(self, number: int) -> Tokens:
        """What stands in a text for image `number`."""
        _, width, height = self.known[number]
        if (width, height) not in self._tokens:
            blank, tokenizer = Image.new("RGB", (width, height)), self.processor.tokenizer
            text = [self.processor.image_token]
            ids = self.processor(text=text, images=[blank], add_special_tokens=False)["input_ids"][0]
            special = [i for i, token in enumerate(ids) if token in tokenizer.added_tokens_decoder]
            start, end = special[0], special[-1] + 1
            before, after = tokenizer.decode(ids[:start]), tokenizer.decode(ids[end:])
            self._tokens[width, height] = Tokens(before, tuple(ids[start:end]), after)
        return self._tokens[width, height]

    def inputs(self, number: int) -> dict[str, torch.Tensor]:
        """What a model gets to see of image `number`, such as `pixel_values`, on the host."""
        if number not in self._inputs:
            made = self.processor.image_processor(images=[self.picture(number)], return_tensors="pt")
            unused = getattr(self.processor, "unused_input_names", ())
            self._inputs[number] = {name: x for name, x in made.items() if name not in unused}
            while len(self._inputs) > 1 and self._num_bytes() > INPUT_BYTES:
                del self._inputs[next(iter(self._inputs))]
        self._inputs[number] = self._inputs.pop(number)  # now the last one
        return self._inputs[number]

    def _num_bytes(self) -> int:
        return sum(x.nbytes for inputs in self._inputs.values() for x in inputs.values())

    # -----------------------------------------------------------------------------------------------------------------
    # Token ids

    def without_repeats(self, ids: Sequence[int]) -> list[int]:
        """Token ids with one id for each image."""
        result, place = [], 0
        while place < len(ids):
            result.append(ids[place])
            place += 1 if ids[place] < FIRST else len(self.tokens(ids[place] - FIRST).ids)
        return result

    def collapsed(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Token ids with one token for each image, as a chat template has it, and the numbers of the images."""
        short = self.without_repeats(ids)
        return [x if x < FIRST else self.token_id for x in short], [x - FIRST for x in short if x >= FIRST]

    def expanded(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Token ids of any shape -> those that a model knows, where it sees an image's features, and the numbers of
        the images.
        """
        is_image = ids >= FIRST
        if not is_image.any():
            return ids, is_image, []
        numbers = [x - FIRST for x in self.without_repeats(ids[is_image].tolist())]
        tokens = torch.tensor([token for k in numbers for token in self.tokens(k).ids], dtype=ids.dtype)
        features, expanded = torch.zeros_like(is_image), ids.clone()
        features[is_image] = (tokens == self.processor.feature_token_id).to(ids.device)
        expanded[is_image] = tokens.to(ids.device)
        return expanded, features, numbers


def _measured(source: Source, where: str) -> Known:
    """An image with its size, which only the head of its file has to tell. Raises ValueError naming the place."""
    try:
        image = opened(source)
        if image.width * image.height > MAX_PIXELS:
            size = f"{image.width} x {image.height} pixels, over {MAX_PIXELS:,}"
            raise ValueError(f"{where} has {size}, as a decompression bomb has; make it smaller, or drop the row")
        return Known(source, *upright_size(image, source))
    except UNREADABLE as error:
        raise ValueError(f"{where} cannot be read as an image ({error}); write it again, or drop the row") from None


def _without_videos(model: str, tokenizer: PreTrainedTokenizerBase, config: Any) -> ProcessorMixin:
    """A processor whose part for videos, which wants torchvision, is left out. There are no videos here."""
    if type(config) not in PROCESSOR_MAPPING:
        return AutoProcessor.from_pretrained(model)
    kind = PROCESSOR_MAPPING[type(config)]
    image_processor = AutoImageProcessor.from_pretrained(model)

    class WithoutVideos(kind):
        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            parts = {name: tokenizer for name in cls.get_attributes() if "tokenizer" in name}
            parts["image_processor"] = image_processor
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, *args: Any) -> None:
            """A part may be missing."""

    WithoutVideos.__name__ = kind.__name__  # transformers looks the parts up by it
    return WithoutVideos.from_pretrained(model)
