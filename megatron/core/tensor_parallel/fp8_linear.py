"""The three products of a linear layer in 8 bits: of the output, of the input's gradient, of the weight's gradient.

Each operand is quantized from the wide original for the direction in which a product sums over it. The backward pass
keeps the input in 8 bits; with sequence parallelism it is gathered in 8 bits, too, and so is the gradient of the output
where all of it has one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.core.ops.fp8_matmul import implementation_on, multiply
from megatron.core.ops.matmul import transposed_times
from megatron.core.ops.quantize import (
    BLOCK,
    E4M3,
    E5M2,
    MX_BLOCK,
    Quantized,
    amax,
    blockwise,
    bytes_of,
    mxfp8,
    scale_of,
    tensorwise,
    with_scale,
)
from megatron.core.parallel.collectives import (
    Handle,
    all_gather,
    all_gather_async,
    all_reduce,
    reduce_scatter,
    reduce_scatter_async,
)
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.recompute import will_be_recomputed
from megatron.core.tensor_parallel.delayed_scaling import DelayedScaling

Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Operand:
    """A matrix [rows, columns] in 8 bits: for products that sum over its columns (``across``), and as [columns, rows]
    for those that sum over its rows (``along``); None where no product needs it.
    """

    across: Quantized | None
    along: Quantized | None


@dataclass(frozen=True)
class Role:
    """A tensor in the products of a layer. ``axes``: those of the ranks that hold parts of it, which share one scale.
    ``number``: of the role among those of a layer.
    """

    name: str
    fmt: torch.dtype
    axes: Axes
    number: int


class Fp8Quantizer:
    """Quantizes the tensors of one layer by the run's recipe. ``inputs``, ``weights``, ``grads``: axes over which each
    is divided.
    """

    def __init__(self, context: ModelContext, *, inputs: Axes, weights: Axes, grads: Axes) -> None:
        settings = context.low_precision.settings
        self._context, self.recipe, self.wgrad = context, settings.fp8_recipe, settings.fp8_wgrad
        self.by = implementation_on(context.device)
        self.scaling: tuple[DelayedScaling, int] | None = None  # and the number of the first role of this layer
        of_gradients = E5M2 if settings.fp8_format == "hybrid" else E4M3
        self.input = Role("input", E4M3, inputs, 0)
        self.weight = Role("weight", E4M3, weights, 1)
        self.grad = Role("grad_output", of_gradients, grads, 2)

    @property
    def roles(self) -> tuple[Role, ...]:
        """The three roles in the order of their numbers."""
        return self.input, self.weight, self.grad

    @property
    def block(self) -> int | None:
        """Numbers that share a scale in the direction of a product; None: all of them."""
        return {"blockwise": BLOCK, "mxfp8": MX_BLOCK}.get(self.recipe)

    def bytes_to_quantize(self, itemsize: int) -> int:
        """Bytes that quantizing a number of ``itemsize`` bytes takes at most, beside itself: the number in fp32 and its
        code; where blocks have scales, its scale in fp32, too, and in the second direction the code of the first and a
        transposed copy.
        """
        return 4 + 1 if self.block is None else 4 + 4 + 1 + itemsize

    def quantize(self, x: Tensor, role: Role, *, across: bool = True, along: bool = True) -> Operand:
        """A matrix for the products that need it. May be a collective of the ranks that hold its parts."""
        (found,) = self.quantize_each([x], role, across=across, along=along)
        return found

    def quantize_each(
        self, matrices: Sequence[Tensor], role: Role, *, across: bool = True, along: bool = True
    ) -> Iterator[Operand]:
        """Each of several matrices with a scale of its own, or scales of its blocks, quantized as the iterator is read;
        ranks agree on the largest values at the call. See ``quantize``.
        """
        largest: Sequence[Tensor | None] = [None] * len(matrices)
        if self.recipe == "tensorwise":
            own = torch.stack([amax(each) for each in matrices])
            largest = all_reduce(own, self._context.mesh, *role.axes, op="max").unbind()
        return (self._quantize(x, role, most, across, along) for x, most in zip(matrices, largest))

    def _quantize(self, x: Tensor, role: Role, largest: Tensor | None, across: bool, along: bool) -> Operand:
        if self.block is None:
            return Operand(whole := self._whole(x, role, largest), whole.transposed())
        if role is self.weight and self.recipe == "blockwise":
            return Operand(square := blockwise(x, role.fmt, rows=BLOCK), square.transposed())
        quantized: Callable[..., Quantized] = blockwise if self.recipe == "blockwise" else mxfp8
        return Operand(
            quantized(x, role.fmt) if across else None, quantized(x.t().contiguous(), role.fmt) if along else None
        )

    def _whole(self, x: Tensor, role: Role, largest: Tensor | None) -> Quantized:
        if self.recipe == "tensorwise":
            return tensorwise(x, role.fmt, largest=largest)
        self._observe(role, amax(x))
        return with_scale(x, self._delayed_scale(role), role.fmt)

    def _delayed_scale(self, role: Role) -> Tensor:
        assert self.scaling is not None, "delayed_scaling() has not seen this layer"
        scaling, first = self.scaling
        return scaling.scale(first + role.number)

    def _observe(self, role: Role, largest: Tensor) -> None:
        if self.scaling is not None and self._context.low_precision.trains:
            scaling, first = self.scaling
            scaling.observe(first + role.number, largest)

    def scales_of_weight(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """What matrices of a weight in ``dtype``, or their blocks, with these ``largest`` magnitudes, fp32, are
        multiplied by.
        """
        if self.recipe == "delayed":
            return self._delayed_scale(self.weight).expand(largest.shape)
        return scale_of(largest, self.weight.fmt, of_input=dtype, powers_of_two=self.recipe == "blockwise")

    def quantize_weights(self, weight: Tensor) -> list[Operand]:
        """The matrix of a weight, or those of the experts in a stack of them; once a step."""
        kept = self._context.low_precision.weights
        if kept is not None and weight in kept:
            found: list[Operand] = kept[weight]
            return found
        gathered = self._context.low_precision.gathered.get(weight)
        if gathered is None:
            made = [*self.quantize_each(matrices_of(weight.detach()).unbind(), self.weight)]
        else:
            matrices, largest = gathered
            self._observe(self.weight, largest)
            made = [Operand(each, each.transposed()) for each in matrices]
        if self.by == "device":  # kernels want rows in memory: once a step, not for each product
            made = [Operand(each.across, None if each.along is None else each.along.contiguous()) for each in made]
        if kept is not None:
            kept[weight] = made
        return made

    def multiply(
        self, a: Quantized | None, b: Quantized | None, dtype: torch.dtype, *, is_fast: bool = False
    ) -> Tensor:
        """The product ``a·bᵀ`` of two quantized matrices."""
        assert a is not None and b is not None, "an operand was not quantized in this direction"
        return multiply(a, b, dtype, by=self.by, is_fast=is_fast)


def matrices_of(weight: Tensor) -> Tensor:
    """A weight as [matrices, rows, columns]: one matrix, or one for each expert of a stack."""
    return weight[None] if weight.dim() == 2 else weight.flatten(1, -2)


def weight_quantizers(models: Iterable[nn.Module]) -> dict[nn.Parameter, Fp8Quantizer]:
    """Quantizers of the weights that are multiplied in 8 bits."""
    modules = [module for model in models for module in model.modules()]
    return {module.weight: found for module in modules if (found := _quantizer(module))}  # type: ignore[misc]


class Fp8Linear:
    """``x·weightᵀ + bias`` of one layer in 8 bits, with the gradients of ``tensor_parallel.linear``.

    ``is_partial``: its products are partial sums of the tensor-parallel ranks. With sequence parallelism and one scale
    a tensor it ``reduces`` them itself, to this rank's part of the sequence, as it can gather their gradient in 8 bits.
    Blocks of tokens have scales of their own: gathering the codes of both directions would save nothing.
    """

    def __init__(self, context: ModelContext, *, inputs: Axes, weights: Axes, grads: Axes, is_partial: bool) -> None:
        settings = context.low_precision.settings
        one_scale = settings.fp8_recipe in ("tensorwise", "delayed") and settings.fp8_wgrad
        self.reduces = is_partial and context.sequence_parts > 1 and one_scale
        self.context = context
        grads = (*grads, "tp") if self.reduces else grads
        self.quantizer = Fp8Quantizer(context, inputs=inputs, weights=weights, grads=grads)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, gathers: bool) -> Tensor:
        """[..., in] -> [..., out]; see ``tensor_parallel.linear``."""
        if torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
            if not x.requires_grad:
                x = x.detach().requires_grad_()  # else there is no backward pass, as autograd doesn't see the weight
            return _Fp8Product.apply(x, bias, (weight,), self, gathers)  # type: ignore[no-untyped-call, no-any-return]
        y, _ = self.forward(x, weight, bias, gathers=gathers, keeps=False)
        return y

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, gathers: bool, keeps: bool
    ) -> tuple[Tensor, Quantized | Tensor]:
        """The output, and what the weight's gradient needs of this rank's rows of the input: the rows, or their numbers
        in 8 bits, which only ``keeps`` asks for. The backward pass asks for the weight again, so that ZeRO 3 can free
        what was made of it.
        """
        quantizer, rows = self.quantizer, x.reshape(-1, x.shape[-1])
        keeps_bytes = self.keeps_bytes(len(rows), gathers=gathers)
        given = quantizer.quantize(rows, quantizer.input, along=keeps and keeps_bytes)
        (weights,) = quantizer.quantize_weights(weight)
        assert given.across is not None
        whole = _gathered(given.across, self.context) if gathers else given.across
        y = quantizer.multiply(whole, weights.across, x.dtype, is_fast=True)
        kept = rows if not keeps_bytes or given.along is None else given.along.transposed()
        y = y.view(-1, *x.shape[1:-1], y.shape[-1])
        if self.reduces:
            y = reduce_scatter(y, self.context.mesh, "tp")
        return y if bias is None else y.add_(bias), kept

    def keeps_bytes(self, rows: int, *, gathers: bool) -> bool:
        """Whether the backward pass keeps the input in 8 bits: not where ranks' parts of the sequence cut blocks."""
        block = self.quantizer.block
        return self.quantizer.wgrad and (block is None or not gathers or rows % block == 0)

    def bytes_kept(self, rows: int, width: int, *, itemsize: int, gathers: bool = False) -> int:
        """Bytes of an input [rows, width] that are kept for the backward pass; its elements have ``itemsize`` bytes."""
        block = self.quantizer.block
        if not self.keeps_bytes(rows, gathers=gathers):
            return rows * width * itemsize
        if block is None:
            return rows * width + 4
        return rows * width + -(-rows // block) * width * (1 if self.quantizer.recipe == "mxfp8" else 4)

    def backward(
        self, grad: Tensor, weight: Tensor, kept: Quantized | Tensor, *, gathers: bool, at_once: bool
    ) -> Tensor:
        """The gradient of the input; that of the weight ``at_once`` or when the schedule says. With sequence
        parallelism the input is gathered while the first is computed, and that is summed while the second is.
        """
        quantizer, rows, mesh = self.quantizer, grad.flatten(0, -2), self.context.mesh
        trains = weight.requires_grad
        arriving = _start_gathering(kept, self.context) if gathers and trains else lambda: kept
        found = quantizer.quantize(rows, quantizer.grad, along=trains and self.quantizer.wgrad)
        if self.reduces and found.across is not None:
            found = Operand(whole_grad := _gathered(found.across, self.context), whole_grad.transposed())
        (weights,) = quantizer.quantize_weights(weight)
        grad_x = quantizer.multiply(found.across, weights.along, grad.dtype)
        grad_x = grad_x.view(-1, *grad.shape[1:-1], grad_x.shape[-1])
        scattering = reduce_scatter_async(grad_x, mesh, "tp") if gathers else Handle(grad_x)
        if not trains:
            return scattering.wait()
        whole = arriving()
        if self.quantizer.wgrad:
            work = partial(self._add_gradient, weight, found.along, whole, grad.dtype)
        else:
            assert isinstance(whole, Tensor)
            work = partial(_accumulate, weight, lambda: transposed_times(rows, whole))
        self.context.weight_gradients.do(work, at_once=at_once)
        return scattering.wait()

    def _add_gradient(self, weight: Tensor, grad: Quantized | None, x: Quantized | Tensor, dtype: torch.dtype) -> None:
        """Compute ``gradᵀ·x`` and let autograd accumulate it."""
        if isinstance(x, Tensor):
            along = self.quantizer.quantize(x, self.quantizer.input, across=False).along
        else:
            along = x.transposed()
        _accumulate(weight, lambda: self.quantizer.multiply(grad, along, dtype))


class _Fp8Product(torch.autograd.Function):
    """y = x·Wᵀ + b;  dx = dy·W and db = Σ dy at once,  dW = dyᵀ·x at once or later.

    The weight comes in a tuple, where autograd doesn't see it: its gradient is accumulated by hand.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, hidden: tuple[Tensor], layer: Fp8Linear, gathers: bool
    ) -> Tensor:
        (ctx.weight,), ctx.layer, ctx.gathers = hidden, layer, gathers
        y, kept = layer.forward(x, ctx.weight, bias, gathers=gathers, keeps=ctx.weight.requires_grad)
        ctx.block, ctx.at_once = None, will_be_recomputed()
        if not ctx.weight.requires_grad:
            ctx.save_for_backward()
        elif isinstance(kept, Quantized):
            ctx.block = kept.block
            ctx.save_for_backward(kept.data, kept.scales)
        else:
            ctx.save_for_backward(kept)
        return y

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, layer = ctx.saved_tensors, ctx.layer
        kept = Quantized(saved[0], saved[1], ctx.block) if len(saved) == 2 else saved[0] if saved else grad
        grad_x = layer.backward(grad, ctx.weight, kept, gathers=ctx.gathers, at_once=ctx.at_once)
        return grad_x, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None, None


def fp8_linear(
    context: ModelContext, *, inputs: Axes = (), weights: Axes = (), grads: Axes = (), is_partial: bool = False
) -> Fp8Linear | None:
    """The products of a layer that is built with ``context``; None where they aren't in 8 bits.

    ``inputs``, ``weights``, ``grads``: axes over which its input, its weight, and the gradient of its output are
    divided, besides those that divide the sequence in attention. ``is_partial``: see ``Fp8Linear``.
    """
    if not context.low_precision.serves(context.layer):
        return None
    return Fp8Linear(context, inputs=(*inputs, "cp"), weights=weights, grads=(*grads, "cp"), is_partial=is_partial)


def delayed_scaling(models: Iterable[nn.Module], context: ModelContext) -> DelayedScaling | None:
    """The scales of a rank's models, to be updated after the passes of every step; None for other recipes."""
    settings = context.low_precision.settings
    quantizers = {
        name: found for model in models for name, each in model.named_modules() if (found := _quantizer(each))
    }
    if settings.fp8_recipe != "delayed" or not quantizers:
        return None
    roles = [(f"{name}.{role.name}", role.fmt) for name, each in quantizers.items() for role in each.roles]
    scaling = DelayedScaling(roles, settings, context)
    for place, each in enumerate(quantizers.values()):
        each.scaling = scaling, place * len(each.roles)
    return scaling


def _quantizer(module: nn.Module) -> Fp8Quantizer | None:
    """The quantizer of a linear layer or of a layer's experts; None without one."""
    found = getattr(module, "fp8", None)
    found = found.quantizer if isinstance(found, Fp8Linear) else found
    return found if isinstance(found, Fp8Quantizer) else None


@torch.no_grad()
def _accumulate(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
    torch.autograd.backward(weight, gradient().contiguous())


def _gathered(part: Quantized, context: ParallelContext) -> Quantized:
    """The rows of all tensor-parallel ranks."""
    data = all_gather(bytes_of(part.data), context.mesh, "tp").view(part.data.dtype)
    scales = part.scales if part.block is None else all_gather(part.scales, context.mesh, "tp")
    return Quantized(data, scales, part.block)


def _start_gathering(part: Quantized | Tensor, context: ParallelContext) -> Callable[[], Quantized | Tensor]:
    """Start gathering the rows of all tensor-parallel ranks; what is returned waits for them."""
    if isinstance(part, Tensor):
        return all_gather_async(part, context.mesh, "tp").wait
    data = all_gather_async(bytes_of(part.data), context.mesh, "tp")
    scales = Handle(part.scales) if part.block is None else all_gather_async(part.scales, context.mesh, "tp")
    return lambda: Quantized(data.wait().view(part.data.dtype), scales.wait(), part.block)
