"""Vision-language models: a GPT that reads features of images at marked places of its texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.config.vision import VisionConfig
from megatron.core.context_parallel.shared_rows import shared_out
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel.regions import enter, sequence_slice
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.core.transformer.stack import StackConfig
from megatron.core.vision.encoder import VisionEncoder
from megatron.core.vision.projector import build_projector


class VLMModel(GPTModel):
    """The stage's part of a vision-language model (LLaVA, arXiv:2304.08485). ``config``, ``stack``: the language
    model's. Encoder and projector are where the embedding is. ``vision``: the encoder's sizes, and how tiles are made.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        *,
        vision: VisionConfig,
        stack: StackConfig,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> None:
        is_first = stage is None or stage.is_first
        whole, encoder = context.of_whole_sequences(), vision.encoder(config)
        modules = {
            "vision_model": VisionEncoder(vision, encoder, whole, first=config.num_layers, recompute=recompute),
            "vision_projection": build_projector(vision, encoder, config, whole),
        }
        super().__init__(
            config,
            context,
            stage=stage,
            stack=stack,
            recompute=recompute,
            seed=seed,
            before=modules if is_first else None,
        )
        self.vision, self._whole, self.joint_attention = vision, whole, str(vision.image_attention)
        self.vision_model: VisionEncoder
        self.vision_projection: Any

    @override
    def forward(
        self,
        tokens: Tensor | None,
        position_ids: Tensor | None = None,
        *,
        images: Tensor | None = None,
        image_places: Tensor | None = None,
        **inputs: Any,
    ) -> VocabularyOutput | Tensor:
        """Token ids to what a GPT's forward pass gives.

        ``images`` ``[t, 3, H, W]``: tiles of all samples (see ``PatchEmbedding``). ``image_places`` ``[b, S]``, this
        rank's slice: number of the feature that stands at a place, counted over all tiles, ``ROW_END``, and -1 where a
        word does.
        Without them the samples are texts.
        """
        if self._stage.is_first and images is not None:
            assert image_places is not None, "images stand somewhere"
            inputs["replaced"] = self._replaced(images, image_places)
        return super().forward(tokens, position_ids, **inputs)

    def _replaced(self, images: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Places ``[b, S]`` of features, and the features of this rank's part, ``[s, b, h]``.

        Without an image a blank one is encoded, which stands nowhere: other ranks may have some, and all take part in
        the same collectives.
        """
        if not len(images):
            images = images.new_zeros(1, *images.shape[1:])
        of_tiles = shared_out(lambda own: self.image_features(own).transpose(0, 1), images, self._context.mesh)
        features = self.with_row_end(of_tiles.flatten(0, 1))
        if self._context.splits_sequence:
            features = enter(features, self._whole)  # each rank has other places, and a part of the gradient
        own = sequence_slice(places.t(), self._context)
        return places != -1, F.embedding(torch.where(own >= 0, own, len(features) - 1), features)

    def image_features(self, images: Tensor) -> Tensor:
        """Hidden states ``[f, t, h]`` of the language model for images ``[t, 3, H, W]``."""
        features: Tensor = self.vision_projection(self.vision_model.features(self.vision_model(images)))
        return features

    def with_row_end(self, features: Tensor) -> Tensor:
        """Features ``[n, h]`` and, behind them, what stands at ends of rows of patches, where the model has it."""
        rows: Tensor = self.vision_projection.with_row_end(features)
        return rows

    @override
    def costs(self, workload: Workload) -> Costs:
        """Costs of encoder and projector over the tiles of an image a sample, and of the language model."""
        found = super().costs(workload)
        if not self._stage.is_first:
            return found
        tiles = workload.batch * self.vision.tiles_within(workload.length)
        shared = self._of_tiles(workload, -(-tiles // self._context.mesh.size("cp")))
        total = self._of_tiles(workload, tiles)
        features = Costs(kept=workload.rows * self._config.hidden_size * (workload.itemsize + 1))
        own = dataclasses.replace(shared, flops=total.flops, frozen_flops=total.frozen_flops) + features
        return own.before(found, splits_backward=workload.splits_backward)

    def _of_tiles(self, workload: Workload, count: int) -> Costs:
        """Costs of encoder and projector over so many tiles."""
        encoded, projected = (
            dataclasses.replace(
                workload,
                context=self._whole,
                batch=count,
                length=length,
                stream_itemsize=workload.itemsize,
                has_padding=False,
                has_documents=False,
                sees_ahead=False,
            )
            for length in (self.vision.encoded_per_tile, self.vision.features_per_tile)
        )
        return costs_of(self.vision_model, encoded) + costs_of(self.vision_projection, projected)
