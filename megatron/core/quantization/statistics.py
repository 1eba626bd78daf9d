"""What calibration keeps of the inputs of a matrix: largest magnitudes, sums of magnitudes, and of products of pairs.

Sums are exact, so that neither the number of ranks nor the order of samples changes a bit of them: each input becomes a
whole number of 1/32768 of its channel's largest magnitude, and sums of whole numbers below 2⁵³ are exact in fp64. So
samples are passed twice: first for the largest magnitudes, then for the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 1 << 15
"""Whole numbers from zero to the largest magnitude."""
MOST_TOKENS = 1 << 23
"""Tokens of which sums of products are exact."""


@dataclass
class InputStatistics:
    """Statistics of the inputs [n, in] of one matrix. ``largest`` [in]: fp32 magnitudes. ``tokens``: rows seen.

    ``magnitudes`` [in] and ``products`` [in, in]: sums of |x| and x·xᵀ in whole ``units`` [in], fp64.
    """

    largest: Tensor
    tokens: int = 0
    magnitudes: Tensor | None = None
    products: Tensor | None = None
    units: Tensor | None = None

    @classmethod
    def of_width(cls, inputs: int, device: torch.device) -> InputStatistics:
        """Statistics of no rows yet."""
        return cls(torch.zeros(inputs, device=device))

    def measure(self, rows: Tensor) -> None:
        """First pass: the largest magnitudes, and how many rows there are."""
        if len(rows):
            self.largest = torch.maximum(self.largest, rows.abs().amax(0).float())
            self.tokens += len(rows)

    def begin_sums(self) -> None:
        """Between the passes, when the largest magnitudes are those of all ranks."""
        found = self.largest.double() / STEPS
        self.units = torch.where(found > 0, found, torch.ones_like(found))
        self.magnitudes = torch.zeros_like(found)
        self.products = found.new_zeros(len(found), len(found))

    def add(self, rows: Tensor) -> None:
        """Second pass: the sums."""
        assert self.units is not None and self.magnitudes is not None and self.products is not None, "begin_sums first"
        whole = torch.round(rows.double() / self.units)
        self.magnitudes += whole.abs().sum(0)
        self.products.addmm_(whole.t(), whole)

    def agree_on_largest(self, highest: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """Take the largest magnitudes and the number of rows of all ranks. ``highest``, ``total``: collectives."""
        self.largest = highest(self.largest)
        self.tokens = int(total(torch.tensor([self.tokens], device=self.largest.device)).item())

    def agree_on_sums(self, total: Callable[[Tensor], Tensor]) -> None:
        """Take the sums of all ranks."""
        assert self.magnitudes is not None and self.products is not None, "begin_sums first"
        self.magnitudes, self.products = total(self.magnitudes), total(self.products)

    def mean_magnitudes(self) -> Tensor:
        """The mean of |x| of each channel [in], fp64."""
        assert self.magnitudes is not None and self.units is not None, "begin_sums first"
        return self.magnitudes * self.units / max(1, self.tokens)

    def hessian(self) -> Tensor:
        """The mean of x·xᵀ [in, in], fp64: half the Hessian of the squared error of a row of the matrix."""
        assert self.products is not None and self.units is not None, "begin_sums first"
        return self.products * self.units * self.units[:, None] / max(1, self.tokens)

    def divide(self, factors: Tensor) -> None:
        """Statistics of inputs that are divided by ``factors`` [in] from now on."""
        self.largest = self.largest / factors.float()
        if self.units is not None:
            self.units = self.units / factors.double()

    def is_enough(self) -> bool:
        """Whether the rows can span all inputs: with fewer rows than inputs ``hessian`` is not of full rank."""
        return self.tokens >= len(self.largest)
