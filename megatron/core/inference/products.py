"""Matrix products of generation. Each weight is packed once into the memory layout of its kernel.

Libraries copy a weight into blocks at every call, which costs more than the product when rows are few. Here the copy is
made when a weight is first used, and kept.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.core.inference.invariance import EqualRows, agreeing, cancelling
from megatron.core.ops.matmul import lacks_bf16

_PACKED_FROM = {torch.bfloat16: 1, torch.float32: 3}  # rows; fewer are multiplied by columns
_LARGE = 1 << 22  # numbers of a weight from which on fewer bytes are worth a dozen small operators
_STRIDE = 32  # inputs: torch's bf16 product with int8 weights reads past rows of other lengths than its multiples
_STEPS = 32_639  # from 0 to the largest of a row, so that both bytes have room for their offsets
_PART = 1 << 19  # numbers of a weight that are in fp32 at once: what stays in the caches
_HINT = 8  # rows for which oneDNN is asked to choose the blocks: measured to be good for any number


_Multiply = Callable[[Tensor, Any, Tensor | None], Tensor]


class Form(Protocol):
    """A memory layout of weights, and the kernel for it. ``copies``: whether ``pack`` takes memory of its own."""

    copies: bool

    def refusal(self, weight: Tensor) -> str | None:
        """None, or why the kernel doesn't take weights of this type on this device."""
        ...

    def pack(self, weight: Tensor) -> Any:
        """``weight`` ``[out, in]`` as ``multiply`` wants it."""
        ...

    def multiply(self, x: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias``: [t, in] -> [t, out]."""
        ...


class StoredForm(Form, Protocol):
    """A form of one weight, whose codes were chosen before. ``measured``: the kind of form whose products have the same
    bits for few rows and many where these have.
    """

    measured: type[Form]


class Plain:
    """The weight itself, by torch's own product; for every type and device."""

    copies = False

    def refusal(self, weight: Tensor) -> str | None:
        """None: every weight is taken."""
        return None

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` itself."""
        return weight

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` by torch's own product."""
        return F.linear(x, packed, bias)


class Transposed(Plain):
    """``(weight·xᵀ)ᵀ``: libraries split sums by the left operand, whose shape doesn't depend on the number of rows."""

    @override
    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias``, computed as the transpose of ``weight·xᵀ + bias``."""
        found = packed @ x.t() if bias is None else torch.addmm(bias.unsqueeze(1), packed, x.t())
        return found.t().contiguous()


class Upcast:
    """A 16-bit weight, copied to fp32 a part at a time, while the part is multiplied: on processors without
    instructions for 16-bit numbers, where this is nearly as fast as fp32 weights for several rows, and takes a quarter
    of their memory.
    """

    copies = False

    def __init__(self) -> None:
        self._part = torch.empty(0)  # kept: fresh memory for each product takes more time than the copy

    def refusal(self, weight: Tensor) -> str | None:
        """None, or why the weight isn't upcast: it isn't 16 bits wide or not on a CPU, or the CPU multiplies 16-bit
        numbers.
        """
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16):
            return "it is for bf16 and fp16 on a CPU"
        return None if lacks_bf16() else "this processor has instructions for 16-bit numbers"

    def pack(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Views of groups of outputs."""
        return torch.split(weight.detach(), max(1, _PART // max(1, weight.shape[1])))

    def multiply(self, x: Tensor, packed: tuple[Tensor, ...], bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` in fp32, one group of outputs after the other."""
        wide, sizes = x.float(), [len(part) for part in packed]
        found = wide.new_empty(x.shape[0], sum(sizes))
        if self._part.numel() < packed[0].numel():
            self._part = torch.empty(max(_PART, packed[0].numel()))
        for part, columns in zip(packed, torch.split(found, sizes, dim=1), strict=True):
            torch.mm(wide, self._part[: part.numel()].view(part.shape).copy_(part).t(), out=columns)
        return (found if bias is None else found.add_(bias)).to(x.dtype)


class Blocked:
    """The weight in oneDNN's blocks, on a CPU."""

    copies = True

    def refusal(self, weight: Tensor) -> str | None:
        """None, or why oneDNN doesn't take weights of this type on this device."""
        if weight.device.type != "cpu" or weight.dtype not in _PACKED_FROM:
            return "oneDNN's blocks are for bf16 and fp32 on a CPU"
        return _works(self, weight.dtype)

    def pack(self, weight: Tensor) -> Tensor:
        """``weight`` in oneDNN's blocks, reordered."""
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _HINT)
        return packed

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` by oneDNN's product with blocked weights."""
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return found


class Columns(Plain):
    """The weight transposed in memory, for one or two rows in fp32: neighbouring outputs are side by side."""

    @override
    def pack(self, weight: Tensor) -> Tensor:
        """A transposed copy of ``weight``: ``[in, out]``."""
        return weight.detach().t().contiguous()

    @override
    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` with the transposed copy of the weight."""
        return x @ packed if bias is None else torch.addmm(bias, x, packed)


@dataclass(frozen=True)
class _Whole:
    """Integers from -127 to 127 in oneDNN's blocks, and ``scales`` and zero points ``[out]``."""

    blocks: Tensor
    scales: Tensor
    zeros: Tensor


class Int8:
    """The weight in 8 bits with a scale for each output, half the memory traffic of bf16.

    Small weights of bf16 models are multiplied in bf16, where rows have a length that torch's kernel takes. Others are
    multiplied as whole numbers: each row of inputs is rounded to 16 bits, with a scale of its own, and is two rows of
    bytes. Sums of whole numbers are exact, so that a row's bits depend on nothing else, and errors are those of the
    weights.
    """

    copies = True

    def refusal(self, weight: Tensor) -> str | None:
        """None, or why the weight can't be multiplied in 8 bits on this device."""
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            dtype = str(weight.dtype).removeprefix("torch.")
            return f"it is for bf16 and fp32 models on a CPU, and this one is in {dtype} on {weight.device.type}"
        return _works(self, weight.dtype) or _works(self, torch.float32)

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor] | _Whole:
        """Numbers from -127 to 127, and scales, whose rounding to the weight's type comes first so that it adds no
        error.
        """
        wide = weight.detach().float()
        scales = (wide.abs().amax(dim=1) / 127).clamp(min=1e-30).to(weight.dtype)
        numbers = (wide / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
        return self.packed(numbers, scales, weight)

    def packed(self, numbers: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | _Whole:
        """Numbers ``[out, in]`` of 8 bits and scales ``[out]`` as the product for weights such as ``weight`` has
        them.
        """
        if weight.dtype == torch.bfloat16 and weight.numel() < _LARGE and weight.shape[1] % _STRIDE == 0:
            return numbers, scales
        blocks: Tensor = torch.ops.onednn.qlinear_prepack(numbers, None)
        return _Whole(blocks, scales.float(), torch.zeros(len(scales), dtype=torch.int32))

    def multiply(self, x: Tensor, packed: tuple[Tensor, Tensor] | _Whole, bias: Tensor | None) -> Tensor:
        """``x·weightᵀ + bias`` with a weight in 8 bits."""
        if isinstance(packed, tuple):
            found = torch._weight_int8pack_mm(x, *packed)
            return found if bias is None else found + bias
        steps = torch.linalg.vector_norm(x, math.inf, -1, True, dtype=torch.float32).clamp_(min=1e-30).div_(_STEPS)
        # A number n is 256 high + low of the bytes of n + 256 * 128 + 128, from each of which 128 is subtracted.
        whole = torch.div(x, steps).add_(256 * 128 + 128 + 0.5).to(torch.int32)
        low_and_high = whole.view(torch.uint8).view(*x.shape, 4)[..., :2].permute(2, 0, 1).reshape(-1, x.shape[1])
        given = (low_and_high, 1.0, 128, packed.blocks, packed.scales, packed.zeros, None)
        sums: Tensor = torch.ops.onednn.qlinear_pointwise(*given, 1.0, 0, torch.float32, "none", [], "")
        low, high = sums.chunk(2)
        found = torch.add(low, high, alpha=256.0).mul_(steps)
        return (found if bias is None else found.add_(bias)).to(x.dtype)


@functools.cache
def _works(form: Form, dtype: torch.dtype) -> str | None:
    """None, or why the kernel can't be used: it is no public function of torch's, and may be missing or another."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 64, generator=generator).to(dtype) for rows in (3, 32))
    x[0], weight[0] = 1, 1  # a sum that doesn't fit into 16 bits, which processors without int8 products may cut off
    try:
        found = form.multiply(x, form.pack(weight), None)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        return f"this torch or processor has no such product ({str(error).splitlines()[0]})"
    expected = F.linear(x.double(), weight.double())
    is_close = bool((found.double() - expected).norm() <= 0.02 * expected.norm())
    return None if is_close else "this torch or processor computes it wrongly"


PLAIN, TRANSPOSED, BLOCKED, COLUMNS, INT8 = Plain(), Transposed(), Blocked(), Columns(), Int8()


@dataclass(frozen=True)
class _Prepared:
    """A weight, which is kept so that no other gets its id, and how it is multiplied; few rows by ``columns``.
    ``is_copied``: ``packed`` has memory of its own.
    """

    weight: Tensor
    packed: Any
    multiply: _Multiply
    is_copied: bool = False
    columns: Tensor | None = None


class GenerationProducts:
    """``x·weightᵀ + bias``: [..., in], [out, in], [out] -> [..., out]; see ``Multiply``.

    ``is_batch_invariant``: the bits of a row don't depend on how many there are. ``form``: of the model's own weights;
    None: oneDNN's blocks where they work, and 16-bit weights as they are on processors without instructions for them.
    ``stored``: forms of single weights, by id. ``experts``: those of the matrices of stacked weights. All are copied
    when first used, and must not change. Parameters that require gradients, which training changes, and other matrices,
    such as parts of a weight, are not copied.
    """

    def __init__(
        self,
        *,
        is_batch_invariant: bool,
        form: Form | None = None,
        stored: Mapping[int, StoredForm] | None = None,
        experts: Mapping[int, Sequence[StoredForm]] | None = None,
    ) -> None:
        self._is_batch_invariant, self._form, self._upcast = is_batch_invariant, form, Upcast()
        self._stored, self._experts = stored or {}, experts or {}
        self._prepared_experts: dict[int, tuple[Tensor, list[Callable[[Tensor], Tensor]]]] = {}
        self._prepared: dict[tuple[int, bool], _Prepared] = {}
        self._packed: dict[int, tuple[Any, Tensor | None]] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product ``x·weightᵀ + bias``: [..., in] -> [..., out]."""
        shape = x.shape
        if 0 in shape:
            return F.linear(x, weight, bias)
        key = (id(weight), bias is None)
        if (prepared := self._prepared.get(key)) is None:
            is_own = isinstance(weight, nn.Parameter) and not weight.requires_grad
            prepared = self._prepare(weight, has_bias=bias is not None, is_own=is_own)
            if is_own:
                self._prepared[key] = prepared
        rows = x.reshape(-1, shape[-1])
        if prepared.columns is not None and rows.shape[0] < _PACKED_FROM[weight.dtype]:
            return COLUMNS.multiply(rows, prepared.columns, bias).view(*shape[:-1], -1)
        return prepared.multiply(rows, prepared.packed, bias).view(*shape[:-1], -1)

    def experts(self, rows: Tensor, weight: Tensor, parts: Callable[[Tensor], Sequence[Tensor]]) -> Tensor | None:
        """Rows times the matrix of their expert, where ``weight`` [e, ..., in] stays in few bits; None elsewhere. See
        ``MultiplyExperts``.
        """
        if id(weight) not in self._experts:
            return None
        if id(weight) not in self._prepared_experts:
            matrices = weight.detach().flatten(1, -2).unbind(0)
            pairs = zip(matrices, self._experts[id(weight)], strict=True)
            self._prepared_experts[id(weight)] = weight, [self._prepare_expert(*pair) for pair in pairs]
        _, products = self._prepared_experts[id(weight)]
        out = rows.new_empty(len(rows), math.prod(weight.shape[1:-1]))
        for part, into, product in zip(parts(rows), parts(out), products, strict=True):
            if len(part):
                into.copy_(product(part))
        return out

    @torch.inference_mode()
    def _prepare_expert(self, matrix: Tensor, form: StoredForm) -> Callable[[Tensor], Tensor]:
        multiply, packed = cast(_Multiply, form.multiply), form.pack(matrix)
        if self._is_batch_invariant:
            _, sizes = equal_rows(_Layout.of(matrix), (form.measured,), has_bias=False)
            multiply = EqualRows(multiply, sizes).multiply
        return lambda rows: multiply(rows, packed, None)

    def release(self, weights: Iterable[Tensor]) -> None:
        """Give up the memory of those of ``weights`` of which a copy is used. They keep their shape, and are NaN."""
        copied = {id(each.weight) for each in self._prepared.values() if each.is_copied} | {*self._prepared_experts}
        for weight in weights:
            if id(weight) in copied:
                weight.data = weight.new_full((), math.nan).expand(weight.shape)

    @torch.inference_mode()
    def _prepare(self, weight: Tensor, *, has_bias: bool, is_own: bool) -> _Prepared:
        forms: tuple[Form, ...] = (self._upcast, PLAIN)
        if is_own:
            forms = (self._upcast, BLOCKED, PLAIN) if self._form is None else (self._form,)
        stored = self._stored.get(id(weight)) if is_own else None
        form = stored or next(each for each in forms if each.refusal(weight) is None)
        has_columns, multiply = False, cast(_Multiply, form.multiply)
        if self._is_batch_invariant:
            others = () if (self._form is not None and is_own) or stored else (TRANSPOSED, PLAIN)
            candidates = others if form is PLAIN else (form, *others)
            kinds = (stored.measured,) if stored else tuple(map(type, candidates))
            chosen, sizes = equal_rows(_Layout.of(weight), kinds, has_bias=has_bias)
            form = stored or next(each for each in candidates if type(each) is chosen)
            multiply = EqualRows(form.multiply, sizes).multiply
        elif form is BLOCKED:
            has_columns = _PACKED_FROM[weight.dtype] > 1
        if not form.copies:
            return _Prepared(weight, form.pack(weight), multiply)
        if id(weight) not in self._packed:
            self._packed[id(weight)] = form.pack(weight), COLUMNS.pack(weight) if has_columns else None
        packed, columns = self._packed[id(weight)]
        return _Prepared(weight, packed, multiply, True, columns)


@dataclass(frozen=True)
class _Layout:
    """What the choice of a kernel may depend on, beside the number of rows."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    threads: int

    @classmethod
    def of(cls, weight: Tensor) -> _Layout:
        return cls(weight.shape, weight.stride(), weight.dtype, weight.device, torch.get_num_threads())


@functools.cache
@torch.inference_mode()
def equal_rows(layout: _Layout, forms: tuple[type[Form], ...], *, has_bias: bool) -> tuple[type[Form], tuple[int, ...]]:
    """The first of ``forms`` in which few rows and many have the same bits, for weights of this layout; else the one
    that has them for the most numbers of rows. With those numbers.
    """
    weight = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
    few, like = cancelling(weight)
    bias = like.new_zeros(len(like)) if has_bias else None
    found = list[tuple[type[Form], tuple[int, ...]]]()
    for kind in forms:
        form = kind()
        sizes = agreeing(form.multiply, few, form.pack(like), bias)
        if EqualRows(form.multiply, sizes).serves_all:
            return kind, sizes
        found.append((kind, sizes))
    return max(found, key=lambda each: len(each[1]))
