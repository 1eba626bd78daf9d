"""Pictures from the bytes of image files: RGB, upright and whole, or the reason why not.

What a file's name says doesn't matter, its bytes do. Formats that other programs draw (EPS, SVG, PDF) are not read, so
nothing in a file is executed.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read, as Pillow names them."""
MOST_BYTES = 1 << 28
MOST_PIXELS = 1 << 26
MOST_SIDE = 1 << 16
"""Bounds of a file, of a picture and of its sides. A picture of the most pixels takes 200 MB once it is decoded."""

_ORIENTATION = 0x0112
_ALONE = {"MPO"}  # JPEGs of some cameras: the first picture is the photo, others are previews of it


def pillow() -> Any:
    """The module ``PIL.Image``; raises ConfigError without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "reading images needs the Pillow library: pip install pillow, or pip install 'pretrain-megatron[images]'"
        ) from None
    return Image


def decoded(content: bytes, *, most_pixels: int = MOST_PIXELS) -> Image:
    """The picture in a file of these bytes: RGB of 8 bits, turned as its EXIF data say, on white where it is
    transparent.

    16-bit grey is scaled to 8 bits. Raises DataError whose sentence goes on after a name, such as "is empty": for what
    is no image of ``FORMATS``, is damaged or cut short, is larger than the bounds, has several pictures, or has pixels
    whose range isn't known.
    """
    image_module = pillow()
    if not content:
        raise DataError("is empty: the file has no bytes")
    try:
        with warnings.catch_warnings():  # Pillow warns of damage that it can read around, and of large pictures
            warnings.simplefilter("ignore")
            image: Image = image_module.open(io.BytesIO(content), formats=FORMATS)
            _check_size(image, most_pixels)
            _check_alone(image)
            image.load()
            return _upright(_rgb(image))
    except DataError:
        raise
    except image_module.UnidentifiedImageError:
        raise DataError(
            f"is no image that can be read: it is none of {', '.join(FORMATS)}, or its beginning is damaged; convert "
            "it to PNG or JPEG"
        ) from None
    except image_module.DecompressionBombError:
        raise DataError(f"has far more than the {most_pixels:,} pixels that are read: make it smaller") from None
    except Exception as error:  # decoders of damaged files raise anything
        reason = str(error) or type(error).__name__
        raise DataError(f"is damaged or cut short: {reason}; copy the file again") from None


def _check_size(image: Image, most_pixels: int) -> None:
    width, height = image.size
    if width * height > most_pixels or max(width, height) > MOST_SIDE:
        raise DataError(
            f"has {width:,} x {height:,} pixels, and at most {most_pixels:,} and sides of {MOST_SIDE:,} are read: make "
            "it smaller"
        )


def _check_alone(image: Image) -> None:
    frames = 1 if image.format in _ALONE else getattr(image, "n_frames", 1)
    if frames > 1:
        raise DataError(f"has {frames} pictures, and an image has one: save the picture that is meant")


def _rgb(image: Image) -> Image:
    """A loaded picture in RGB."""
    image_module = pillow()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.int64)
        return image_module.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")  # type: ignore[no-any-return]
    if image.mode in ("I", "F"):
        raise DataError(
            f"has pixels of 32 bits (mode {image.mode}), of which no file says what white is: convert it to 8 bits"
        )
    if image.has_transparency_data:
        white = image_module.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        return white.convert("RGB")  # type: ignore[no-any-return]
    return image if image.mode == "RGB" else image.convert("RGB")


def _upright(image: Image) -> Image:
    """The picture, turned as its camera was held."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF data say nothing, and the pixels are whole
        orientation = 1
    turn = pillow().Transpose
    turns = (
        *(None, None, turn.FLIP_LEFT_RIGHT, turn.ROTATE_180, turn.FLIP_TOP_BOTTOM),
        *(turn.TRANSPOSE, turn.ROTATE_270, turn.TRANSVERSE, turn.ROTATE_90),
    )
    way = turns[orientation] if orientation in range(len(turns)) else None
    return image if way is None else image.transpose(way)
