"""From the file of an image to the pixels that the trainer, the engine and every processor get."""

import io
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of Pillow. Others may start programs.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow raises for a broken file
LATE_CHUNKS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # of a PNG. They may tell its orientation after its pixels.
KEY_SCALES = {"L;2": lambda x: x * 85, "L;4": lambda x: x * 17, "RGB;16B": lambda x: tuple(v >> 8 for v in x)}

Source = str | bytes | Image.Image  # a path, what a file holds, or an image


def opened(source: Source) -> Image.Image:
    """An image whose pixels are not decoded yet."""
    if isinstance(source, Image.Image):
        return source
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


def content(source: Source) -> bytes:
    """What the file of an image holds. An image without a file becomes that of a PNG."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, str):
        return Path(source).read_bytes()
    file = io.BytesIO()
    source.save(file, "PNG")
    return file.getvalue()


def _load(image: Image.Image) -> None:
    """Decode the pixels. Pillow makes 8 bits of those of some PNGs, but not of the color that is transparent there."""
    packing = "".join(str(x.args) for x in getattr(image, "tile", ())[:1])  # how the file has pixels, such as L;4
    image.load()
    if packing in KEY_SCALES and "transparency" in image.info:
        image.info["transparency"] = KEY_SCALES[packing](image.info["transparency"])


def upright_size(image: Image.Image, source: Source) -> tuple[int, int]:
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
    image = opened(source)
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
