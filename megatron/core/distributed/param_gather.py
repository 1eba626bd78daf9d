"""After a sharded update, gather the parameters from all ranks' shards: at once, or during the next forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.buffers import Bucket, FlatBuffer
from megatron.core.parallel.collectives import Handle, all_gather_into_async
from megatron.core.parallel.context import ParallelContext


class ParamGather:
    """All-gathers the parameters of every bucket, in the order in which a forward pass needs them.

    ``start`` after the update, ``finish`` before anyone reads a parameter. ``overlap_forward`` lets the modules of a
    model wait for their own parameters only; code that reads parameters outside of a forward pass (a checkpoint, a
    norm) still calls ``finish``.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], context: ParallelContext) -> None:
        self._mesh = context.mesh
        entries = [(buffer, bucket) for buffer in buffers if buffer.num_shards > 1 for bucket in buffer.buckets]
        self._order = sorted(entries, key=lambda entry: min(entry.order for entry in entry[1].entries))
        self._pending: dict[Bucket, Handle[Tensor]] = {}
        self._hooked: dict[nn.Module, tuple[Bucket, ...]] = {}
        self._called: set[nn.Module] = set()
        self._needed_first: set[Bucket] | None = None

    def start(self) -> None:
        """Start all gathers, once every rank has updated its shards; wait for them unless a forward pass will."""
        if self._needed_first is None:
            uncalled = self._hooked.keys() - self._called
            first = {bucket for module in uncalled for bucket in self._hooked[module]}
            self._order.sort(key=lambda entry: entry[1] not in first)
            self._needed_first = first
        for buffer, bucket in self._order:
            own, whole = buffer.shard(bucket).of(buffer.params), bucket.span.of(buffer.params)
            self._pending[bucket] = all_gather_into_async(whole, own, self._mesh, *buffer.reduce)
        if not self._hooked:
            self.finish()

    def finish(self) -> None:
        """Wait until all parameters are those of the last update."""
        self._wait(tuple(self._pending))

    def overlap_forward(self, model: nn.Module) -> None:
        """Let each module of ``model`` wait for its own parameters when it is called.

        Some parameters belong to a module that is never called, such as an output matrix that the loss reads. The
        forward passes before the first update show which; those are gathered and awaited before all others.
        """
        home = {entry.parameter: bucket for _, bucket in self._order for entry in bucket.entries}
        for module in model.modules():
            own = {home[parameter] for parameter in module.parameters(recurse=False) if parameter in home}
            if own:
                self._hooked[module] = tuple(own)
                module.register_forward_pre_hook(self._before_forward)

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
