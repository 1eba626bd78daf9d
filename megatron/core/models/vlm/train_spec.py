"""Vision-language models: next-token prediction in texts with images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.config.vision import VisionConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.loader import rows_field
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.models.train_spec import TrainSpec
from megatron.core.models.vlm.ahead import AHEAD, ahead_in_prefixes, ahead_in_tiles
from megatron.core.models.vlm.data import build_vlm_splits
from megatron.core.models.vlm.fields import IMAGES, PLACES
from megatron.core.models.vlm.model import VLMModel
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.tokenizers.base import Tokenizer


class VLMSpec(GPTSpec):
    """A causal language model that reads images, whose loss is that of its texts."""

    name = "vlm"
    continues_texts = False
    batch_fields: Mapping[str, int | None] = {**GPTSpec.batch_fields, IMAGES: None, PLACES: 1, AHEAD: None}
    ragged_fields = frozenset({IMAGES})

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """A GPT's, and images where the embedding is."""
        images = {IMAGES, PLACES} if any(stage.is_first for stage in stages) else set()
        ahead = {AHEAD} if run.part(VisionConfig).image_attention != "causal" else set()
        return super().fields(run, stages) | images | ahead

    @override
    def add_derived_fields(self, batch: Mapping[str, Tensor], run: RunConfig) -> Mapping[str, Tensor]:
        """Number the features of a batch over all of its samples, each of which counts its own, and count the keys that
        places see ahead of them.
        """
        found = dict(super().add_derived_fields(batch, run))
        if batch:
            rows = batch[rows_field(IMAGES)]
            before = (rows.cumsum(0) - rows) * run.part(VisionConfig).features_per_tile
            places = batch[PLACES]
            found[PLACES] = torch.where(places >= 0, places + before.unsqueeze(1), places)
            vision = run.part(VisionConfig)
            if vision.image_attention == "bidirectional":
                found[AHEAD] = ahead_in_tiles(found[PLACES], vision.features_per_tile)
            elif vision.image_attention == "prefix":
                found[AHEAD] = ahead_in_prefixes(batch["loss_mask"], batch.get("document_ids"))
        return found

    @override
    def model_class(self, groups: Sequence[object]) -> Callable[..., VLMModel]:
        """A GPT with an encoder of images."""
        return partial(VLMModel, vision=VisionConfig.among(groups))

    @override
    def more_inputs(self, microbatch: Microbatch) -> Mapping[str, Any]:
        """Images, and where they stand."""
        tensors = microbatch.tensors
        places = {"images": tensors.get(IMAGES), "image_places": tensors.get(PLACES)}
        return {**places, "ahead": tensors.get(AHEAD)}

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """A GPT's samples, and those with images."""
        return build_vlm_splits(run, sizes, tokenizer)


TRAIN_SPEC: TrainSpec = VLMSpec()
