"""Samples of texts with images from token files: whole documents side by side, and the tiles of their images."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.vision import VisionConfig
from megatron.core.datasets.build import Part, ShortSplitError
from megatron.core.datasets.image_table import ImageTable, StoredImage
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.packing import BestFitOrder, PackedDataset
from megatron.core.datasets.samples import Sample
from megatron.core.images.decoding import decoded, pillow
from megatron.core.images.expansion import feature_runs
from megatron.core.images.tiles import grid_of, tiles_of
from megatron.core.models.vlm.fields import with_images
from megatron.errors import ConfigError, DataError


class ImageTextDataset(PackedDataset):
    """Samples of whole documents with their images, which are decoded as a sample is read.

    ``report``: what became of documents that are longer than a sample. The rest as in PackedDataset.
    """

    order: BestFitOrder

    def __init__(self, *args: Any, images: ImageTable, vision: VisionConfig, report: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._images, self._vision, self._report = images, vision, report

    @property
    @override
    def digest(self) -> str:
        """Hex digest of what determines the samples."""
        return digest_of(super().digest, self._images.digest, repr(self._vision.tile_settings))

    @override
    def sample(self, index: int) -> Sample:
        """The documents side by side, with their images' tiles in order."""
        sample, features = super().sample(index), self._vision.features_per_tile
        shape = (0, 3, self._vision.img_h, self._vision.img_w)
        tiles, places, start, number = [np.empty(shape, np.uint8)], np.full(len(sample["tokens"]), -1, np.int64), 0, 0
        for within, _, count in self.order.pieces(index):
            for image in self._images.of_document(self._first + within):
                tiles.append(self._tiles(image))
                runs = runs_of(self._images.stored(image), self._vision)
                for place, run in zip(self._images.places(image).tolist(), runs, strict=True):
                    numbered = np.where(run >= 0, run + number * features, run)
                    places[start + place : start + place + len(run)] = numbered
                number += len(tiles[-1])
            start += count
        return with_images(sample, np.concatenate(tiles), places)

    def _tiles(self, image: int) -> NDArray[np.uint8]:
        stored = self._images.stored(image)
        content = self._images.read(stored)
        try:
            picture = decoded(content)
            if picture.size != (stored.width, stored.height):
                raise DataError(f"is decoded to {picture.size} pixels and was to {(stored.width, stored.height)}")
        except DataError as error:
            raise DataError(f"{self._images.named(stored)} {error}") from None
        return tiles_of(picture, self._vision)

    @override
    def origin(self, index: int) -> str:
        """Documents of sample ``index``, and its images."""
        images = [
            self._images.named(self._images.stored(image))
            for within, _, _ in self.order.pieces(index)
            for image in self._images.of_document(self._first + within)
        ]
        return super().origin(index) + (f", images {', '.join(images)}" if images else "")

    @override
    def describe(self) -> list[str]:
        """The source, in a line."""
        return [f"{line}{self._report}" for line in super().describe()]


def runs_of(image: StoredImage, vision: VisionConfig) -> list[NDArray[np.int64]]:
    """Numbers of an image's features, in runs of neighboring places."""
    return feature_runs(grid_of(image.width, image.height, vision), vision)


def _last_runs(images: ImageTable, vision: VisionConfig) -> NDArray[np.int64] | int:
    """Places of the last run of each document's last image, any number without images."""
    if not vision.image_grids:
        return vision.features_per_tile
    sizes, inverse = np.unique(images.last_sizes, axis=0, return_inverse=True)
    lengths = [
        len(feature_runs(grid_of(width, height, vision), vision)[-1]) if width else 0
        for width, height in sizes.tolist()
    ]
    return np.array(lengths, np.int64)[inverse.reshape(-1)]


def image_dataset(
    part: Part,
    num_samples: int | None,
    *,
    data: DataConfig,
    vision: VisionConfig,
    seed: int,
    vocab_size: int,
    remedy: str,
) -> ImageTextDataset:
    """Samples of a part whose documents have images.

    A document that is longer than a sample loses the end of its text, but never an image: one whose images don't fit is
    left out. Raises ConfigError for settings that the data weren't made for, ShortSplitError where no document is left.
    """
    source, first = part.source, part.units.start
    images, length = source.images, data.seq_length
    assert images is not None, "the source has images"
    pillow()
    _check_settings(images, vision)
    if data.packing != "best-fit":
        raise ConfigError(
            f"--packing {data.packing} cuts documents wherever a sample ends, also within an image of {images.prefix}: "
            "give --packing best-fit"
        )
    lengths = np.array(source.documents.lengths[first : part.units.stop])
    needed = (images.last_places + _last_runs(images, vision))[first : part.units.stop]
    has_images = images.last_places[first : part.units.stop] >= 0
    left_out = has_images & (needed > length)
    kept = np.where(left_out, 0, np.minimum(lengths, length + 1)).astype(np.int32)
    if not np.any(kept > 1):
        shortest = f", whose images all need a larger --seq-length than {length}" if left_out.any() else ""
        raise ShortSplitError(
            f"{source.documents.prefix}: the {part.split} split has {len(lengths)} documents{shortest}: give "
            f"{f'--seq-length {int(needed[left_out].min())}' if left_out.any() else remedy}"
        )
    cut = int(np.count_nonzero(~left_out & (lengths > length + 1)))
    report = f", {cut:,} of {len(lengths):,} texts are cut at --seq-length {length}" if cut else ""
    if left_out.any():
        report += (
            f", {int(left_out.sum()):,} of {len(lengths):,} documents are left out, as their images don't fit into "
            f"--seq-length {length} ({int(needed.max())} takes all)"
        )
    order = BestFitOrder(
        kept, seed=seed, seq_length=length, num_samples=num_samples, cache=source.cache, copy=part.copy
    )
    return ImageTextDataset(
        source.documents,
        order,
        seq_length=length,
        first=first,
        vocab_size=None if source.ids_known else vocab_size,
        targets=source.targets,
        images=images,
        vision=vision,
        report=report,
    )


def _check_settings(images: ImageTable, vision: VisionConfig) -> None:
    """Raise ConfigError for data of other tiles than the run's."""
    for name, value in vision.tile_settings.items():
        if (made := images.settings.get(name)) != value:
            words = f"{name} {made}" if name.startswith("--") else f"{made} {name}"
            raise ConfigError(
                f"{images.prefix} was made with {words} and this run has {value}: train with the flags of its "
                "preprocessing, or preprocess the images again"
            )
