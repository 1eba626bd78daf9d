"""Gradients and weights of units that are whole for a while only (ZeRO 2 and 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.core.distributed.buffers import Bucket, FlatBuffer
from megatron.core.distributed.transient import TransientTensor
from megatron.core.distributed.units import Unit, UnitMemory
from megatron.core.parallel.collectives import (
    Handle,
    all_gather_into_async,
    reduce_scatter_in_fp32_async,
    reduce_scatter_into_async,
)
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import Mesh


class _Home(NamedTuple):
    """A bucket and its buffer."""

    buffer: FlatBuffer
    bucket: Bucket

    @property
    def grads(self) -> TransientTensor:
        """The whole gradients."""
        assert self.bucket.grads is not None, "the bucket's gradients rest"
        return self.bucket.grads

    @property
    def sums(self) -> TransientTensor:
        """Sums of gradients in this rank's shard."""
        assert self.bucket.grad_sums is not None, "the bucket's gradients rest"
        return self.bucket.grad_sums


class _Summing(NamedTuple):
    """A reduction that is under way. ``is_first``: of a step, so that it arrives where sums are kept."""

    home: _Home
    handle: Handle[Tensor]
    is_first: bool


def _homes(buffers: Iterable[FlatBuffer]) -> dict[nn.Parameter, _Home]:
    """Where parameters lie."""
    return {
        entry.parameter: _Home(buffer, bucket)
        for buffer in buffers
        for bucket in buffer.buckets
        for entry in bucket.entries
    }


def _buckets(unit: Unit, homes: dict[nn.Parameter, _Home]) -> list[_Home]:
    """The buckets of a unit, in the order of its parameters."""
    return list(dict.fromkeys(homes[parameter] for parameter in unit.parameters if parameter in homes))


class UnitGradients:
    """Sums gradients of the buckets that have memory by unit into this rank's shards, after each backward pass, and
    shards over their copies: as soon as their unit is complete in the last pass, where ``is_last`` tells of it.

    ``in_flight``: reductions that may be under way while the backward pass goes on; 0 waits for each.
    ``sums_in_fp32``: see ``GradSync``.
    """

    is_last = False

    def __init__(self, buffers: Iterable[FlatBuffer], mesh: Mesh, *, in_flight: int, sums_in_fp32: bool) -> None:
        self._mesh, self._in_flight, self._sums_in_fp32 = mesh, in_flight, sums_in_fp32
        self._homes = _homes(buffer for buffer in buffers if buffer.divides_grads)
        self._pending = deque[_Summing]()
        self._lasting = deque[_Home]()  # reduced in the last pass, in this order, and not yet summed over copies
        self._over_copies: dict[_Home, Handle[Tensor]] = {}

    def forget(self) -> None:
        """Free all sums, before the first backward pass of a step."""
        for home in dict.fromkeys(self._homes.values()):
            home.sums.free()

    def open(self, bucket: Bucket) -> None:
        """Have zeros for the bucket's gradients in memory, unless there are gradients that aren't being summed."""
        assert bucket.grads is not None, "the bucket's gradients rest"
        self._settle_one(bucket)
        if bucket.grads.allocate():
            bucket.grads.flat.zero_()

    def complete(self, unit: Unit) -> None:
        """Start to sum the unit's gradients over the ranks. A collective, also where this rank has none."""
        for home in _buckets(unit, self._homes):
            self._reduce(home)
            if self.is_last and home.buffer.levels.num_copies > 1:
                self._lasting.append(home)
        while len(self._lasting) > self._in_flight:  # all ranks begin these at the same place among the reductions
            self._sum_copies(self._lasting.popleft())

    def finish(self) -> None:
        """Complete all sums of the step: also of gradients that came when their unit was complete, as those of a
        layer's weight do that the model reads before the layer, too.
        """
        self.settle()
        for home in dict.fromkeys(self._homes.values()):
            if home.grads.is_allocated:
                self._reduce(home)
        self.settle()
        for home in dict.fromkeys(self._homes.values()):
            if home.sums.allocate():
                home.sums.flat.zero_()
            if home.buffer.levels.num_copies > 1:
                self._sum_copies(home)
        self._lasting.clear()
        for handle in self._over_copies.values():
            handle.wait()
        self._over_copies.clear()

    def _sum_copies(self, home: _Home) -> None:
        """Start to sum this rank's shard over its copies, unless that has begun."""
        if home in self._over_copies:
            return
        self._settle_one(home.bucket)
        self._over_copies[home] = home.buffer.levels.start_sum(home.sums.flat, self._mesh, in_fp32=self._sums_in_fp32)

    def _reduce(self, home: _Home) -> None:
        self.settle(keep=self._in_flight - 1)
        self.open(home.bucket)
        is_first = home.sums.allocate()
        own = home.sums.flat if is_first else torch.empty_like(home.sums.flat)
        narrow = self._sums_in_fp32 and own.dtype.itemsize < 4
        start = reduce_scatter_in_fp32_async if narrow else reduce_scatter_into_async
        handle = start(own, home.grads.flat, self._mesh, *home.buffer.levels.inner)
        if (begun := self._over_copies.pop(home, None)) is not None:  # gradients that come after the others were summed
            begun.wait()
            handle.wait()
            self._over_copies[home] = home.buffer.levels.start_sum(own, self._mesh, in_fp32=self._sums_in_fp32)
            self._over_copies[home].wait()
        self._pending.append(_Summing(home, handle, is_first))
        self.settle(keep=self._in_flight)

    def _settle_one(self, bucket: Bucket) -> None:
        """Wait for reductions of a bucket, and those before them."""
        while any(pending.home.bucket is bucket for pending in self._pending):
            self.settle(keep=len(self._pending) - 1)

    def settle(self, *, keep: int = 0) -> None:
        """Wait for all reductions but the ``keep`` last; their memory is free then."""
        while len(self._pending) > max(keep, 0):
            summing = self._pending.popleft()
            found = summing.handle.wait()
            if not summing.is_first:
                summing.home.sums.flat.add_(found)
            summing.home.grads.free()


class UnitWeights:
    """Gathers whole weights of a unit while it is needed, from the ranks' shards (ZeRO 3).

    ``keeps``: weights that were gathered stay until ``release_all``, as pipelines need them, which begin a forward pass
    of one microbatch before the backward pass of another. ``prefetches``: the gather of a unit starts before that of
    the one before it ends its work. ``low_precision``: keeps what layers made of weights, which goes with them.
    ``has_codes``: whether weights in 8 bits are to be gathered; not while they are whole in the model's type.
    """

    has_codes: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        mesh: Mesh,
        *,
        keeps: bool = False,
        prefetches: bool = False,
        low_precision: LowPrecision | None = None,
    ) -> None:
        self._mesh, self._prefetches, self._low_precision = mesh, prefetches, low_precision or LowPrecision()
        self.keeps = keeps
        self._homes = _homes(buffer for buffer in buffers if any(bucket.gathered for bucket in buffer.buckets))
        self._gathered: dict[Bucket, Handle[Tensor]] = {}
        self._arriving: dict[Bucket, Handle[Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether all weights rest in memory."""
        return not self._homes

    def acquire(self, unit: Unit, following: Unit | None) -> None:
        """Have the unit's whole weights in memory; start to gather those of the ``following`` one. A collective."""
        here = _buckets(unit, self._homes)
        for home in here:
            self._start(home)
        for bucket in [home.bucket for home in here if home.bucket in self._gathered]:
            self._finish(bucket)
        for home in _buckets(following, self._homes) if following is not None and self._prefetches else ():
            self._start(home)

    def release(self, unit: Unit) -> None:
        """Free the unit's whole weights, unless they stay for the step."""
        for home in _buckets(unit, self._homes) if not self.keeps else ():
            self._free(home.bucket)

    def release_all(self) -> None:
        """Free all whole weights, as they are about to change."""
        for bucket in list(self._gathered):
            self._free(bucket)

    def start_shards(self) -> None:
        """Start to gather this rank's shards from their copies, where each has updated a portion. A collective."""
        for buffer, bucket in dict.fromkeys(self._homes.values()):
            if buffer.levels.divides_state and buffer.policy.is_trained:
                shard = buffer.own(buffer.shard(bucket))
                self._arriving[bucket] = buffer.levels.start_gather(shard, self._mesh)

    def finish_shards(self) -> None:
        """Wait for them."""
        for handle in self._arriving.values():
            handle.wait()
        self._arriving.clear()

    def make_whole(self) -> None:
        """Gather all weights but for those in 8 bits. A collective."""
        for home in dict.fromkeys(self._homes.values()):
            if home.bucket.codes is None:
                self._start(home)
                self._finish(home.bucket)

    def _start(self, home: _Home) -> None:
        buffer, bucket = home
        if bucket in self._gathered or (bucket.codes is not None and not self.has_codes()):
            return
        assert bucket.gathered is not None, "only buckets with memory by unit are among the homes"
        bucket.gathered.allocate()
        own = buffer.own(buffer.shard(bucket)) if bucket.codes is None else buffer.own_codes(bucket)
        if (arriving := self._arriving.pop(bucket, None)) is not None:
            arriving.wait()
        self._gathered[bucket] = all_gather_into_async(bucket.gathered.flat, own, self._mesh, *buffer.levels.inner)

    def _finish(self, bucket: Bucket) -> None:
        assert bucket.gathered is not None, "as above"
        self._gathered[bucket].wait()
        bucket.gathered.open()

    def _free(self, bucket: Bucket) -> None:
        handle = self._gathered.pop(bucket, None)
        if handle is None:
            return
        handle.wait()
        assert bucket.gathered is not None, "as above"
        for entry in bucket.entries if self._low_precision.weights else ():
            assert self._low_precision.weights is not None
            self._low_precision.weights.pop(entry.parameter, None)
        bucket.gathered.free()


class ShardedUnits(UnitMemory):
    """Weights and gradients of the units of a rank's chunks, as ``UnitBorders`` asks for them."""

    def __init__(self, weights: UnitWeights, gradients: UnitGradients) -> None:
        self._weights, self._gradients = weights, gradients

    @override
    def acquire(self, unit: Unit, following: Unit | None) -> None:
        self._weights.acquire(unit, following)

    @override
    def release(self, unit: Unit) -> None:
        self._weights.release(unit)

    @override
    def complete(self, unit: Unit) -> None:
        self._gradients.complete(unit)

    @override
    def settle(self) -> None:
        self._gradients.settle()
