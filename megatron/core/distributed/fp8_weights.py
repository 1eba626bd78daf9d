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
    ``codes``. The weight is ``count`` matrices of one ``shape``. ``axes``: groups that agree on its largest values.

    ``largest``, ``scales``: of each matrix, [count], or of its blocks, fp32; what a step quantizes by.
    """

    buffer: FlatBuffer
    entry: ParamEntry
    quantizer: Fp8Quantizer
    axes: tuple[tuple[Axis, ...], ...]
    start: int
    weights: Tensor
    codes: Tensor
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
        """The matrices of the whole weight in 8 bits, which a gather fills in, and the largest magnitude here."""
        assert self.buffer.codes is not None
        codes = self.entry.span.of(self.buffer.codes).view(self.count, *self.shape).view(self.quantizer.weight.fmt)
        scales = self.scales.reciprocal()
        return [Quantized(*each, self.block) for each in zip(codes, scales)], self.largest.amax()

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
    ``gathered``: where layers look their weights' codes up, see ``LowPrecision``.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], mesh: Mesh, gathered: dict[Tensor, Any]) -> None:
        self._mesh, self._gathered = mesh, gathered
        self.buffers = [buffer for buffer in buffers if buffer.codes is not None]
        self.is_released = False
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

    @torch.no_grad()
    def release(self) -> None:
        """Give up the memory of the weights; a reader finds NaN, and their codes in ``gathered``."""
        for buffer in self.buffers:
            nothing = buffer.params.new_full((), math.nan)
            buffer.params = nothing.expand(buffer.params.shape)
            for entry in buffer.entries:
                entry.parameter.data = nothing.expand(entry.parameter.shape)
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
        """Take this rank's shards of weights that were loaded."""
        for buffer in self.buffers:
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
            axes = {"tensorwise": (inner, quantizer.weight.axes), "blockwise": (inner,), "delayed": ()}
            count, *shape = matrices_of(entry.parameter).shape
            yield _Part(
                buffer=buffer,
                entry=entry,
                quantizer=quantizer,
                axes=axes[quantizer.recipe],
                start=max(here.start - entry.span.start, 0),
                weights=here.moved(-shard.start).of(buffer.own(shard)),
                codes=here.of(buffer.codes),
                count=count,
                shape=(shape[0], shape[1]),
            )
