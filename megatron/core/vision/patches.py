"""Patches of images as vectors: a matrix product, and learned positions that fit images of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.layers import ReplicatedLinear, make_parameter
from megatron.core.transformer.initialization import input_init, table_init

CHANNELS = 3


class PatchEmbedding(nn.Module):
    """The encoder's first hidden states: of the class token, where there is one, and of each patch, row by row."""

    def __init__(self, settings: VisionConfig, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self._settings, self._dtype = settings, context.dtype
        pixels = CHANNELS * settings.patch_dim**2
        bias = settings.kind.patch_bias
        self.projection = ReplicatedLinear(pixels, config.hidden_size, context, init=input_init(config), bias=bias)
        self.positions = PatchPositions(settings, config, context)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Images ``[t, 3, H, W]``, uint8 or, in a floating type, already normalized, to ``[s, t, h]``."""
        patches = patches_of(self._normalized(images), self._settings.patch_dim)
        embedded: Tensor = self.positions(self.projection(patches))
        return embedded

    def _normalized(self, images: Tensor) -> Tensor:
        """Pixels in the model's type with the mean and the deviation of the encoder's kind taken away."""
        if images.is_floating_point():
            return images.to(self._dtype)
        wide = torch.promote_types(self._dtype, torch.float32)
        mean, deviation = (
            torch.tensor(each, dtype=wide, device=images.device).view(-1, 1, 1)
            for each in (self._settings.kind.mean, self._settings.kind.deviation)
        )
        return ((images.to(wide) / 255 - mean) / deviation).to(self._dtype)

    def costs(self, workload: Workload) -> Costs:
        """The product of every patch, which keeps the normalized pixels."""
        return costs_of(self.projection, workload)


def patches_of(images: Tensor, side: int) -> Tensor:
    """Images ``[t, c, H, W]`` as patches ``[s, t, c·side·side]``, row by row, each in the order of a convolution's
    weight.
    """
    count, channels, height, width = images.shape
    rows, columns = height // side, width // side
    grid = images.view(count, channels, rows, side, columns, side).permute(2, 4, 0, 1, 3, 5)
    return grid.reshape(rows * columns, count, channels * side * side)


class PatchPositions(nn.Module):
    """A learned vector for each place of the grid, and the class token with its own, held whole by every rank.

    Images of another size than positions were learned for have positions interpolated between them.
    """

    def __init__(self, settings: VisionConfig, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        self._grid, self._learned, self._tokens = settings.grid, settings.learned_grid, int(settings.kind.class_token)
        hidden, init = config.hidden_size, table_init(config)
        of_token = Sharding((hidden,))
        self.class_token = make_parameter(of_token, init, context) if self._tokens else None
        table = Sharding((self._tokens + self._learned**2, hidden), kind="table")
        self.weight = make_parameter(table, init, context)

    @override
    def forward(self, patches: Tensor) -> Tensor:
        """Patches ``[s, t, h]`` to hidden states ``[s + 1, t, h]`` with a class token, else ``[s, t, h]``."""
        if self.class_token is not None:
            patches = torch.cat((self.class_token.expand(1, patches.shape[1], -1), patches))
        return patches + self._of_grid().unsqueeze(1)

    def _of_grid(self) -> Tensor:
        """Positions ``[s, h]`` of the grid of this model's images; bicubic as transformers', in fp32 at least."""
        if self._grid == (self._learned, self._learned):
            return self.weight
        of_tokens, of_grid = self.weight[: self._tokens], self.weight[self._tokens :]
        side, wide = self._learned, torch.promote_types(self.weight.dtype, torch.float32)
        square = of_grid.to(wide).view(1, side, side, -1).permute(0, 3, 1, 2)
        fitted = F.interpolate(square, size=self._grid, mode="bicubic", align_corners=False)
        return torch.cat((of_tokens, fitted[0].flatten(1).t().to(self.weight.dtype)))
