"""Matrix products by the fastest library at hand.

On CPU in fp32 that is torch's own choice, MKL, on Intel's processors, and oneDNN on others, where MKL doesn't take its
AVX-512 kernels and is half as fast. Products of bf16 numbers are computed in fp32 where that is faster: on Intel's
processors without matrix units, and on all others of the x86 kind that have no instructions for bf16.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

_ONEDNN_FROM = 1 << 20  # multiplications; below, the fixed cost of a call outweighs the speed
_BLOCK_ELEMENTS = 1 << 22  # of a sum, computed before they are added: what stays in the caches
_WIDE_FROM = 64  # rows; with fewer the copy of the other operand costs more than its product saves
_WIDE_FROM_WITHOUT_BF16 = 4  # the same where a processor has no instructions for bf16


def multiplied(function: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    """``function`` of ``operands``, a product that adds up in fp32, in the type of the first. Without gradient.

    bf16 operands are copied to fp32 and the result is rounded where ``is_faster_in_fp32``: no digit gets lost.
    """
    first = operands[0]
    assert first is not None
    if not is_faster_in_fp32(first.dtype, first.device) or first.numel() < _wide_from() * first.shape[-1]:
        return function(*operands)
    return function(*(None if each is None else each.float() for each in operands)).to(first.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    by: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
) -> Tensor:
    """``x·weightᵀ + bias``: [..., in], [out, in], [out] -> [..., out]. ``by``: the function of generation that does it,
    if there is one.
    """
    return multiplied(functional.linear, x, weight, bias) if by is None else by(x, weight, bias)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a·b``: [m, k] and [k, n] -> [m, n]. Without gradient."""
    return multiplied(torch.mm, a, b)


def is_faster_in_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of ``dtype`` are faster by copies in fp32: bf16 on a CPU that is slow with it."""
    return dtype == torch.bfloat16 and device.type == "cpu" and _is_slow_in_bf16()


def in_fastest_type(x: Tensor) -> Tensor:
    """``x`` in the type in which its products are fastest: fp32 where ``is_faster_in_fp32``."""
    return x.float() if is_faster_in_fp32(x.dtype, x.device) else x


def is_fusion_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``add_transposed_times`` to a sum in fp32 is faster than a product of ``dtype`` and its addition."""
    return device.type != "cpu" or is_faster_in_fp32(dtype, device)


def times_transposed(a: Tensor, b: Tensor, bias: Tensor | None = None, *, buffer: Tensor | None = None) -> Tensor:
    """``a·bᵀ`` (+ ``bias`` on every row): [m, k] and [n, k] -> [m, n]. Without gradient.

    ``buffer`` [at least m, n] may be used for the result, to spare the system fresh pages for a large one.
    """
    if is_faster_in_fp32(a.dtype, a.device):
        found = linear(a, b, bias)
        return found if buffer is None else buffer[: a.shape[0]].copy_(found)
    if not _onednn_serves(a, b):
        out = None if buffer is None else buffer[: a.shape[0]]
        return torch.mm(a, b.t(), out=out) if bias is None else torch.addmm(bias, a, b.t(), out=out)
    if not (b.is_contiguous() or b.t().is_contiguous()):
        b = b.contiguous()  # oneDNN has no fast kernel for a slice of columns
    blocked: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return blocked


def transposed_times(a: Tensor, b: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """``aᵀ·b``, added to ``add_to`` in place where that is given: [k, m] and [k, n] -> [m, n]. Without gradient.

    A weight's gradient. It may come as a transposed view: oneDNN needs one operand transposed in memory, and the
    smaller of the two is the cheaper one. Add only to what this function returned for the same shapes.
    """
    if is_faster_in_fp32(a.dtype, a.device):
        found = product(a.t(), b)
        return found if add_to is None else add_to.add_(found)
    if not _onednn_serves(a.t(), b.t()):
        return torch.mm(a.t(), b) if add_to is None else add_to.addmm_(a.t(), b)
    if b.shape[1] < a.shape[1]:
        return transposed_times(b, a, add_to=None if add_to is None else add_to.t()).t()
    rows = a.t().contiguous()  # [m, k]
    if add_to is None:
        return times_transposed(rows, b.t())
    block = max(64, _BLOCK_ELEMENTS // b.shape[1] // 64 * 64)
    for start in range(0, rows.shape[0], block):
        add_to[start : start + block].add_(times_transposed(rows[start : start + block], b.t()))
    return add_to


def add_transposed_times(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += aᵀ·b``, for [m, n], [k, m] and [k, n]; ``total`` may be wider than ``a`` and ``b``, fp32 and bf16.

    A weight's gradient that is added to those before it, of which no tensor is made. A GPU's product then adds without
    rounding to the narrow type; elsewhere the product is rounded, some rows at a time.
    """
    if total.dtype == a.dtype:
        transposed_times(a, b, add_to=total)
    elif total.dtype == torch.float32 and is_faster_in_fp32(a.dtype, a.device):
        transposed_times(a.float(), b.float(), add_to=total)
    elif total.device.type != "cpu" and _adds_to_wider():
        torch.addmm(total, a.t(), b, out_dtype=total.dtype, out=total)
    else:
        block = max(64, _BLOCK_ELEMENTS // b.shape[1] // 64 * 64)
        for start in range(0, total.shape[0], block):
            part = torch.mm(a[:, start : start + block].t(), b)
            total[start : start + block].add_(part.to(total.dtype))  # on CPU two steps are faster than one


@functools.cache
def _adds_to_wider() -> bool:
    """Whether this torch has products of 16-bit numbers with a sum in fp32: from 2.8 on, not with ROCm."""
    return torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")


def _onednn_serves(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN computes ``a·bᵀ``: fp32 on an x86 CPU, and enough work."""
    return (
        a.device.type == "cpu"
        and a.dtype == torch.float32
        and b.dtype == torch.float32
        and a.numel() * b.shape[0] >= _ONEDNN_FROM
        and _has_onednn()
    )


@functools.cache
def _is_slow_in_bf16() -> bool:
    """Whether fp32 is faster than torch's bf16, copies included: on Intel's processors (1.3 to 1.7 times, measured with
    AVX-512), and on those that have no instructions for bf16 (4 to 60 times, measured with AVX2).
    """
    return lacks_bf16() or (is_intel() and not torch.cpu._is_amx_tile_supported())


@functools.cache
def lacks_bf16() -> bool:
    """Whether this is an x86 processor that has no instructions for bf16, nor for fp16, as those of most laptops."""
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return platform.machine().lower() in ("x86_64", "amd64") and not has_bf16


def _wide_from() -> int:
    return _WIDE_FROM_WITHOUT_BF16 if lacks_bf16() else _WIDE_FROM


@functools.cache
def _has_onednn() -> bool:
    built = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return built and torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_intel()


def is_intel() -> bool:
    """Whether the processor is Intel's, for whose own MKL has its fastest kernels."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        described = platform.processor()
    return "GenuineIntel" in described
