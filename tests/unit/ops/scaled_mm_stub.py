"""torch's products of scaled 8-bit matrices on CUDA, in fp64 on a CPU: the layouts that they demand and what they give.

Written from the documentation of ``torch.nn.functional.scaled_mm`` and the checks in torch 2.13's
``aten/src/ATen/native/cuda/ScaledBlas.cpp``, and shares nothing with our own arithmetic: a scale is looked up by the
place of each number, that of blocks of 32 in the tiles of cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_SCALED_MM = hasattr(F, "scaled_mm")  # from torch 2.10 on
Scaling, Swizzle = (F.ScalingType, F.SwizzleType) if HAS_SCALED_MM else (MagicMock(), MagicMock())
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class ScaledProducts:
    """Both functions. ``fast``: for each call, whether it allowed accumulation in fewer bits."""

    fast: list[bool] = field(default_factory=list)

    def _scaled_mm(
        self,
        input: Tensor,
        mat2: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        """``torch._scaled_mm`` with one scale for each matrix."""
        assert scale_a.numel() == scale_b.numel() == 1, "scales of blocks are ambiguous here"
        kind = Scaling.TensorWise
        return self.scaled_mm(
            input,
            mat2,
            scale_a,
            kind,
            scale_b,
            kind,
            output_dtype=out_dtype or input.dtype,
            use_fast_accum=use_fast_accum,
        )

    def scaled_mm(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Tensor,
        scale_recipe_a: Any,
        scale_b: Tensor,
        scale_recipe_b: Any,
        swizzle_a: Any = Swizzle.NO_SWIZZLE,
        swizzle_b: Any = Swizzle.NO_SWIZZLE,
        bias: Tensor | None = None,
        output_dtype: torch.dtype = torch.bfloat16,
        contraction_dim: tuple[int, ...] = (),
        use_fast_accum: bool = False,
    ) -> Tensor:
        """``torch.nn.functional.scaled_mm``."""
        (rows, inner), outputs = mat_a.shape, mat_b.shape[1]
        assert mat_a.dtype in FP8 and mat_b.dtype in FP8, "both are in 8 bits"
        assert mat_a.stride() == (inner, 1), "the first is row by row"
        assert mat_b.stride() == (1, inner), "the second is column by column"
        assert inner % 16 == outputs % 16 == 0, "the inner and the output dimension are multiples of 16"
        assert torch.float8_e5m2 not in (mat_a.dtype, mat_b.dtype) or mat_a.dtype != mat_b.dtype, "E5M2 by E5M2"
        assert not (rows == 0 or inner == 0 or outputs == 0), "callers do without a kernel"
        pair = (scale_recipe_a, scale_recipe_b)
        assert pair in _PAIRS, f"no kernel has {pair}"
        self.fast.append(use_fast_accum)
        left = _factors(scale_a, scale_recipe_a, swizzle_a, rows, inner)
        right = _factors(scale_b, scale_recipe_b, swizzle_b, outputs, inner).t()
        return ((mat_a.double() * left) @ (mat_b.double() * right)).to(output_dtype)


_PAIRS = (
    (Scaling.TensorWise, Scaling.TensorWise),
    (Scaling.BlockWise1x128, Scaling.BlockWise1x128),
    (Scaling.BlockWise1x128, Scaling.BlockWise128x128),
    (Scaling.BlockWise128x128, Scaling.BlockWise1x128),
    (Scaling.BlockWise1x32, Scaling.BlockWise1x32),
)


def _factors(scale: Tensor, kind: Any, swizzle: Any, rows: int, inner: int) -> Tensor:
    """The scale of each number of an operand [rows, inner], or one for all, fp64."""
    row, column = torch.arange(rows)[:, None], torch.arange(inner)[None]
    if kind == Scaling.BlockWise1x32:
        assert swizzle == Swizzle.SWIZZLE_32_4_4 and scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous()
        blocks = column // 32
        wide = -(-(inner // 32) // 4)
        assert scale.numel() == -(-rows // 128) * 128 * wide * 4
        tile = (row // 128) * wide + blocks // 4
        place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + blocks % 4
        found: Tensor = torch.exp2(scale.view(torch.uint8).double().view(-1)[place] - 127)
        return found
    assert swizzle == Swizzle.NO_SWIZZLE and scale.dtype == torch.float32
    if kind == Scaling.TensorWise:
        assert scale.numel() == 1
        return scale.double()
    across = -(-inner // 128)
    if kind == Scaling.BlockWise1x128:
        assert scale.shape == (rows, across) and scale.stride(0) == 1 and scale.stride(1) in (rows, 1)
        assert scale.stride(1) == rows or across == 1
        return scale.double()[row, column // 128]
    padded, high = -(-across // 4) * 4, -(-rows // 128)
    assert scale.shape == (padded, high) and scale.stride(0) == 1
    assert scale.stride(1) == padded or (high == 1 and scale.stride(1) == 1)
    return scale.double()[column // 128, row // 128]
