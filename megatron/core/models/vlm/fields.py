"""Fields of samples of texts with images, beside a GPT's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.samples import Sample

IMAGES = "images"
"""A ragged field of samples: tiles, uint8 [t, 3, H, W], RGB and not normalized."""
PLACES = "image_places"
"""A field of samples: number of the feature that stands at a place, counted over the sample's tiles, -1 for a word, or
``ROW_END`` where a row of patches ends; int64 [S]."""


def with_images(sample: Sample, images: NDArray[np.uint8], places: NDArray[np.int64]) -> Sample:
    """A GPT's sample with images [t, 3, H, W] at ``places`` [S]. No token is trained to announce a feature."""
    mask = sample["loss_mask"].copy()
    mask[:-1][places[1:] != -1] = 0
    return {**sample, "loss_mask": mask, IMAGES: images, PLACES: places}
