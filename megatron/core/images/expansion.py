"""What stands in a text for an image: places of its tiles, with the words that a model has around them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.vision import VisionConfig
from megatron.core.images.tiles import Grid

MARKER = "<image>"
"""Stands for an image in texts of data sets and prompts."""
_AROUND = {"nvlm": ("<Image>", "</Image>"), "internvl": ("<img>", "</img>")}


def expansion(grid: Grid, vision: VisionConfig) -> Iterator[str | None]:
    """Words, and None for the places of each tile, in order.

    ``--image-tag-type`` puts words around an image, ``--use-tile-tags`` one before each tile.
    """
    before, after = _AROUND[vision.image_tag_type] if vision.image_tag_type else ("", "")
    if before:
        yield before
    for tile in range(1, grid.tiles + 1):
        if vision.use_tile_tags:
            is_whole = tile == grid.tiles and (grid.thumbnail or grid.tiles == 1)
            yield "<tile_global_thumbnail>" if is_whole else f"<tile_{tile}>"
        yield None
    if after:
        yield after
