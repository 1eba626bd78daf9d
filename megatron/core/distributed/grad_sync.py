"""Reduces gradients over ranks in one visible order: data parallelism, partial gradients, shared rows, tied copies.

Gradients stay sums over tokens; the optimizer divides by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron.core.distributed.buffers import Bucket, FlatBuffer, ParamEntry, Span, parts_of
from megatron.core.distributed.unit_memory import UnitGradients
from megatron.core.parallel.collectives import (
    Chain,
    Handle,
    all_reduce,
    all_reduce_among,
    all_reduce_async,
    reduce_scatter_in_fp32_async,
    reduce_scatter_into_async,
    sum_between_stages,
)
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.exchange import RankGroup
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.weight_gradients import MainGrad, WeightGradients
from megatron.errors import RESTART_CANNOT_HELP, ParallelError

_COALESCE_BELOW = 1 << 16
TIED_CHUNK = 1 << 20
IN_FLIGHT = 2  # buckets whose parts from all ranks are in memory


@dataclass(eq=False)
class _Reduction:
    """The data-parallel reduction of one bucket.

    ``expected``: number of gradients that backward passes accumulate, learned from the first step (a parameter whose
    gradient is added by hand, or that is unused, has none). ``arrived``: those of this step so far.
    """

    buffer: FlatBuffer
    bucket: Bucket
    expected: int | None = None
    arrived: int = 0
    handle: Handle[Tensor] | None = None


class GradSync:
    """Collects gradients in their buffers during backward passes and makes them whole at the end of a step.

    Several model chunks of a rank share it.

    ``sharded``: this rank's gradients become whole only in its own shard of every bucket (ZeRO 1). ``units``: sums
    those that have memory by unit, after each backward pass and not once a step (ZeRO 2).
    ``overlap``: each bucket's reduction starts as soon as it has its last gradients, see ``last_backward``.
    ``sums_in_fp32``: 16-bit gradients that become sharded are summed in fp32 and rounded once.
    ``weight_gradients``: of the layers; told where to add their gradients as they multiply, if they do.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        context: ParallelContext,
        *,
        weight_gradients: WeightGradients,
        sharded: bool,
        overlap: bool,
        sums_in_fp32: bool = False,
    ) -> None:
        self._buffers = buffers
        self._mesh = context.mesh
        self._sharded = sharded
        self._overlap = overlap
        self._sums_in_fp32 = sums_in_fp32
        self._counting = self._counted = False
        self._launched = 0
        self._weight_gradients = weight_gradients
        self.units = UnitGradients(
            buffers, context.mesh, in_flight=IN_FLIGHT if overlap else 0, sums_in_fp32=sums_in_fp32
        )
        self._hooks: list[RemovableHandle] = []
        reductions = [_Reduction(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        for reduction in reductions:
            for entry in reduction.bucket.entries:
                collect = partial(self._collect, reduction, entry)
                hook = entry.parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
                weight_gradients.added[entry.parameter] = partial(self._add, reduction, entry)
                if weight_gradients.fuses_accumulation:
                    added, opened = partial(self._count, reduction, entry), partial(self._open, reduction.bucket)
                    weight_gradients.main_grads[entry.parameter] = MainGrad(entry.main_grad, added, opened)
        # Backward completes parameters from the last registered to the first; every rank launches in this same order.
        reductions.sort(key=lambda reduction: -min(entry.order for entry in reduction.bucket.entries))
        self._reductions = [
            each for each in reductions if each.buffer.levels.num_ranks > 1 and each.bucket.grads is None
        ]
        owned = parts_of(buffers, FlatBuffer.owned if sharded else FlatBuffer.whole)
        self._owned = [(entry, part, buffer.own_grads(part)) for buffer, entry, part in owned]

    def detach(self) -> None:
        """Collect no gradients any more: autograd leaves them in ``parameter.grad``, as usual."""
        for hook in self._hooks:
            hook.remove()
        self._weight_gradients.forget()

    def zero(self) -> None:
        """Forget all gradients, before the first backward pass of a step."""
        for buffer in self._buffers:
            buffer.grads.zero_()
        self.units.forget()

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Gradients that arrive inside this block are the last of the step for their parameters.

        One block a step, or with pipeline schedules one for each chunk, and two where weight gradients come later than
        the rest. Gradients that arrive between two blocks are added and not counted.
        """
        self._counting = self._counted = self.units.is_last = self._overlap
        yield
        self._counting = self.units.is_last = False

    def finish(self) -> None:
        """Make gradients whole: sum over data, over partial gradients, over shared rows, over tied copies.

        Afterwards this rank's shards (all of the buffers, when not sharded) hold sums over the global batch.
        """
        while self._launched < len(self._reductions):
            self._launch_next()
        self._sum_copies(last=0)
        for reduction in self._reductions:
            assert reduction.handle is not None
            reduction.handle.wait()
            reduction.handle = None
            if self._counted:
                reduction.expected = max(reduction.arrived, reduction.expected or 0)
            reduction.arrived = 0
        self._launched = 0
        self._counted = False
        self.units.finish()
        self._sum_partial()
        self._sum_shared()
        self._sum_tied()

    def _collect(self, reduction: _Reduction, entry: ParamEntry, parameter: Tensor) -> None:
        """Add a gradient to the buffer, after autograd has accumulated it."""
        grad = parameter.grad
        assert grad is not None, "autograd calls this after it has set a gradient"
        if grad is entry.resting_grad:
            self._count(reduction, entry)
            return
        self._add(reduction, entry, grad)
        parameter.grad = entry.resting_grad

    def _add(self, reduction: _Reduction, entry: ParamEntry, grad: Tensor) -> None:
        self._open(reduction.bucket)
        reduction.buffer.accumulate(entry, grad)
        self._count(reduction, entry)

    def _open(self, bucket: Bucket) -> None:
        if bucket.grads is not None:
            self.units.open(bucket)

    def _count(self, reduction: _Reduction, entry: ParamEntry) -> None:
        """Count a gradient that was added to the buffer towards its bucket, and reduce what is complete."""
        if reduction.handle is not None:
            raise ParallelError(
                f"{entry.name} received a gradient after its bucket had been reduced: the parameters that take part "
                "in a step changed since the first one; leave --overlap-grad-reduce out",
                exit_code=RESTART_CANNOT_HELP,
            )
        if not self._counting:
            return
        reduction.arrived += 1
        while self._launched < len(self._reductions):
            following = self._reductions[self._launched]
            if following.expected is None or following.arrived < following.expected:
                break
            self._launch_next()

    def _launch_next(self) -> None:
        reduction = self._reductions[self._launched]
        self._launched += 1
        buffer, span, levels = reduction.buffer, reduction.bucket.span, reduction.buffer.levels
        grads = span.of(buffer.grads)
        if not self._sharded:
            reduction.handle = all_reduce_async(grads, self._mesh, *levels.inner)
            return
        own = buffer.shard(reduction.bucket).of(buffer.grads)
        if self._sums_in_fp32 and grads.dtype.itemsize < 4:
            self._wait_for_all_but(IN_FLIGHT - 1)
            reduction.handle = reduce_scatter_in_fp32_async(own, grads, self._mesh, *levels.inner)
        else:
            reduction.handle = reduce_scatter_into_async(own, grads, self._mesh, *levels.inner)
        if levels.num_copies > 1:
            over_copies = partial(levels.start_sum, own, self._mesh, in_fp32=self._sums_in_fp32)
            reduction.handle = Chain(reduction.handle, over_copies)
            self._sum_copies(last=IN_FLIGHT)

    def _sum_copies(self, *, last: int) -> None:
        """Start to sum shards over their copies, but for the ``last`` reductions that were launched."""
        for reduction in self._reductions[: max(0, self._launched - last)]:
            if isinstance(reduction.handle, Chain):
                reduction.handle.advance()

    def _wait_for_all_but(self, last: int) -> None:
        """Wait for reductions that were started, but for the ``last``; their parts then take no memory any more."""
        for reduction in self._reductions[: max(0, self._launched - 1 - last)]:
            assert reduction.handle is not None
            if isinstance(reduction.handle, Chain):
                reduction.handle.advance()
            else:
                reduction.handle.wait()

    def _sum_partial(self) -> None:
        """Sum gradients over ``partial_grad`` axes: large ones in place, all small ones as one message per group."""
        small: dict[tuple[Axis, ...], list[Tensor]] = {}
        for entry, part, grads in self._owned:
            axes = entry.sharding.partial_grad
            if self._mesh.size(*axes) == 1:
                continue
            if part.size < _COALESCE_BELOW:
                small.setdefault(axes, []).append(grads)
            else:
                all_reduce(grads, self._mesh, *axes)
        for axes, parts in small.items():
            sums = all_reduce(torch.cat(parts), self._mesh, *axes)
            for part_grads, part_sums in zip(parts, torch.split(sums, [part.numel() for part in parts])):
                part_grads.copy_(part_sums)

    def _sum_shared(self) -> None:
        """Sum gradients of rows that neighbouring ranks share because there are fewer groups of them than ranks."""
        for entry, part, grads in self._owned:
            for shared in entry.sharding.shared_ranges(self._mesh):
                mine = Span(shared.start, shared.stop).moved(entry.span.start).overlap(part)
                if mine:
                    sharers = RankGroup.of(self._mesh, entry.sharding.split[0]).neighbours(shared.sharers)
                    all_reduce_among(mine.moved(-part.start).of(grads), self._mesh, sharers.members)

    def _sum_tied(self) -> None:
        """Sum gradients of tied copies over the stages that hold one, in order of names, a part at a time."""
        tied = [(entry, grads) for entry, _, grads in self._owned if len(entry.holders) > 1]
        for entry, grads in sorted(tied, key=lambda each: each[0].name):
            for part in torch.split(grads, TIED_CHUNK):
                sum_between_stages(part, self._mesh, entry.holders)
