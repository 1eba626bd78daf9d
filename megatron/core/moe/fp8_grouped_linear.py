"""The linear layers of experts in FP8, one expert after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.moe.grouped_linear import GroupedLinear
from megatron.core.ops.grouped_matmul import Groups
from megatron.core.tensor_parallel.fp8_linear import Fp8Quantizer


@dataclass
class Fp8GroupedLinear(GroupedLinear):
    """``quantizers``: those of the layers, by weight. Each expert's rows on this rank are quantized by themselves, as
    its weight is; kept for the backward pass are the rows as they came.
    """

    quantizers: Mapping[Tensor, Fp8Quantizer] = field(default_factory=dict)

    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """See ``GroupedLinear``."""
        if self.context.products.multiply is not None:  # generation
            return super().multiply(rows, weight, groups)
        quantizer = self.quantizers[weight]
        operands = quantizer.quantize_all(groups.parts(rows), quantizer.input, along=False)
        pairs = zip(operands, quantizer.quantize_weights(weight))
        return torch.cat([quantizer.multiply(a.across, b.across, rows.dtype, is_fast=True) for a, b in pairs])

    def multiply_back(self, grad: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """See ``GroupedLinear``."""
        quantizer = self.quantizers[weight]
        operands = quantizer.quantize_all(groups.parts(grad), quantizer.grad, along=False)
        pairs = zip(operands, quantizer.quantize_weights(weight))
        return torch.cat([quantizer.multiply(a.across, b.along, grad.dtype) for a, b in pairs])

    def outer(self, weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> Tensor:
        """See ``GroupedLinear``."""
        quantizer = self.quantizers[weight]
        if not quantizer.wgrad:
            return super().outer(weight, grad, rows, groups)
        left = quantizer.quantize_all(groups.parts(grad), quantizer.grad, across=False)
        right = quantizer.quantize_all(groups.parts(rows), quantizer.input, across=False)
        return torch.stack([quantizer.multiply(a.along, b.along, grad.dtype) for a, b in zip(left, right)])

    def add_outer(self, total: Tensor, weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> None:
        """See ``GroupedLinear``. A product in 8 bits isn't added by the kernel that computes it."""
        if self.quantizers[weight].wgrad:
            total.add_(self.outer(weight, grad, rows, groups))
        else:
            super().add_outer(total, weight, grad, rows, groups)
