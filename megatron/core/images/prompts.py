"""Images of prompts: their tiles, where these stand, and what the cache knows their places by."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron.config.vision import VisionConfig
from megatron.core.images.expansion import ROW_END
from megatron.core.images.tiles import Grid, grid_of, tiles_of

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class CutImage:
    """A picture as its ``tiles``, uint8 [t, 3, H, W], which lie as ``grid`` says."""

    tiles: NDArray[np.uint8]
    grid: Grid

    @classmethod
    def of(cls, picture: Image, vision: VisionConfig) -> CutImage:
        """An RGB picture, cut for a model's encoder."""
        return cls(tiles_of(picture, vision), grid_of(*picture.size, vision))


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of a prompt. ``tiles``: uint8 [t, 3, H, W]. ``places``: int64, for each token of the prompt the number of
    the feature that stands there, counted over all tiles, ``ROW_END``, or -1 for a word. ``features``: of a tile.
    """

    tiles: NDArray[np.uint8]
    places: NDArray[np.int64]
    features: int

    @cached_property
    def digest(self) -> str:
        """Hex digest of pixels and places."""
        return hashlib.blake2b(self.tiles.tobytes() + self.places.tobytes(), digest_size=16).hexdigest()

    def keyed(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's ids, with numbers in place of those that stand for features: the same for the same picture, and
        negative, so that they are no ids. By them the cache tells apart texts about different pictures.
        """
        digests = [hashlib.blake2b(tile.tobytes(), digest_size=8).digest() for tile in self.tiles]
        numbers = np.array([int.from_bytes(each, "big") >> 1 for each in digests], np.int64)
        tile, feature = np.divmod(self.places, self.features)
        found = np.asarray(prompt, np.int64)
        marks = self.places >= 0
        found[marks] = -1 - ((numbers[tile[marks]] + feature[marks]) & (2**63 - 1))
        found[self.places == ROW_END] = np.iinfo(np.int64).min
        return [int(each) for each in found]

    def tile_around(self, end: int) -> tuple[int, int]:
        """First place, and the one after the last, of the tile that has features both before and at place ``end``;
        ``end`` twice where there is none.
        """
        if not 0 < end < len(self.places):
            return end, end
        before, at = self.places[end - 1 : end + 1].tolist()
        if before < 0 or at != before + 1 or not at % self.features:
            return end, end
        first = end - at % self.features
        return first, first + self.features

    def runs(self) -> list[tuple[int, int]]:
        """First place, and the one after the last, of each run of features of one tile."""
        tiles = np.where(self.places >= 0, self.places // self.features, -1)
        ends = [0, *(np.flatnonzero(tiles[1:] != tiles[:-1]) + 1).tolist(), len(tiles)]
        return [(first, stop) for first, stop in itertools.pairwise(ends) if stop > first and tiles[first] >= 0]

    def within(self, start: int, end: int) -> PromptImages | None:
        """The part that stands at places from ``start`` up to ``end``, with those tiles alone; None without any."""
        places = self.places[start:end]
        marks = places >= 0
        if not (marks.any() or (places == ROW_END).any()):
            return None
        tile, feature = np.divmod(places, self.features)
        used, own = np.unique(tile[marks], return_inverse=True)
        moved = np.full(end - start, -1, np.int64)
        moved[: len(places)] = np.minimum(places, -1)
        moved[: len(places)][marks] = own * self.features + feature[marks]
        return PromptImages(self.tiles[used], moved, self.features)

    def to_array(self) -> NDArray[np.int64]:
        """Sizes, places, and pixels eight to a number: what goes to other ranks."""
        pixels = self.tiles.tobytes()
        padded = np.frombuffer(pixels + bytes(-len(pixels) % 8), np.int64)
        sizes = [self.features, len(self.places), len(self.tiles), *self.tiles.shape[2:]]
        return np.concatenate([np.array(sizes, np.int64), self.places, padded])

    @classmethod
    def from_array(cls, array: NDArray[np.int64]) -> PromptImages:
        """Images of a prompt from the array that ``to_array`` made."""
        features, length, count, height, width = array[:5].tolist()
        pixels = np.frombuffer(array[5 + length :].tobytes(), np.uint8)[: count * 3 * height * width]
        return cls(pixels.reshape(count, 3, height, width), array[5 : 5 + length], features)
