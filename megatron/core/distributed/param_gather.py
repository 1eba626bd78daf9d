"""Gather the parameters from all ranks' shards after a sharded update.

At once, or during the next forward pass; those that are multiplied in 8 bits on request in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.buffers import Bucket, FlatBuffer
from megatron.core.distributed.fp8_weights import Fp8Weights
from megatron.core.distributed.unit_memory import UnitWeights
from megatron.core.parallel.collectives import Handle, all_gather_into_async
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.low_precision import LowPrecision


class ParamGather:
    """All-gathers the parameters of every bucket, in the order in which a forward pass needs them.

    ``start`` after the update, ``finish`` before anyone reads a parameter. ``overlap_forward`` lets the modules of a
    model wait for their own parameters only; code that reads parameters outside of a forward pass (a checkpoint,
    generation) calls ``make_whole``, which gathers what is there in 8 bits alone as it is, too; ``release`` frees that
    again, before a step. ``units``: gathers weights that are whole by unit (ZeRO 3), which this makes whole, too.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        context: ParallelContext,
        low_precision: LowPrecision,
        units: UnitWeights | None = None,
    ) -> None:
        self._mesh, self.units = context.mesh, units or UnitWeights([], context.mesh)
        self._fp8 = Fp8Weights(buffers, context.mesh, low_precision.gathered)
        self.units.has_codes = self._has_codes
        entries = [
            (buffer, bucket)
            for buffer in buffers
            for bucket in buffer.buckets
            if buffer.owned(bucket) != bucket.span and bucket.gathered is None
        ]
        self._order = sorted(entries, key=lambda entry: min(entry.order for entry in entry[1].entries))
        self._pending: dict[Bucket, Handle[Tensor]] = {}
        self._hooked: dict[nn.Module, tuple[Bucket, ...]] = {}
        self._hooks: list[RemovableHandle] = []
        self._called: set[nn.Module] = set()
        self._needed_first: set[Bucket] | None = None

    def start(self) -> None:
        """Start all gathers, once every rank has updated its shards; wait for them unless a forward pass will."""
        self.units.release_all()
        if self._needed_first is None:
            uncalled = self._hooked.keys() - self._called
            first = {bucket for module in uncalled for bucket in self._hooked[module]}
            self._order.sort(key=lambda entry: entry[1] not in first)
            self._needed_first = first
        self.units.start_shards()
        self._start()
        if not self._hooked:
            self.finish()

    def _start(self) -> None:
        if self._fp8.buffers:
            self._quantize()
        for buffer, bucket in self._order:
            flat = buffer.params if buffer.codes is None else buffer.codes
            # What ZeRO 3 divides inside of copies comes and goes by unit: of what rests, state is divided over them.
            axes = buffer.levels.outer if buffer.levels.divides_state else buffer.levels.inner
            self._gather(bucket, buffer.owned(bucket).of(flat), bucket.span.of(flat), axes)

    def _quantize(self) -> None:
        self.units.finish_shards()
        self._fp8.quantize()
        self._fp8.release()

    def _has_codes(self) -> bool:
        """Whether weights in 8 bits are there in no other form; have their codes then. A collective."""
        if self._fp8.is_released and self._fp8.is_stale:
            self._quantize()
        return self._fp8.is_released

    def start_again(self) -> None:
        """Start again after a step that changed no weight: scales of weights in 8 bits may have changed."""
        if self._fp8.buffers:
            self.start()

    def release(self) -> None:
        """Keep in 8 bits or in shards alone what is gathered so, where it was loaded or made whole since the last
        update.
        """
        self.units.release_all()
        if self._fp8.buffers and (self._fp8.is_stale or not self._fp8.is_released):
            self._fp8.keep_shards()
            self._start()
            self.finish()

    def forget(self) -> None:
        """Wait until this rank's shards are those of the last update, and forget what was made of them: they are about
        to be loaded (ZeRO 3).
        """
        self.finish()
        self.units.release_all()
        self._fp8.is_stale = self._fp8.by_unit

    def make_whole(self) -> None:
        """Wait until all parameters are those of the last update, and in the type of the model. A collective."""
        self.finish()
        self.units.make_whole()
        if self._fp8.is_released:
            self._fp8.restore()
            for buffer in self._fp8.buffers:
                for bucket in buffer.buckets:
                    own = buffer.own(buffer.shard(bucket))
                    self._gather(bucket, own, bucket.span.of(buffer.params), buffer.levels.inner)
            self.finish()

    def _gather(self, bucket: Bucket, own: Tensor, whole: Tensor, axes: tuple[Axis, ...]) -> None:
        self._pending[bucket] = all_gather_into_async(whole, own, self._mesh, *axes)

    def finish(self) -> None:
        """Wait until all parameters, or this rank's shards of them, are those of the last update."""
        self._wait(tuple(self._pending))
        self.units.finish_shards()

    def overlap_forward(self, model: nn.Module) -> None:
        """Let each module of ``model`` wait for its own parameters when it is called.

        Some parameters belong to a module that is never called, such as an output matrix that the loss reads. The
        forward passes before the first update show which; those are gathered and awaited before all others.
        """
        home = {entry.parameter: bucket for _, bucket in self._order for entry in bucket.entries}
        for module in model.modules():
            own = {home[parameter] for parameter in module.parameters(recurse=False) if parameter in home}
            if own or module is model:  # which is called even where no module with a trained parameter is
                self._hooked[module] = tuple(own)
                self._hooks.append(module.register_forward_pre_hook(self._before_forward))

    def detach(self) -> None:
        """Let no module wait any more when it is called."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._needed_first is None:
            self._called.add(module)
        elif self._pending:
            self._wait(self._needed_first)
            self._wait(self._hooked[module])

    def _wait(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket in self._pending:
                self._pending.pop(bucket).wait()
