"""Pictures as the tiles that an encoder reads: resized whole, or cut into a grid of tiles that fits their shape.

All of it is a pure function of the pixels and the settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.vision import VisionConfig
from megatron.core.images.decoding import MOST_PIXELS, pillow

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Grid:
    """Tiles of a picture, row by row. ``thumbnail``: whether the whole picture is one more, after the others;
    ``overview``: before them. ``bar_rows``, ``bar_columns``: rows of patches above and as many below, and columns left
    and right, that show no picture and take no places.
    """

    columns: int
    rows: int
    thumbnail: bool = False
    overview: bool = False
    bar_rows: int = 0
    bar_columns: int = 0

    @property
    def tiles(self) -> int:
        """Number of tiles, with the whole picture where it is one more."""
        return self.columns * self.rows + self.thumbnail + self.overview


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
    if vision.image_grids:
        return _unpadded(width, height, vision)
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


def _unpadded(width: int, height: int, vision: VisionConfig) -> Grid:
    """The grid of ``--image-grids`` in which a picture keeps the most pixels, and of several the smallest (LLaVA-NeXT).

    The picture is resized until it touches two sides of the grid. Rows or columns of patches that show the bars at the
    other two take no places, as far as whole ones are equally many on both sides.
    """
    best, most = (0, 0), (-1, 0)
    for rows, columns in vision.grids:
        high, wide = rows * vision.img_h, columns * vision.img_w
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        if (kept, -high * wide) > most:
            best, most = (rows, columns), (kept, -high * wide)
    (rows, columns), (per_column, per_row) = best, vision.grid
    high, wide = rows * per_column, columns * per_row
    if width / height > wide / high:
        shown = int(round(height * (wide / width), 7))
        return Grid(columns, rows, overview=True, bar_rows=(high - shown) // 2)
    shown = int(round(width * (high / height), 7))
    return Grid(columns, rows, overview=True, bar_columns=(wide - shown) // 2)


def _between_bars(image: Image, wanted: tuple[int, int], vision: VisionConfig) -> Image:
    """A picture resized until it touches two sides, between black bars."""
    (width, height), image_module = image.size, pillow()
    by_width, by_height = wanted[0] / width, wanted[1] / height
    if by_width < by_height:
        size = wanted[0], min(math.ceil(height * by_width), wanted[1])
    else:
        size = min(math.ceil(width * by_height), wanted[0]), wanted[1]
    canvas: Image = image_module.new("RGB", wanted)
    resized = image.resize(size, _filter(vision))
    canvas.paste(resized, ((wanted[0] - size[0]) // 2, (wanted[1] - size[1]) // 2))
    return canvas


def tiles_of(image: Image, vision: VisionConfig) -> NDArray[np.uint8]:
    """Tiles ``[t, 3, H, W]`` of an RGB picture, resized as ``--image-resample`` says.

    One tile is made as ``--image-fit`` says; a grid of several is filled by the whole picture, whose ratio it nearly
    has. With ``--image-grids`` the picture is in the grid between bars, and whole in the first tile.
    """
    grid, height, width = grid_of(*image.size, vision), vision.img_h, vision.img_w
    if vision.image_grids:
        return np.concatenate(
            [
                _as_tiles(image.resize((width, height), _filter(vision)), height, width),
                _as_tiles(_between_bars(image, (grid.columns * width, grid.rows * height), vision), height, width),
            ]
        )
    if not vision.use_tiling:
        return _as_tiles(_fitted(image, vision), height, width)
    whole = _as_tiles(image.resize((grid.columns * width, grid.rows * height), _filter(vision)), height, width)
    if not grid.thumbnail:
        return whole
    return np.concatenate([whole, _as_tiles(image.resize((width, height), _filter(vision)), height, width)])


def _filter(vision: VisionConfig) -> Any:
    """Pillow's name of ``--image-resample``."""
    return pillow().Resampling[vision.image_resample.upper()]


def _fitted(image: Image, vision: VisionConfig) -> Image:
    """A picture of any shape as one tile, in whole pixels as transformers' processors make them."""
    wanted = vision.img_w, vision.img_h
    if vision.image_fit == "crop":
        return _cropped(image, wanted, _filter(vision))
    if vision.image_fit == "pad":
        color = tuple(int(255 * each) for each in vision.kind.mean)
        return _padded(image, wanted, _filter(vision), color=color)
    return image.resize(wanted, _filter(vision))


def _cropped(image: Image, wanted: tuple[int, int], resample: Any) -> Image:
    """The middle of a picture whose shorter side fits. Of a very thin one that is resized alone."""
    width, height = image.size
    is_tall = width * wanted[1] <= height * wanted[0]
    size = (wanted[0], wanted[0] * height / width) if is_tall else (wanted[1] * width / height, wanted[1])
    if size[0] * size[1] > MOST_PIXELS:
        scale = min(width / wanted[0], height / wanted[1])
        x, y = (width - wanted[0] * scale) / 2, (height - wanted[1] * scale) / 2
        box = (max(x, 0.0), max(y, 0.0), min(width - x, width), min(height - y, height))
        return image.resize(wanted, resample, box=box)
    resized = image.resize((int(size[0]), int(size[1])), resample)
    left, top = (resized.width - wanted[0]) // 2, (resized.height - wanted[1]) // 2
    return resized.crop((left, top, left + wanted[0], top + wanted[1]))


def _padded(image: Image, wanted: tuple[int, int], resample: Any, *, color: tuple[int, ...]) -> Image:
    """A picture between bars of a color. A very thin one is resized before it gets them."""
    image_module = pillow()
    width, height = image.size
    is_tall = width * wanted[1] <= height * wanted[0]
    whole = (
        (round(height * wanted[0] / wanted[1]), height) if is_tall else (width, round(width * wanted[1] / wanted[0]))
    )
    if whole[0] * whole[1] > MOST_PIXELS:
        scale = min(wanted[0] / width, wanted[1] / height)
        image, whole = image.resize((max(1, round(width * scale)), max(1, round(height * scale))), resample), wanted
    canvas: Image = image_module.new("RGB", whole, color)
    canvas.paste(image, ((whole[0] - image.width) // 2, (whole[1] - image.height) // 2))
    return canvas.resize(wanted, resample)


def _as_tiles(image: Image, height: int, width: int) -> NDArray[np.uint8]:
    """A picture whose sides are whole numbers of tiles, as ``[t, 3, H, W]``, row by row."""
    rows, columns = image.height // height, image.width // width
    tiles = np.empty((rows, columns, 3, height, width), np.uint8)
    for channel, pixels in enumerate(image.split()):  # Pillow takes colors apart several times as fast as numpy
        grid = np.asarray(pixels).reshape(rows, height, columns, width)
        tiles[:, :, channel] = grid.transpose(0, 2, 1, 3)
    return tiles.reshape(-1, 3, height, width)
