"""What stands in a text for an image: places of its features, with the words that a model has around them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron.config.vision import VisionConfig
from megatron.core.images.tiles import Grid

MARKER = "<image>"
"""Stands for an image in texts of data sets and prompts."""
ROW_END = -2
"""Stands, in place of a feature's number, where a row of patches ends: the projector has a learned vector for it."""
_AROUND = {"nvlm": ("<Image>", "</Image>"), "internvl": ("<img>", "</img>")}
_IN_TEXT = {"gemma3": ("\n\n<start_of_image>", "<end_of_image>\n\n")}
"""Words that are tokenized with the text around them, into which they may grow."""


def with_words(text: str, vision: VisionConfig, *, marker: str = MARKER) -> str:
    """A text with those words around each ``marker`` of an image that are tokenized with it."""
    before, after = _IN_TEXT.get(vision.image_tag_type or "", ("", ""))
    return text.replace(marker, f"{before}{marker}{after}")


def expansion(grid: Grid, vision: VisionConfig) -> Iterator[str | NDArray[np.int64]]:
    """Words, and runs of places with the numbers of the image's features that stand there, in order.

    ``--image-tag-type`` puts words around an image, ``--use-tile-tags`` one before each tile.
    """
    before, after = _AROUND.get(vision.image_tag_type or "", ("", ""))
    if before:
        yield before
    for tile, run in enumerate(feature_runs(grid, vision), 1):
        if vision.use_tile_tags:
            is_whole = tile == grid.tiles and (grid.thumbnail or grid.tiles == 1)
            yield "<tile_global_thumbnail>" if is_whole else f"<tile_{tile}>"
        yield run
    if after:
        yield after


def feature_runs(grid: Grid, vision: VisionConfig) -> list[NDArray[np.int64]]:
    """Numbers of an image's features, counted over its tiles, in the order of their places: a run for each tile.

    With ``--image-grids`` it is one run (LLaVA-NeXT): features of the whole picture, then those of the grid row by row
    across its tiles, without bars, each row with a ``ROW_END``.
    """
    per_tile = vision.features_per_tile
    if not grid.overview:
        return [np.arange(tile * per_tile, (tile + 1) * per_tile) for tile in range(grid.tiles)]
    high, wide = vision.grid
    within = np.arange(per_tile, (1 + grid.rows * grid.columns) * per_tile)
    square = within.reshape(grid.rows, grid.columns, high, wide).transpose(0, 2, 1, 3)
    rows = square.reshape(grid.rows * high, grid.columns * wide)
    shown = rows[grid.bar_rows : len(rows) - grid.bar_rows, grid.bar_columns : rows.shape[1] - grid.bar_columns]
    ended = np.pad(shown, ((0, 0), (0, 1)), constant_values=ROW_END)
    return [np.concatenate([np.arange(per_tile), ended.reshape(-1)])]
