"""Images of strangers: each is read right, or refused in one sentence."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.core.images.decoding import decoded
from megatron.errors import DataError
from tests.harness.sentences import expect_error

WHITE, BLACK, RED, BLUE = (255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 0, 255)


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _photo(width: int = 40, height: int = 30) -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def _turned(orientation: int) -> bytes:
    """What a camera writes that was held so: the picture on its side, and how to turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270, 2: Image.Transpose.FLIP_LEFT_RIGHT}
    return _saved(_photo().transpose(undo[orientation]), "PNG", exif=exif)


def _palette(transparent: bool) -> bytes:
    image = _photo().quantize(4)
    darkest = image.getpixel((0, 0))
    return _saved(image, "PNG", **({"transparency": darkest} if transparent else {}))


def _over(mode: str, value: tuple[int, ...]) -> bytes:
    return _saved(Image.new(mode, (4, 4), value), "PNG")


GREY_16 = np.array([[0, 128, 32896, 65535]], np.uint16)
RIGHT: dict[str, tuple[Callable[[], bytes], list[tuple[int, int, int]]]] = {
    "a name says nothing": (lambda: _saved(_photo(), "BMP"), [RED, BLUE]),
    "CMYK": (lambda: _saved(_photo().convert("CMYK"), "TIFF"), [RED, BLUE]),
    "grey of 16 bits": (lambda: _saved(Image.fromarray(GREY_16), "PNG"), [BLACK, WHITE]),
    "grey": (lambda: _saved(Image.new("L", (4, 4), 128), "PNG"), [(128,) * 3, (128,) * 3]),
    "one bit": (lambda: _saved(Image.new("1", (4, 4), 1), "PNG"), [WHITE, WHITE]),
    "palette": (lambda: _palette(transparent=False), [RED, BLUE]),
    "palette with a transparent color": (lambda: _palette(transparent=True), [WHITE, BLUE]),
    "transparent": (lambda: _over("RGBA", (9, 9, 9, 0)), [WHITE, WHITE]),
    "half transparent": (lambda: _over("LA", (0, 127)), [(128,) * 3, (128,) * 3]),
    "turned by a quarter": (lambda: _turned(6), [RED, BLUE]),
    "turned the other way": (lambda: _turned(8), [RED, BLUE]),
    "mirrored": (lambda: _turned(2), [RED, BLUE]),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_every_kind_of_picture_has_the_colors_that_people_see(kind: str) -> None:
    """Files that Pillow itself converts to black, white, or a picture on its side."""
    make, (left, right) = RIGHT[kind]
    image = decoded(make())
    width, height = image.size
    assert image.mode == "RGB" and width >= height
    assert image.getpixel((0, height - 1)) == left and image.getpixel((width - 1, 0)) == right


def test_sixteen_bits_are_rounded_to_eight() -> None:
    """Pillow's own conversion makes white of everything above 255."""
    grey = np.asarray(decoded(_saved(Image.fromarray(GREY_16), "PNG")))[0, :, 0]
    assert grey.tolist() == [0, 0, 128, 255]


def _animated() -> bytes:
    frames = [Image.new("L", (8, 8), value) for value in (0, 100, 200)]
    return _saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _bomb(width: int, height: int) -> bytes:
    """A PNG of one color, small in the file."""

    def chunk(name: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(name + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + name + content + crc

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _noise(kind: str) -> bytes:
    """A picture whose file is long enough to be cut."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    return _saved(Image.fromarray(pixels), kind)


REFUSED: dict[str, tuple[Callable[[], bytes], tuple[str, ...]]] = {
    "empty": (lambda: b"", ("no bytes",)),
    "no image": (lambda: b"#!/bin/sh\nexit 1\n", ("PNG or JPEG",)),
    "drawn by a program": (
        lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%id) (w) file\n",
        ("PNG or JPEG",),
    ),
    "cut JPEG": (lambda: _noise("JPEG")[:-2000], ("copy the file again",)),
    "cut PNG": (lambda: _noise("PNG")[:-2000], ("copy the file again",)),
    "cut header": (lambda: _noise("PNG")[:20], ("copy the file again",)),
    "cut GIF": (lambda: _saved(_photo(200, 200), "GIF")[:-40], ("copy the file again",)),
    "cut BMP": (lambda: _noise("BMP")[:-100], ("copy the file again",)),
    "cut TIFF": (lambda: _noise("TIFF")[:300], ("copy the file again",)),
    "cut WEBP": (lambda: _noise("WEBP")[:-500], ("copy the file again",)),
    "damaged": (
        lambda: (whole := _noise("PNG"))[:200] + bytes(50) + whole[250:],
        ("copy the file again",),
    ),
    "of no size": (lambda: _bomb(0, 5), ("PNG or JPEG",)),
    "animated": (_animated, ("3 pictures",)),
    "bomb": (lambda: _bomb(10_000, 8_000), ("10,000 x 8,000",)),
    "large bomb": (lambda: _bomb(2**30, 2**30), ("67,108,864",)),
    "a line": (lambda: _bomb(70_000, 1), ("65,536",)),
    "grey without a range": (lambda: _saved(Image.new("F", (4, 4), 0.5), "TIFF"), ("mode F",)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_whole_picture_is_refused(kind: str) -> None:
    """A damaged picture trained on as black, or a bomb that takes the machine's memory, would go unnoticed."""
    make, words = REFUSED[kind]
    with expect_error(DataError, *words):
        decoded(make())


def test_what_precedes_the_pixels_may_be_damaged() -> None:
    """Many photos have EXIF data that say nothing; their pixels are whole."""
    broken = b"Exif\x00\x00MM\x00*\x00\x00\xff\xff"
    file = io.BytesIO()
    _photo().save(file, "JPEG", exif=broken)
    assert decoded(file.getvalue()).size == (40, 30)
