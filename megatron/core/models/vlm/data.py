"""Data of a run with images: from token files with images, from texts alone, and mock images."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from typing_extensions import override

from megatron.config.run import RunConfig
from megatron.config.vision import VisionConfig
from megatron.core.datasets.build import DatasetSplits, Part, build_splits
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.samples import Sample, SourceDataset
from megatron.core.datasets.splits import SplitSizes
from megatron.core.images.expansion import feature_runs
from megatron.core.images.tiles import grid_of
from megatron.core.models.gpt.data import GPTDatasets
from megatron.core.models.vlm.fields import with_images
from megatron.core.models.vlm.image_text import image_dataset
from megatron.core.tokenizers.base import Tokenizer

_MOCK_IMAGES = 3  # samples have none, one or two, in turn


class MockImages:
    """Samples of ``texts`` that begin with random images, none, one or two in turn, as many as fit; without ``is_mock``
    they are texts alone.
    """

    def __init__(self, texts: SourceDataset, vision: VisionConfig, *, seq_length: int, is_mock: bool) -> None:
        self._texts, self._vision, self._length, self._is_mock = texts, vision, seq_length, is_mock

    @property
    def digest(self) -> str:
        """Hex digest of what determines the samples."""
        size = (self._vision.img_h, self._vision.img_w, self._vision.features_per_tile)
        return digest_of(self._texts.digest, "images", self._is_mock, *size)

    @property
    def prefix(self) -> str:
        """The source's name for messages."""
        return self._texts.prefix

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int | None) -> Sample:
        """Sample ``index``; None: one without loss."""
        grid, places = (
            grid_of(self._vision.img_w, self._vision.img_h, self._vision),
            np.full(self._length, -1, np.int64),
        )
        runs = np.concatenate(feature_runs(grid, self._vision))
        wanted = (index or 0) % _MOCK_IMAGES if self._is_mock else 0
        count = min(wanted, (self._length - 1) // len(runs))
        for image in range(count):
            features = runs + image * grid.tiles * self._vision.features_per_tile
            places[image * len(runs) : (image + 1) * len(runs)] = np.where(runs >= 0, features, runs)
        shape = (count * grid.tiles, 3, self._vision.img_h, self._vision.img_w)
        random = np.random.default_rng(index or 0)
        return with_images(self._texts[index], random.integers(0, 256, shape, np.uint8), places)

    def origin(self, index: int) -> str:
        """Where a sample's tokens are stored, for messages."""
        return self._texts.origin(index)

    def describe(self) -> list[str]:
        """The source, in a line."""
        return [*self._texts.describe()]

    def with_samples(self, num_samples: int) -> MockImages:
        """This data set with another number of samples, of which the common ones are unchanged."""
        texts = self._texts.with_samples(num_samples)
        return MockImages(texts, self._vision, seq_length=self._length, is_mock=self._is_mock)

    def prepare(self) -> None:
        """Store all indices that the samples need in the cache."""
        self._texts.prepare()


class VLMDatasets(GPTDatasets):
    """A GPT's samples, with images. ``has_images``: whether some source that was read has any."""

    reads_images = True

    def __init__(self, run: RunConfig, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        super().__init__(run.data, seed=run.training.seed, tokenizer=tokenizer, vocab_size=vocab_size)
        self._vision, self.has_images = run.part(VisionConfig), False

    @override
    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> Any:
        """Samples of a part, as a GPT's where its source has no images."""
        if part.source.images is not None:
            self.has_images = True
            return image_dataset(
                part,
                num_samples,
                data=self._data,
                vision=self._vision,
                seed=self._seed,
                vocab_size=self._vocab_size,
                remedy=remedy,
            )
        texts: Any = super().dataset(part, num_samples, remedy=remedy)
        return MockImages(texts, self._vision, seq_length=self._data.seq_length, is_mock=self._data.mock_data)


def build_vlm_splits(run: RunConfig, sizes: SplitSizes, tokenizer: Tokenizer) -> DatasetSplits:
    """Data sets of a run, with random images for mock data."""
    known = tokenizer.vocab_size if run.model.vocab_size is None else run.model.vocab_size
    family = VLMDatasets(run, tokenizer, vocab_size=known)
    found = build_splits(run.data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)
    if run.data.mock_data or family.has_images:
        return found
    remark = "note: --data-path holds only texts, so the vision encoder and its projector learn nothing"
    return dataclasses.replace(found, remarks=(*found.remarks, remark))
