"""Pictures as the tiles that an encoder reads: resized whole, or cut into a grid of tiles that fits their shape.

All of it is a pure function of the pixels and the settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron.config.vision import VisionConfig
from megatron.core.images.decoding import MOST_PIXELS, pillow

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Grid:
    """Tiles of a picture, row by row. ``thumbnail``: whether the whole picture is one more, after the others."""

    columns: int
    rows: int
    thumbnail: bool = False

    @property
    def tiles(self) -> int:
        """Number of tiles, with the thumbnail."""
        return self.columns * self.rows + self.thumbnail


@lru_cache(maxsize=64)
def _candidates(most: int) -> list[tuple[int, int]]:
    """Grids of up to ``most`` tiles as columns and rows, the smaller ones first."""
    found = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return sorted(found, key=lambda grid: (grid[0] * grid[1], grid))


def grid_of(width: int, height: int, vision: VisionConfig) -> Grid:
    """The grid for a picture of this size (InternVL 1.5, arXiv:2404.16821).

    Of all grids of up to ``--max-num-tiles`` tiles it is that of the nearest ratio of width to height. Of several of
    the same ratio it is the largest that the picture fills at least to a half.
    """
    if not vision.use_tiling:
        return Grid(1, 1)
    ratio, tile = width * vision.img_h / (height * vision.img_w), vision.img_h * vision.img_w
    best, nearest = (1, 1), float("inf")
    for columns, rows in _candidates(vision.max_num_tiles):
        away = abs(ratio - columns / rows)
        if away < nearest or (away == nearest and 2 * width * height > tile * columns * rows):
            best, nearest = (columns, rows), away
    columns, rows = best
    return Grid(columns, rows, thumbnail=vision.use_thumbnail and columns * rows > 1)


def tiles_of(image: Image, vision: VisionConfig) -> NDArray[np.uint8]:
    """Tiles ``[t, 3, H, W]`` of an RGB picture, resized by bicubic interpolation.

    One tile is made as ``--image-fit`` says; a grid of several is filled by the whole picture, whose ratio it nearly
    has.
    """
    grid, height, width = grid_of(*image.size, vision), vision.img_h, vision.img_w
    if not vision.use_tiling:
        return _as_tiles(_fitted(image, vision), height, width)
    bicubic = pillow().Resampling.BICUBIC
    whole = _as_tiles(image.resize((grid.columns * width, grid.rows * height), bicubic), height, width)
    if not grid.thumbnail:
        return whole
    return np.concatenate([whole, _as_tiles(image.resize((width, height), bicubic), height, width)])


def _fitted(image: Image, vision: VisionConfig) -> Image:
    """A picture of any shape as one tile, in whole pixels as transformers' processors make them."""
    wanted = vision.img_w, vision.img_h
    if vision.image_fit == "crop":
        return _cropped(image, wanted)
    if vision.image_fit == "pad":
        return _padded(image, wanted, color=tuple(int(255 * each) for each in vision.kind.mean))
    return image.resize(wanted, pillow().Resampling.BICUBIC)


def _cropped(image: Image, wanted: tuple[int, int]) -> Image:
    """The middle of a picture whose shorter side fits. Of a very thin one that is resized alone."""
    (width, height), bicubic = image.size, pillow().Resampling.BICUBIC
    is_tall = width * wanted[1] <= height * wanted[0]
    size = (wanted[0], wanted[0] * height / width) if is_tall else (wanted[1] * width / height, wanted[1])
    if size[0] * size[1] > MOST_PIXELS:
        scale = min(width / wanted[0], height / wanted[1])
        x, y = (width - wanted[0] * scale) / 2, (height - wanted[1] * scale) / 2
        box = (max(x, 0.0), max(y, 0.0), min(width - x, width), min(height - y, height))
        return image.resize(wanted, bicubic, box=box)
    resized = image.resize((int(size[0]), int(size[1])), bicubic)
    left, top = (resized.width - wanted[0]) // 2, (resized.height - wanted[1]) // 2
    return resized.crop((left, top, left + wanted[0], top + wanted[1]))


def _padded(image: Image, wanted: tuple[int, int], *, color: tuple[int, ...]) -> Image:
    """A picture between bars of a color. A very thin one is resized before it gets them."""
    image_module = pillow()
    (width, height), bicubic = image.size, image_module.Resampling.BICUBIC
    is_tall = width * wanted[1] <= height * wanted[0]
    whole = (
        (round(height * wanted[0] / wanted[1]), height) if is_tall else (width, round(width * wanted[1] / wanted[0]))
    )
    if whole[0] * whole[1] > MOST_PIXELS:
        scale = min(wanted[0] / width, wanted[1] / height)
        image, whole = image.resize((max(1, round(width * scale)), max(1, round(height * scale))), bicubic), wanted
    canvas: Image = image_module.new("RGB", whole, color)
    canvas.paste(image, ((whole[0] - image.width) // 2, (whole[1] - image.height) // 2))
    return canvas.resize(wanted, bicubic)


def _as_tiles(image: Image, height: int, width: int) -> NDArray[np.uint8]:
    """A picture whose sides are whole numbers of tiles, as ``[t, 3, H, W]``, row by row."""
    rows, columns = image.height // height, image.width // width
    tiles = np.empty((rows, columns, 3, height, width), np.uint8)
    for channel, pixels in enumerate(image.split()):  # Pillow takes colors apart several times as fast as numpy
        grid = np.asarray(pixels).reshape(rows, height, columns, width)
        tiles[:, :, channel] = grid.transpose(0, 2, 1, 3)
    return tiles.reshape(-1, 3, height, width)
