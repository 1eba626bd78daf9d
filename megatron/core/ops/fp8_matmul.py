"""Products of two matrices in 8 bits: by the device's kernels on GPUs, by emulation elsewhere.

Emulation computes with the same codes and scales; only the order and the precision of sums differ.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import capability, cuda_release
from megatron.core.ops.quantize import BLOCK, E5M2, MX_BLOCK, Quantized, bytes_of, values_of

Implementation = Literal["device", "emulation"]

CAPABILITIES: dict[str, tuple[int, int]] = {
    "tensorwise": (8, 9),
    "delayed": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""The lowest compute capability of a GPU whose kernels multiply with each recipe's scales."""

_BELOW: dict[str, tuple[int, int]] = {"blockwise": (10, 0), "mxfp8": (12, 0)}  # and the lowest whose don't any more
_CUDA_OF_BLOCKS = (12, 9)  # from which cuBLAS has scales for blocks of 128

_ALIGNMENT = 16  # elements to which kernels want the inner and the output dimension aligned
# Names that torch has since 2.10.
_scaled_mm: Any = getattr(F, "scaled_mm", None)
_Scaling: Any = getattr(F, "ScalingType", None)
_Swizzle: Any = getattr(F, "SwizzleType", None)


def implementation_on(device: torch.device) -> Implementation:
    """What multiplies on a device."""
    return "emulation" if device.type in ("cpu", "meta") else "device"


def refusal(recipe: str, device: torch.device) -> str | None:
    """None, or why a device can't multiply with a recipe's scales. Emulation multiplies with all of them."""
    found = capability(device)
    if found is None:
        return None
    needed, below = CAPABILITIES[recipe], _BELOW.get(recipe)
    if found < needed or (below is not None and found >= below):
        limit = "" if below is None else f", and below {_dotted(below)}"
        return f"it needs a GPU of compute capability {_dotted(needed)} or higher{limit}; this is {_dotted(found)}"
    if recipe in ("blockwise", "mxfp8") and _scaled_mm is None:
        return f"products with scales of blocks need torch 2.10 or newer; this is {torch.__version__}"
    cuda = cuda_release()
    if recipe == "blockwise" and (cuda is None or cuda < _CUDA_OF_BLOCKS):
        has = "none" if cuda is None else _dotted(cuda)
        return f"it needs a torch built with CUDA {_dotted(_CUDA_OF_BLOCKS)} or newer; this one has {has}"
    return None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def multiply(a: Quantized, b: Quantized, dtype: torch.dtype, *, by: Implementation, is_fast: bool = False) -> Tensor:
    """``a·bᵀ``: [m, k] and [n, k] -> [m, n] in ``dtype``.

    ``is_fast``: device kernels may add up in fewer bits than fp32, as is usual in forward passes.
    """
    assert a.data.shape[1] == b.data.shape[1], f"{tuple(a.data.shape)} times {tuple(b.data.shape)} transposed"
    if 0 in (*a.data.shape, len(b.data)):
        return a.scales.new_zeros(len(a.data), len(b.data), dtype=dtype)
    if by == "emulation":
        wide = torch.promote_types(dtype, torch.float32)
        if a.block is None and b.block is None:  # as kernels do: products of codes are exact, and scaled at the end
            found = torch.mm(values_of(a.data, wide), values_of(b.data, wide).t())
            return found.mul_(a.scales.to(wide) * b.scales.to(wide)).to(dtype)
        return torch.mm(a.dequantized(wide), b.dequantized(wide).t()).to(dtype)
    assert a.data.dtype != E5M2 or b.data.dtype != E5M2, "no kernel multiplies E5M2 by E5M2"
    return _on_device(a, b, dtype, is_fast=is_fast)


def _on_device(a: Quantized, b: Quantized, dtype: torch.dtype, *, is_fast: bool) -> Tensor:
    (rows, _), outputs = a.data.shape, b.data.shape[0]
    if a.block is None:
        left, right = (_padded(each, rows=_ALIGNMENT, columns=_ALIGNMENT) for each in (a.data, b.data))
        # Both are row by row, so that the second is what kernels want: column by column.
        found: Tensor = torch._scaled_mm(left, right.t(), a.scales, b.scales, out_dtype=dtype, use_fast_accum=is_fast)
        return found[:rows, :outputs]
    if a.scales.dtype == torch.uint8:
        return _microscaled(a, b, dtype)[:rows, :outputs]
    left, right = (_padded(each, rows=BLOCK, columns=BLOCK) for each in (a.data, b.data))
    scales, recipes = list[Tensor](), list[Any]()
    for each, data in ((a, left), (b, right)):
        assert each.block is not None
        is_row = each.block[0] == 1
        wide, high = data.shape[1] // BLOCK, data.shape[0] if is_row else data.shape[0] // BLOCK
        # Kernels read scales column by column: [rows, blocks], and those of squares as [blocks, squares].
        padded = F.pad(each.scales, (0, wide - each.scales.shape[1], 0, high - each.scales.shape[0]))
        # Padding by nothing keeps the strides, which in a transposed weight are those of columns.
        squares = F.pad(padded, (0, -wide % 4)).contiguous()
        scales.append(padded.t().contiguous().t() if is_row else squares.t())
        recipes.append(_Scaling.BlockWise1x128 if is_row else _Scaling.BlockWise128x128)
    found = _scaled_mm(left, right.t(), scales[0], recipes[0], scales[1], recipes[1], output_dtype=dtype)
    return found[:rows, :outputs]


def _microscaled(a: Quantized, b: Quantized, dtype: torch.dtype) -> Tensor:
    kind, swizzle = _Scaling.BlockWise1x32, _Swizzle.SWIZZLE_32_4_4
    left, right = (_padded(each, rows=_ALIGNMENT, columns=MX_BLOCK) for each in (a.data, b.data))
    scales = [swizzled(each.scales) for each in (a, b)]
    found: Tensor = _scaled_mm(
        left, right.t(), scales[0], kind, scales[1], kind, swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=dtype
    )
    return found


def swizzled(exponents: Tensor) -> Tensor:
    """Scales [m, k/32] as kernels of sm_100 read them: padded to tiles of 128 x 4, in each of which rows r, r+32, r+64
    and r+96 lie side by side; 1-D, E8M0.
    """
    high, wide = (-(-size // tile) * tile for size, tile in zip(exponents.shape, (128, 4)))
    padded = F.pad(exponents, (0, wide - exponents.shape[1], 0, high - exponents.shape[0]))
    tiles = padded.view(high // 128, 4, 32, wide // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


def _padded(data: Tensor, *, rows: int, columns: int) -> Tensor:
    """Row by row, with zeros up to multiples of ``rows`` and ``columns``."""
    below, right = -data.shape[0] % rows, -data.shape[1] % columns
    if not (below or right):
        return bytes_of(data).contiguous().view(data.dtype)
    return F.pad(bytes_of(data), (0, right, 0, below)).view(data.dtype)
