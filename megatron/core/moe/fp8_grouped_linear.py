"""The linear layers of experts in FP8, one expert after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from typing_extensions import override

from megatron.core.moe.grouped_linear import GroupedLinear
from megatron.core.ops.grouped_matmul import Groups
from megatron.core.tensor_parallel.fp8_linear import Fp8Quantizer


@dataclass
class Fp8GroupedLinear(GroupedLinear):
    """Grouped linear layers that multiply in 8 bits. ``quantizers``: of the layers, by weight. Each expert's rows on
    this rank are quantized by themselves, as its weight is; kept for the backward pass are the rows as they came.
    """

    quantizers: Mapping[Tensor, Fp8Quantizer] = field(default_factory=dict)

    @override
    def multiply(self, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """The product in 8 bits; in generation, the one of ``GroupedLinear``."""
        if self.context.products.multiply is not None:  # generation
            return super().multiply(rows, weight, groups)
        quantizer, out = self.quantizers[weight], rows.new_empty(len(rows), weight.flatten(1, -2).shape[1])
        operands = quantizer.quantize_each(groups.parts(rows), quantizer.input, along=False)
        for into, a, b in zip(groups.parts(out), operands, quantizer.quantize_weights(weight)):
            into.copy_(quantizer.multiply(a.across, b.across, rows.dtype, is_fast=True))
        return out

    @override
    def multiply_back(self, grad: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """The gradient of the rows, multiplied in 8 bits."""
        quantizer, out = self.quantizers[weight], grad.new_empty(len(grad), weight.shape[-1])
        operands = quantizer.quantize_each(groups.parts(grad), quantizer.grad, along=False)
        for into, a, b in zip(groups.parts(out), operands, quantizer.quantize_weights(weight)):
            into.copy_(quantizer.multiply(a.across, b.along, grad.dtype))
        return out

    @override
    def outer(self, weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> Tensor:
        """The gradient of the weight, [e, out, in], in 8 bits where the quantizer's ``wgrad`` is set."""
        if not self.quantizers[weight].wgrad:
            return super().outer(weight, grad, rows, groups)
        out = grad.new_empty(len(groups.counts), grad.shape[1], rows.shape[1])
        for into, product in zip(out.unbind(), self._outer_products(weight, grad, rows, groups)):
            into.copy_(product)
        return out

    @override
    def add_outer(self, total: Tensor, weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> None:
        """Add the gradient of the weight to ``total`` [e, out, in]. A product in 8 bits isn't added by the kernel that
        computes it.
        """
        if not self.quantizers[weight].wgrad:
            super().add_outer(total, weight, grad, rows, groups)
            return
        for into, product in zip(total.unbind(), self._outer_products(weight, grad, rows, groups)):
            into.add_(product)

    def _outer_products(self, weight: Tensor, grad: Tensor, rows: Tensor, groups: Groups) -> Iterator[Tensor]:
        """The gradient of each expert's weight, when it is asked for."""
        quantizer = self.quantizers[weight]
        left = quantizer.quantize_each(groups.parts(grad), quantizer.grad, across=False)
        right = quantizer.quantize_each(groups.parts(rows), quantizer.input, across=False)
        return (quantizer.multiply(a.along, b.along, grad.dtype) for a, b in zip(left, right))
