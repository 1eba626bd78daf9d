"""Grouped matrix products for experts: each group of rows times its own matrix, by the first backend that can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.device import capability
from megatron.core.ops.backend_choice import Choice
from megatron.core.ops.matmul import add_transposed_times, is_faster_in_fp32, product, transposed_times
from megatron.errors import ConfigError

_grouped_mm: Any = getattr(functional, "grouped_mm", None)
_ALIGNMENT = 16  # bytes to which grouped_mm wants rows aligned


@dataclass(frozen=True)
class Groups:
    """How many consecutive rows belong to each group. ``counts`` [e], int64. ``known``: the same as numbers, where the
    host has them.
    """

    counts: Tensor
    known: list[int] | None = None

    @cached_property
    def sizes(self) -> list[int]:
        """The counts as numbers; waits for the device unless they are ``known``."""
        found: list[int] = self.counts.tolist() if self.known is None else self.known
        return found

    @cached_property
    def ends(self) -> Tensor:
        """Where each group ends [e], int32."""
        return self.counts.cumsum(0).to(torch.int32)

    def within(self, start: int, stop: int) -> Groups:
        """The groups of rows ``start … stop-1`` alone."""
        ends = self.counts.cumsum(0)
        starts = ends - self.counts
        return Groups((ends.clamp(max=stop) - starts.clamp(min=start)).clamp(min=0))

    def parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows of each group."""
        return torch.split(rows, self.sizes)


class Backend(Protocol):
    """Products without gradients."""

    def supports(self, dtype: torch.dtype, device: torch.device, widths: tuple[int, ...]) -> str | None:
        """None, or why it can't multiply rows and matrices of this type and these ``widths``."""
        ...

    def multiply(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Rows [n, in] times the matrix [e, in, out] of their group: [n, out]. Views are fine."""
        ...

    def outer(self, grads: Tensor, rows: Tensor, groups: Groups) -> Tensor:
        """``gradsᵀ·rows`` of each group: [n, out] and [n, in] -> [e, out, in]; zero for a group without rows."""
        ...

    def add_outer(self, total: Tensor, grads: Tensor, rows: Tensor, groups: Groups) -> None:
        """Add ``gradsᵀ·rows`` of each group to ``total`` [e, out, in], whose type may be wider."""
        ...

    def for_generation(self) -> Backend:
        """A backend whose bits of a row don't depend on how many rows there are."""
        ...


@dataclass(frozen=True)
class Loop:
    """One product for each group, in any type on any device. ``product``: of two matrices. ``in_generation``: the
    backend that serves then; None: this one, with products as they come.
    """

    product: Callable[[Tensor, Tensor], Tensor] = product
    in_generation: Backend | None = None

    def supports(self, dtype: torch.dtype, device: torch.device, widths: tuple[int, ...]) -> str | None:
        """None: every call is taken."""
        return None

    def multiply(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Rows [n, in] times the matrix [e, in, out] of their group, one product for each group: [n, out]."""
        out = rows.new_empty(rows.shape[0], matrices.shape[2])
        for part, matrix, into in zip(groups.parts(rows), matrices.unbind(0), groups.parts(out)):
            into.copy_(self.product(part, matrix))
        return out

    def outer(self, grads: Tensor, rows: Tensor, groups: Groups) -> Tensor:
        """``gradsᵀ·rows`` of each group, [e, out, in], one product for each group."""
        out = rows.new_empty(len(groups.sizes), grads.shape[1], rows.shape[1])
        for grad, part, into in zip(groups.parts(grads), groups.parts(rows), out.unbind(0)):
            into.copy_(transposed_times(grad, part))
        return out

    def add_outer(self, total: Tensor, grads: Tensor, rows: Tensor, groups: Groups) -> None:
        """Add ``gradsᵀ·rows`` of each group to ``total`` [e, out, in] in place, without a tensor of the products."""
        for grad, part, into in zip(groups.parts(grads), groups.parts(rows), total.unbind(0)):
            if len(part):
                add_transposed_times(into, grad, part)

    def for_generation(self) -> Backend:
        """The backend that serves generation: ``in_generation``, or products by ``torch.mm``."""
        return self.in_generation or Loop(torch.mm)


class GroupedMM:
    """torch's kernel for all groups at once."""

    def supports(self, dtype: torch.dtype, device: torch.device, widths: tuple[int, ...]) -> str | None:
        """16-bit types on GPUs from Ampere on, fp32 on CPUs, too, from torch 2.10 on."""
        if _grouped_mm is None:
            return "torch has it from version 2.10 on"
        on_cpus = (torch.bfloat16, torch.float16, torch.float32)
        allowed = on_cpus if device.type == "cpu" else (torch.bfloat16,)
        if dtype not in allowed:
            return f"it doesn't compute in {str(dtype).removeprefix('torch.')} on a {device.type.upper()}"
        if (capability(device) or (8, 0)) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or higher"
        odd = [width for width in widths if width * dtype.itemsize % _ALIGNMENT]
        return f"a width of {odd[0]} isn't a multiple of {_ALIGNMENT // dtype.itemsize}" if odd else None

    def multiply(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Rows [n, in] times the matrix [e, in, out] of their group, in one call: [n, out]."""
        found: Tensor = _grouped_mm(_aligned(rows), matrices, offs=groups.ends)
        return found

    def outer(self, grads: Tensor, rows: Tensor, groups: Groups) -> Tensor:
        """``gradsᵀ·rows`` of each group, [e, out, in], in one call."""
        found: Tensor = _grouped_mm(_aligned(grads).t(), _aligned(rows), offs=groups.ends)
        return found

    def add_outer(self, total: Tensor, grads: Tensor, rows: Tensor, groups: Groups) -> None:
        """Add ``gradsᵀ·rows`` of each group to ``total``; the kernel cannot add, and a product for each group would
        wait for their sizes.
        """
        total.add_(self.outer(grads, rows, groups))

    def for_generation(self) -> Backend:
        """This backend."""
        return self


def _aligned(rows: Tensor) -> Tensor:
    """Rows whose strides are those of their shape: torch calls one row, or none, contiguous whatever its stride is."""
    return rows if rows.stride(0) == rows.shape[1] else rows.clone(memory_format=torch.contiguous_format)


# In order of preference; the last supports everything.
BACKENDS: dict[str, Backend] = {"grouped_mm": GroupedMM(), "loop": Loop()}


def choose(dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], backend: str = "auto") -> Choice[Backend]:
    """The backend for products of ``widths``; ConfigError when the one named explicitly refuses."""
    if backend == "auto":
        kernel = BACKENDS["grouped_mm"]
        refused = kernel.supports(dtype, device, widths)
        if refused is None and is_faster_in_fp32(dtype, device):
            refused = "on this processor products of single groups, computed in fp32, are faster"
            return Choice("loop", Loop(in_generation=kernel), {"grouped_mm": refused})
        if refused is None:
            return Choice("grouped_mm", kernel)
        return Choice("loop", BACKENDS["loop"], {"grouped_mm": refused})
    reason = BACKENDS[backend].supports(dtype, device, widths)
    if reason is not None:
        raise ConfigError(f"--moe-matmul-backend {backend} cannot be used: {reason}; use --moe-matmul-backend auto")
    return Choice(backend, BACKENDS[backend])
