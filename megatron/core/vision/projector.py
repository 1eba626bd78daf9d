"""Projectors: from features of images to hidden states of a language model."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.ops.activation import gated_activation, plain_activation
from megatron.core.parallel.costs import Costs, Workload, costs_of, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, StackedPart
from megatron.core.tensor_parallel.initialize import Normal
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    make_parameter,
)
from megatron.core.transformer.initialization import input_init
from megatron.core.transformer.norm import Norm


def build_projector(
    settings: VisionConfig, encoder: ModelConfig, decoder: ModelConfig, context: ModelContext
) -> Projector:
    """The projector of the settings, ``[f, t, w] -> [f, t, h]``. ``context``: one with whole sequences."""
    return KINDS[settings.vision_projection_type](settings, encoder, decoder, context)


class Projector(nn.Module):
    """What is common to projectors. ``image_newline``: stands at ends of rows of patches, with ``--image-grids``."""

    def __init__(
        self, settings: VisionConfig, encoder: ModelConfig, decoder: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__()
        normed = dataclasses.replace(encoder, normalization="LayerNorm", norm_epsilon=1e-5)
        has_norm = settings.vision_projection_norm
        if settings.vision_projection_type == "rms-affine":
            normed = dataclasses.replace(encoder, normalization="RMSNorm", apply_layernorm_1p=True)
            has_norm = True
        self.norm = Norm(settings.feature_width, normed, context) if has_norm else None
        row_end, init = Sharding((decoder.hidden_size,)), Normal(decoder.hidden_size**-0.5)
        self.image_newline = make_parameter(row_end, init, context) if settings.image_grids else None

    def with_row_end(self, features: Tensor) -> Tensor:
        """Features ``[n, h]`` and, behind them, what stands at ends of rows of patches, where the model has it."""
        return features if self.image_newline is None else torch.cat((features, self.image_newline.unsqueeze(0)))

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)


class MlpProjector(Projector):
    """Two matrices around an activation (LLaVA-1.5, arXiv:2310.03744), as wide inside as the language model."""

    def __init__(
        self, settings: VisionConfig, encoder: ModelConfig, decoder: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(settings, encoder, decoder, context)
        of_inside = dataclasses.replace(encoder, activation=settings.vision_projection_activation)
        self._kind, self._gated = of_inside.nonlinearity, of_inside.gated
        hidden, init = decoder.hidden_size, input_init(encoder)
        parts = (StackedPart(hidden),) * (1 + self._gated)
        self.linear_fc1 = ColumnParallelLinear(
            settings.feature_width, len(parts) * hidden, context, init=init, bias=True, parts=parts
        )
        self.linear_fc2 = RowParallelLinear(hidden, hidden, context, init=init, bias=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[f, t, w] -> [f, t, h]``."""
        inner = self.linear_fc1(self._normed(x))
        inner = gated_activation(inner, self._kind) if self._gated else plain_activation(inner, self._kind)
        out: Tensor = self.linear_fc2(inner)
        return out

    def costs(self, workload: Workload) -> Costs:
        """Costs of both products, and of the activation, which keeps its input."""
        inner = Costs(kept=workload.tokens * self.linear_fc1.weight.shape[0] * workload.itemsize)
        return total_of((self.norm, self.linear_fc1, self.linear_fc2), workload) + inner


class AffineProjector(Projector):
    """One matrix with a bias (PaliGemma, arXiv:2407.07726), or none and an RMSNorm (Gemma 3, arXiv:2503.19786)."""

    def __init__(
        self, settings: VisionConfig, encoder: ModelConfig, decoder: ModelConfig, context: ModelContext
    ) -> None:
        super().__init__(settings, encoder, decoder, context)
        self.linear = ReplicatedLinear(
            settings.feature_width,
            decoder.hidden_size,
            context,
            init=input_init(encoder),
            bias=settings.vision_projection_type == "affine",
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[f, t, w] -> [f, t, h]``."""
        out: Tensor = self.linear(self._normed(x))
        return out

    def costs(self, workload: Workload) -> Costs:
        """Costs of the product."""
        return costs_of(self.norm, workload) + costs_of(self.linear, workload)


KINDS: dict[str, type[Projector]] = {
    "mlp": MlpProjector,
    "affine": AffineProjector,
    "rms-affine": AffineProjector,
}
"""Projectors by ``--vision-projection-type``."""
