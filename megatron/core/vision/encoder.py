"""Encoders of images: a stack of the transformer's layers over patches."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.transformer.block import RecomputePlan, TransformerBlock
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.stack import FEED_FORWARD, SELF_ATTENTION, Layer, StackConfig
from megatron.core.vision.patches import PatchEmbedding

_SCALED: Layer = (
    dataclasses.replace(SELF_ATTENTION, layer_scale="self_attn_layer_scale"),
    dataclasses.replace(FEED_FORWARD, layer_scale="mlp_layer_scale"),
)


class VisionEncoder(nn.Module):
    """CLIP's (arXiv:2103.00020), SigLIP's (arXiv:2303.15343) or InternVL's (arXiv:2312.14238) encoder of images.

    ``config``: of its stack. ``first``: number of its first layer, behind those of the language model. ``context``: one
    in which ranks have whole sequences.
    """

    def __init__(
        self,
        settings: VisionConfig,
        config: ModelConfig,
        context: ModelContext,
        *,
        first: int = 0,
        recompute: RecomputePlan | None = None,
    ) -> None:
        super().__init__()
        kind, self._settings = settings.kind, settings
        self.embedding = PatchEmbedding(settings, config, context)
        self.pre_layernorm = Norm(config.hidden_size, config, context) if kind.pre_norm else None
        stack = StackConfig(
            config,
            causal=False,
            first=first,
            pattern=(_SCALED if kind.layer_scale else (SELF_ATTENTION, FEED_FORWARD),),
        )
        self.encoder = TransformerBlock(
            stack,
            context,
            layer_numbers=range(config.num_layers),
            final_norm=kind.post_norm and settings.vision_final_norm,
            recompute=dataclasses.replace(recompute or RecomputePlan(), offloaded=0),
        )

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Images ``[t, 3, H, W]`` (see ``PatchEmbedding``) to hidden states ``[s, t, h]``, of the class token first,
        where the encoder has one.
        """
        hidden = self.embedding(images)
        if self.pre_layernorm is not None:
            hidden = self.pre_layernorm(hidden)
        out: Tensor = self.encoder(hidden, LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses()))
        return out

    def features(self, hidden: Tensor) -> Tensor:
        """What of the hidden states ``[s, t, h]`` goes on, ``[f, t, w]``: with pixel shuffle of four patches each, else
        perhaps the mean of several.
        """
        settings = self._settings
        if settings.kind.class_token and not settings.keeps_class_token:
            hidden = hidden[1:]
        if settings.vision_pool_size > 1:
            return averaged(hidden, settings.grid, settings.vision_pool_size)
        return pixel_shuffled(hidden, settings.grid) if settings.pixel_shuffle else hidden

    def costs(self, workload: Workload) -> Costs:
        """Costs of ``workload.batch`` tiles, whose ``length`` is all that the encoder has of a tile."""
        begun = costs_of(self.embedding, workload) + costs_of(self.pre_layernorm, workload)
        return begun.before(costs_of(self.encoder, workload), splits_backward=workload.splits_backward)


def averaged(hidden: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """Patches ``[rows·columns, t, h]`` as means of squares of ``size`` a side, row by row (Gemma 3)."""
    rows, columns = grid
    squares = hidden.view(rows // size, size, columns // size, size, *hidden.shape[1:])
    return squares.mean((1, 3)).flatten(0, 1)


def pixel_shuffled(hidden: Tensor, grid: tuple[int, int]) -> Tensor:
    """Patches ``[rows·columns, t, h]`` as squares of 2 x 2 ``[rows·columns/4, t, 4h]``, each row by row."""
    (rows, columns), (_, tiles, width) = grid, hidden.shape
    squares = hidden.reshape(rows // 2, 2, columns // 2, 2, tiles, width).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(rows * columns // 4, tiles, 4 * width)
