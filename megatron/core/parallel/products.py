"""How the layers of a rank multiply by their weights: generation may want results that don't depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.ops.matmul import linear

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``x·weightᵀ + bias``: [..., in], [out, in], [out] -> [..., out]."""


@dataclass(eq=False)
class Products:
    """``multiply``: what linear layers call in forward passes without gradients of their own, and logits."""

    multiply: Multiply = linear

    @property
    def are_for_generation(self) -> bool:
        """Whether the layers compute answers now, and not a loss."""
        return self.multiply is not linear

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x·weight`` of each head, without gradient: [s, b, n, in], [n, in, out] -> [s, b, n, out]."""
        if not self.are_for_generation:
            return torch.einsum("sbni,nio->sbno", x, weight)
        heads = zip(x.unbind(2), weight.transpose(1, 2), strict=True)
        return torch.stack([self.multiply(rows, matrix, None) for rows, matrix in heads], dim=2)

    @contextmanager
    def by(self, multiply: Multiply) -> Iterator[None]:
        """Layers multiply by this function inside the block."""
        before, self.multiply = self.multiply, multiply
        try:
            yield
        finally:
            self.multiply = before
