"""Weights that are gathered and kept in 8 bits between updates (``--fp8-param-gather``)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.buffers import FlatBuffer, ParamEntry, Span
from megatron.core.ops.quantize import BLOCK, Quantized, amax_of_part, codes_of_part
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel.fp8_linear import Fp8Quantizer, matrices_of


@dataclass(eq=False)
class _Part:
    """What this rank's shard of a bucket holds of a weight: elements from number ``start`` on, ``weights``, and their
    ``codes``. The weight is ``count`` matrices of one ``shape``, whose codes a gather fills in: ``wholes``. ``axes``:
    groups that agree on its largest values.

    ``largest``, ``scales``: of each matrix, [count], or of its blocks, fp32; what a step quantizes by.
    """

    entry: ParamEntry
    quantizer: Fp8Quantizer
    axes: tuple[tuple[Axis, ...], ...]
    start: int
    weights: Tensor
    codes: Tensor
    wholes: tuple[Tensor, ...]
    count: int
    shape: tuple[int, int]
    largest: Tensor = field(default_factory=lambda: torch.empty(0))
    scales: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def block(self) -> tuple[int, int] | None:
        return (BLOCK, BLOCK) if self.quantizer.recipe == "blockwise" else None

    def in_matrices(self) -> list[tuple[Tensor, Tensor, int]]:
        """The weights of each matrix that are here, their codes, and the number of the first of them."""
        size, found = math.prod(self.shape), []
        for number in range(self.count):
            begin, end = (min(max(number * size + each - self.start, 0), self.weights.numel()) for each in (0, size))
            place = max(self.start - number * size, 0)
            found.append((self.weights[begin:end], self.codes[begin:end], place))
        return found

    def matrices(self) -> tuple[list[Quantized], Tensor]:
        """The matrices of the whole weight in 8 bits, and the largest magnitude here."""
        found = [Quantized(*each, self.block) for each in zip(self.wholes, self.scales.reciprocal())]
        return found, self.largest.amax()

    def find_largest(self) -> None:
        each = [amax_of_part(part, start, self.shape, self.block) for part, _, start in self.in_matrices()]
        self.largest = torch.stack(each)

    def quantize(self) -> None:
        self.scales = self.quantizer.scales_of_weight(self.largest, self.weights.dtype)
        for (part, codes, start), scale in zip(self.in_matrices(), self.scales):
            if part.numel():
                codes.copy_(codes_of_part(part, start, self.shape, self.block, scale, self.quantizer.weight.fmt))


class Fp8Weights:
    """The weights in ``buffers`` that layers multiply in 8 bits and ranks share.

    Each rank quantizes its shards of the updated weights by scales of the whole tensors, on whose largest values the
    ranks agree, so codes are those of the gathered weights. Then codes are gathered, and ``params`` gives up its
    memory: a rank keeps the codes of all weights, and its shards in the model's type. ``is_released``: whether it does.
    With ZeRO 3 (``by_unit``) codes of whole weights come and go with their units, and a rank keeps those of its shards.
    ``is_stale``: whether those are of other weights. ``gathered``: where layers look their weights' codes up, see
    ``LowPrecision``.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], mesh: Mesh, gathered: dict[Tensor, Any]) -> None:
        self._mesh, self._gathered = mesh, gathered
        self.buffers = [buffer for buffer in buffers if buffer.codes is not None]
        self.by_unit = any(bucket.codes is not None for buffer in self.buffers for bucket in buffer.buckets)
        self.is_released = self.is_stale = self.by_unit
        self._parts = [part for buffer in self.buffers for part in _parts_of(buffer)]

    @torch.no_grad()
    def quantize(self) -> None:
        """The shards, for a gather of the codes. A collective of the ranks that share a weight."""
        together = defaultdict[tuple[tuple[Axis, ...], ...], list[_Part]](list)
        for part in self._parts:
            part.find_largest()
            together[part.axes].append(part)
        for axes, parts in together.items():
            seen = torch.cat([part.largest.flatten() for part in parts])
            for each in axes:
                seen = all_reduce(seen, self._mesh, *each, op="max")
            for part, largest in zip(parts, torch.split(seen, [part.largest.numel() for part in parts])):
                part.largest = largest.view(part.largest.shape)
        for part in self._parts:
            part.quantize()
        self.is_stale = False

    @torch.no_grad()
    def release(self) -> None:
        """Give up the memory of the weights; a reader finds NaN, and their codes in ``gathered``."""
        for buffer in self.buffers:
            buffer.params = buffer.params.new_full((), math.nan).expand(buffer.params.shape)
            buffer.hide(buffer.entries)
        self._gathered.update({part.entry.parameter: part.matrices() for part in self._parts})
        self.is_released = True

    @torch.no_grad()
    def restore(self) -> None:
        """Memory for the weights, to be filled by a gather."""
        for buffer in self.buffers:
            buffer.params = torch.zeros_like(buffer.params, memory_format=torch.contiguous_format)
            for entry in buffer.entries:
                entry.parameter.data = entry.span.of(buffer.params).view(entry.parameter.shape)
        self._gathered.clear()
        self.is_released = False

    @torch.no_grad()
    def keep_shards(self) -> None:
        """Take this rank's shards of weights that were loaded, unless those were loaded themselves."""
        for buffer in self.buffers if not self.by_unit else ():
            for bucket in buffer.buckets:
                shard = buffer.shard(bucket)
                buffer.own(shard).copy_(shard.of(buffer.params))


def _parts_of(buffer: FlatBuffer) -> Iterator[_Part]:
    assert buffer.codes is not None
    inner = buffer.levels.inner
    for bucket in buffer.buckets:
        shard = buffer.shard(bucket)
        for entry in bucket.entries:
            quantizer, here = entry.quantizer, entry.span.overlap(shard) or Span(shard.start, shard.start)
            assert quantizer is not None
            place, codes = entry.span, buffer.codes
            if bucket.codes is not None:
                place, codes = place.moved(-bucket.span.start), bucket.codes.flat
                bucket.codes.allocate()  # views can't be made without memory
            axes = {"tensorwise": (inner, quantizer.weight.axes), "blockwise": (inner,), "delayed": ()}
            count, *shape = matrices_of(entry.parameter).shape
            wholes = place.of(codes).view(count, *shape).view(quantizer.weight.fmt).unbind()
            if bucket.codes is not None:
                bucket.codes.free()
            yield _Part(
                entry=entry,
                quantizer=quantizer,
                axes=axes[quantizer.recipe],
                start=max(here.start - entry.span.start, 0),
                weights=here.moved(-shard.start).of(buffer.own(shard)),
                codes=here.moved(-shard.start).of(buffer.own_codes(bucket)),
                wholes=wholes,
                count=count,
                shape=(shape[0], shape[1]),
            )
