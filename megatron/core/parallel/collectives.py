"""Collectives over mesh axes. Each returns its input when the axes hold one rank, so callers needn't check the size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from megatron.core.device import current_gpu, describe, is_gpu
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.errors import ConfigError

T = TypeVar("T")
Reduction = Literal["sum", "max", "min"]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# gloo's all-reduce takes about 2 ms for any small tensor, its all-gather a tenth of that (measured on two ranks).
_SMALL_ON_CPU = 256 * 1024


# torch 2.13 renamed them; older versions have the old names only.
_gather_tensor = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter_tensor = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Handle(Generic[T]):
    """Communication that has been started; ``wait`` returns its result."""

    def __init__(
        self,
        result: T,
        works: Sequence[dist.Work | None] = (),
        waiting: AbstractContextManager[None] | None = None,
        *,
        sent: Tensor | None = None,
    ) -> None:
        """Hold the result of a collective in flight. ``waiting``: entered while ``wait`` blocks. ``sent``: a tensor to
        keep alive until then.
        """
        self._result, self._works, self._waiting, self._sent = result, works, waiting or nullcontext(), sent

    def wait(self) -> T:
        """Block until the result may be read and what was sent overwritten (on a GPU: order that on the stream)."""
        if self._works:
            with self._waiting:
                for work in self._works:
                    if work is not None:
                        work.wait()
            self._works, self._sent = (), None
        return self._result


class Chain(Handle[T]):
    """Communication in several steps, of which each starts when the one before has ended."""

    def __init__(self, first: Handle[T], *following: Callable[[], Handle[T]]) -> None:
        """Hold the first step in flight, and what starts the others."""
        self._current, self._following = first, [*following]

    def advance(self) -> None:
        """Start the next step if there is one, after waiting for the current one."""
        if self._following:
            self._current.wait()
            self._current = self._following.pop(0)()

    @override
    def wait(self) -> T:
        """Take all steps; the result of the last one."""
        while self._following:
            self.advance()
        return self._current.wait()


def _waiting(collective: str, mesh: Mesh, axes: tuple[Axis, ...]) -> AbstractContextManager[None]:
    return mesh.activity.waiting(f"{collective} over {', '.join(axes)}", mesh.members(*axes))


def all_reduce(x: Tensor, mesh: Mesh, *axes: Axis, op: Reduction = "sum") -> Tensor:
    """Reduce ``x`` over the group in place and return it; every rank gets bitwise the same result."""
    group = mesh.group(*axes)
    if group is None:
        return x
    size = mesh.size(*axes)
    with _waiting("all-reduce", mesh, axes):
        if x.device.type == "cpu" and x.numel() * x.element_size() * size <= _SMALL_ON_CPU:
            parts = x.new_empty(size * x.numel())
            _gather_tensor(parts, x.reshape(-1).contiguous(), group=group)
            stacked = parts.view(size, *x.shape)
            return x.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0))
        whole = x.contiguous()
        dist.all_reduce(whole, _OPS[op], group=group)
    return x if whole is x else x.copy_(whole)


def all_reduce_among(x: Tensor, mesh: Mesh, ranks: tuple[int, ...]) -> Tensor:
    """Sum contiguous ``x`` in place over world ``ranks`` of one pipeline stage, this one among them."""
    group = mesh.group_of(ranks)
    if group is not None:
        with mesh.activity.waiting("all-reduce", ranks):
            dist.all_reduce(x, group=group)
    return x


def sum_between_stages(x: Tensor, mesh: Mesh, ranks: tuple[int, ...]) -> Tensor:
    """Sum contiguous ``x`` in place over some world ``ranks`` of this rank's pipeline; bitwise the same on each.

    Every rank sends to every other one: two or three hold an embedding, and tables on more stages are small. A process
    group for them would require all stages to have made the same groups before (see ``Mesh.group_of``).
    """
    group, here = mesh.group("pp"), mesh.world_rank
    parts = {rank: x if rank == here else torch.empty_like(x) for rank in sorted(ranks)}
    works: list[dist.Work | None] = []
    for other in parts:
        if other < here:  # NCCL moves a pair's messages in order: the lower rank's first, at both ends
            works += [dist.irecv(parts[other], other, group=group), dist.isend(x, other, group=group)]
        elif other > here:
            works += [dist.isend(x, other, group=group), dist.irecv(parts[other], other, group=group)]
    Handle(x, works, mesh.activity.waiting("sum of tied gradients", ranks)).wait()
    if len(parts) == 2:  # without copies, and the same on both, as the order of two is no matter
        (received,) = (part for rank, part in parts.items() if rank != here)
        return x.add_(received)
    return x.copy_(torch.stack([*parts.values()]).sum(0))


def all_reduce_async(x: Tensor, mesh: Mesh, *axes: Axis) -> Handle[Tensor]:
    """Start summing contiguous ``x`` in place over the group."""
    group = mesh.group(*axes)
    if group is None:
        return Handle(x)
    return Handle(x, [dist.all_reduce(x, group=group, async_op=True)], _waiting("all-reduce", mesh, axes))


def all_gather(x: Tensor, mesh: Mesh, *axes: Axis, dim: int = 0) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``, in group order."""
    group = mesh.group(*axes)
    if group is None:
        return x
    size = mesh.size(*axes)
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    with _waiting("all-gather", mesh, axes):
        _gather_tensor(out, x.contiguous(), group=group)
    return out if dim == 0 else torch.cat(out.chunk(size), dim=dim)


def all_gather_into_async(out: Tensor, x: Tensor, mesh: Mesh, *axes: Axis) -> Handle[Tensor]:
    """Start gathering 1-D ``x`` of every rank into ``out``; ``x`` may be this rank's own slice of ``out``."""
    group = mesh.group(*axes)
    if group is None:
        return Handle(out)
    return Handle(out, [_gather_tensor(out, x, group=group, async_op=True)], _waiting("all-gather", mesh, axes))


def all_gather_async(x: Tensor, mesh: Mesh, *axes: Axis) -> Handle[Tensor]:
    """Start ``all_gather`` along the first dimension."""
    group, mine = mesh.group(*axes), x.contiguous()
    if group is None:
        return Handle(x)
    out = mine.new_empty(mesh.size(*axes) * mine.shape[0], *mine.shape[1:])
    work = _gather_tensor(out, mine, group=group, async_op=True)
    return Handle(out, [work], _waiting("all-gather", mesh, axes), sent=mine)


def reduce_scatter(x: Tensor, mesh: Mesh, *axes: Axis, dim: int = 0) -> Tensor:
    """Sum ``x`` over the group and keep this rank's equal part along ``dim``."""
    group = mesh.group(*axes)
    if group is None:
        return x
    size = mesh.size(*axes)
    assert x.shape[dim] % size == 0, f"dimension {dim} of {tuple(x.shape)} is not divisible by {axes}={size}"
    source = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim=dim), dim=0)
    out = source.new_empty(source.shape[0] // size, *source.shape[1:])
    with _waiting("reduce-scatter", mesh, axes):
        _scatter_tensor(out, source, group=group)
    return out


def reduce_scatter_async(x: Tensor, mesh: Mesh, *axes: Axis) -> Handle[Tensor]:
    """Start ``reduce_scatter`` along the first dimension."""
    group, whole = mesh.group(*axes), x.contiguous()
    if group is None:
        return Handle(x)
    out = whole.new_empty(whole.shape[0] // mesh.size(*axes), *whole.shape[1:])
    work = _scatter_tensor(out, whole, group=group, async_op=True)
    return Handle(out, [work], _waiting("reduce-scatter", mesh, axes), sent=whole)


def reduce_scatter_into_async(out: Tensor, x: Tensor, mesh: Mesh, *axes: Axis) -> Handle[Tensor]:
    """Start summing 1-D ``x`` over the group; ``out`` receives this rank's part."""
    group = mesh.group(*axes)
    if group is None:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Handle(out)
    return Handle(out, [_scatter_tensor(out, x, group=group, async_op=True)], _waiting("reduce-scatter", mesh, axes))


class _WideSum(Handle[Tensor]):
    """Parts of one tensor from every rank on the way; ``wait`` adds them up in fp32, and rounds once."""

    def __init__(
        self, out: Tensor, parts: Tensor, work: dist.Work | None, waiting: AbstractContextManager[None]
    ) -> None:
        super().__init__(out, [work], waiting)
        self._parts: Tensor | None = parts

    @override
    def wait(self) -> Tensor:
        """Wait for the messages; the sum, accumulated in fp32."""
        out, parts = super().wait(), self._parts
        if parts is not None:
            out.copy_(parts.view(-1, len(out)).sum(0, dtype=torch.float32))
            self._parts = None
        return out


def reduce_scatter_in_fp32_async(out: Tensor, x: Tensor, mesh: Mesh, *axes: Axis) -> Handle[Tensor]:
    """``reduce_scatter_into_async`` of 16-bit numbers, which travel as they are and are summed in fp32.

    An all-to-all, which sends as many bytes as a ring, and needs memory for another ``x`` until ``wait``.
    """
    group = mesh.group(*axes)
    if group is None:
        return reduce_scatter_into_async(out, x, mesh, *axes)
    parts = torch.empty_like(x)
    work = dist.all_to_all_single(parts, x, group=group, async_op=True)
    return _WideSum(out, parts, work, _waiting("reduce-scatter", mesh, axes))


def broadcast(x: Tensor, mesh: Mesh, *axes: Axis, src: int = 0) -> Tensor:
    """Overwrite ``x`` with the copy of the group's rank number ``src``."""
    assert x.is_contiguous(), "gloo would send what lies between its numbers"
    group = mesh.group(*axes)
    if group is not None:
        with _waiting("broadcast", mesh, axes):
            dist.broadcast(x, mesh.members(*axes)[src], group=group)
    return x


def on_host(*tensors: Tensor) -> list[list[float]]:
    """The numbers of each tensor in order, read in one transfer: on a GPU each waits for everything queued so far.

    They travel in fp64, which holds those of other types exactly, and integers below 2⁵³.
    """
    numbers = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).tolist()
    ends = [*accumulate(tensor.numel() for tensor in tensors)]
    return [numbers[start:stop] for start, stop in zip([0, *ends], ends)]


def gather_objects(value: T, mesh: Mesh) -> list[T]:
    """Every rank's picklable ``value``, by world rank. For small messages among the run's own ranks."""
    if mesh.world_size == 1:
        return [value]
    values: list[Any] = [None] * mesh.world_size
    with mesh.activity.waiting("gathering of objects", range(mesh.world_size)):
        dist.all_gather_object(values, value)
    return values


def broadcast_object(value: T, mesh: Mesh, *, src: int = 0) -> T:
    """The picklable ``value`` of world rank ``src``, on every rank of the run; those of other ranks are not used."""
    if mesh.world_size == 1:
        return value
    values: list[Any] = [value]
    with mesh.activity.waiting("broadcast of objects", range(mesh.world_size)):
        dist.broadcast_object_list(values, src=src)
    return values[0]  # type: ignore[no-any-return]


def swap(x: Tensor, mesh: Mesh, other: int) -> Tensor:
    """What world rank ``other`` gives for this rank's ``x``, as large. Both call it."""
    received, given = torch.empty_like(x), x.contiguous()
    with mesh.activity.waiting(f"a swap with rank {other}", sorted((mesh.world_rank, other))):
        ends = [dist.P2POp(dist.isend, given, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
    return received


def barrier(mesh: Mesh) -> None:
    """Wait until every rank of the run has called this."""
    if mesh.world_size > 1:
        with mesh.activity.waiting("barrier", range(mesh.world_size)):
            dist.barrier(device_ids=[current_gpu()] if dist.get_backend() == "nccl" else None)


def registered_zeros(
    length: int, *, dtype: torch.dtype, device: torch.device, mesh: Mesh, axes: tuple[Axis, ...]
) -> Tensor:
    """Zeros ``[length]``, on GPUs in memory that NCCL allocates and registers with the communicator over ``axes``: its
    collectives read and write it without copies and occupy fewer SMs. All ranks of the group call it.

    Raises ConfigError on GPUs whose links have no multicast, for which NCCL allocates nothing.
    """
    group = mesh.group(*axes)
    if group is None or not is_gpu(device):
        return torch.zeros(length, dtype=dtype, device=device)
    all_reduce(torch.zeros(1, device=device), mesh, *axes)  # makes the communicator
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise ConfigError(
            "--use-nccl-ub needs GPUs with NVLink multicast (NVSwitch, compute capability 9.0 or higher), which "
            f"{describe(device)} doesn't have here; leave it out"
        )
    return backend.allocate_tensor(length, dtype=dtype, device=device).zero_()
