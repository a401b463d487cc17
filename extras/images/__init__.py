"""Images in the rows of the data: the column `images`, and `<image>` where one belongs in a message.

pixels.py reads files, images.py numbers the images of a process, and rows.py puts these numbers among the token ids of
a row. What the model does with them is extras/families/vision.py.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FIRST = 2**30  # id of the tokens of image 0, see images.py
PROCESSOR_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    "chat_template.json",
)


@functools.cache
def of_process() -> Any:
    """The images of this process, see `Images`. Readers of rows, models and engines have to mean the same images by a
    number, and an argument for them would go through every script, also those that train on texts.
    """
    from extras.images.images import Images

    return Images()


def in_use() -> bool:
    """Whether the data of this process has images. This is the same on all ranks."""
    return of_process.cache_info().currsize > 0 and bool(of_process())


def read(row: Mapping[str, Any], where: str, folder: Path) -> dict[str, list[int]]:
    """The column `images` of a row as numbers, or no column for a row without images, see `Images.read`."""
    return {"images": of_process().read(row["images"], where, folder)} if row.get("images") else {}


def check_pixels() -> None:
    """Raise ValueError naming the place of an image that is broken, of those that were read since the last call."""
    if in_use():
        of_process().check_pixels()


def of_row(tokenizer: Any, row: Mapping[str, Any]) -> Any:
    """The images of a row, see `rows.RowImages`, or None if it has none."""
    if not row.get("images"):
        return None
    from extras.images.rows import RowImages

    return RowImages(of_process(), tokenizer, row)


def refuse(rows: Iterable[Mapping[str, Any]], reader: str, fix: str = "leave such rows out") -> None:
    """Raise ValueError naming the first row with images, which `reader` (such as "the critic reads") cannot see."""
    if in_use() and (row := next((row for row in rows if row.get("images")), None)) is not None:
        from rl.data.rows import named

        raise ValueError(f"{named(row)}: has images, and {reader} text only; {fix}")


def processor_files(path: str) -> dict[str, Path]:
    """The files for a processor that the folder of a model has, by name."""
    from transformers.utils import cached_file

    calm = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    files = {name: cached_file(path, name, **calm) for name in PROCESSOR_FILES}
    return {name: Path(file) for name, file in files.items() if file}
