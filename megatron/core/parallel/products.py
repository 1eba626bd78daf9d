"""The matrix product of a rank's layers; generation replaces it by one whose rows don't depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``x·weightᵀ + bias``: [..., in], [out, in], [out] -> [..., out]."""

MultiplyExperts = Callable[[Tensor, Tensor, Callable[[Tensor], Sequence[Tensor]]], "Tensor | None"]
"""Rows [n, in] times the matrix, of a stacked weight [e, ..., in], of the expert they belong to: [n, out]; None for a
weight that it leaves to the layer. The third argument splits rows into those of each expert.
"""


@dataclass(eq=False)
class Products:
    """Products of generation. ``multiply``: what linear layers call in generation, and logits; None outside of it.
    ``multiply_experts``: what layers of experts ask first.
    """

    multiply: Multiply | None = None
    multiply_experts: MultiplyExperts | None = None

    @property
    def in_generation(self) -> bool:
        """Whether the running pass is one of generation."""
        return self.multiply is not None

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x·weight`` of each head, without gradient: [s, b, n, in], [n, in, out] -> [s, b, n, out]."""
        if self.multiply is None:
            return torch.einsum("sbni,nio->sbno", x, weight)
        multiply, heads = self.multiply, zip(x.unbind(2), weight.transpose(1, 2), strict=True)
        return torch.stack([multiply(rows, matrix, None) for rows, matrix in heads], dim=2)

    @contextmanager
    def by(self, multiply: Multiply, experts: MultiplyExperts | None = None) -> Iterator[None]:
        """Mark the passes inside the block as those of generation, which multiply by these functions."""
        before = self.multiply, self.multiply_experts
        self.multiply, self.multiply_experts = multiply, experts
        try:
            yield
        finally:
            self.multiply, self.multiply_experts = before
