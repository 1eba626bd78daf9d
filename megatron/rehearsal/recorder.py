"""Records the collectives and messages of a rank from torch's dispatcher, and refuses those that NCCL refuses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel.collectives import Handle
from megatron.rehearsal.accelerator import DEVICE_TYPE, place

_NAMES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv_": "receive",
}
MESSAGES = ("send", "receive")
_RESULT_FIRST = ("all-gather", "reduce-scatter", "all-to-all")
# NCCL's table: no integers of 16 bits; float8 is moved as bytes.
_REDUCED = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_MOVED = (*_REDUCED, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")
_READS_NO_VALUES = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_full")

_NUMBERED = 1 << 31  # elements that fit into the 32 bits with which many kernels count
# Beside operators of one element at a time, which torch divides: those that make, fill or copy tensors.
_NUMBERS_ANY = (*_READS_NO_VALUES, "empty", "zeros", "ones", "full", "empty_strided", "_to_copy", "zero_", "detach")


@dataclass(frozen=True)
class Communicator:
    """A process group: its name, and the world ranks in it."""

    name: str
    members: tuple[int, ...]


@dataclass
class Operation:
    """A collective, or one end of a message.

    ``peer``: the other world rank of a message. ``elements``: of what every rank gives; of a message's tensor.
    ``reduction``: ``SUM`` and the like, of operations that reduce. ``batch``: operations with one number were started
    together; ``grouped``: by ``batch_isend_irecv``. ``started_after``: how many waits came before. ``waited``: the
    number of the wait for its end; None for one that nobody has waited for.
    """

    name: str
    communicator: Communicator
    dtype: torch.dtype
    elements: int
    place: str
    batch: int
    started_after: int
    peer: int | None = None
    waited: int | None = None
    reduction: str | None = None
    grouped: bool = False

    @property
    def describe(self) -> str:
        """The operation in words, for messages."""
        where = f" {'to' if self.name == 'send' else 'from'} rank {self.peer}" if self.peer is not None else ""
        name = f"{self.name} ({self.reduction})" if self.reduction not in (None, "SUM") else self.name
        return f"{name}{where} of {self.elements:,} x {str(self.dtype).removeprefix('torch.')} at {self.place}"


@dataclass(frozen=True)
class _Bytes:
    """Part of a storage. ``storage``: its address."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, x: Tensor) -> _Bytes:
        """The bytes from the first to the last element of ``x``."""
        last = sum((int(size) - 1) * stride for size, stride in zip(x.shape, x.stride()))
        start = int(x.storage_offset()) * x.element_size()
        stop = start + (int(last) + 1) * x.element_size() if x.numel() else start
        return cls(x.untyped_storage()._cdata, start, stop)

    def overlaps(self, other: _Bytes) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class _InFlight:
    """An operation that has not been waited for. ``tensors``: kept alive, so that no other gets their addresses."""

    operation: Operation
    read: tuple[_Bytes, ...]
    written: tuple[_Bytes, ...]
    tensors: tuple[Tensor, ...]


@dataclass
class Recorder:
    """The operations of one rank in order, and what NCCL would refuse of them."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    waits: int = 0
    _started: list[_InFlight] = field(default_factory=list)
    _in_flight: dict[int, list[_InFlight]] = field(default_factory=dict)
    _grouping: bool = False
    _main_thread: int = field(default_factory=threading.get_ident)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In the block, each wait for an operation is recorded; ``see`` records the operations."""
        begin, wait, grouped = Handle.__init__, Handle.wait, dist.batch_isend_irecv
        owned: dict[int, tuple[Handle[Any], list[_InFlight]]] = {}  # with the handle, so that no other gets its id

        def begin_recorded(
            handle: Handle[Any], result: Any, works: Sequence[Any] = (), *args: Any, **more: Any
        ) -> None:
            begin(handle, result, works, *args, **more)
            if works:
                started, self._started = self._started, []
                for each in started:
                    each.operation.batch = started[0].operation.batch
                owned[id(handle)] = handle, started

        def wait_recorded(handle: Handle[Any]) -> Any:
            for each in owned.pop(id(handle), (handle, []))[1]:
                each.operation.waited = self.waits
                for part in (*each.read, *each.written):
                    self._in_flight[part.storage] = [
                        other for other in self._in_flight.get(part.storage, []) if other is not each
                    ]
            self.waits += 1
            return wait(handle)

        def batch_recorded(messages: list[Any]) -> Any:
            self._grouping = True
            try:
                return grouped(messages)
            finally:
                self._grouping = False

        with (
            mock.patch.object(Handle, "__init__", begin_recorded),
            mock.patch.object(Handle, "wait", wait_recorded),
            mock.patch.object(dist, "batch_isend_irecv", batch_recorded),
        ):
            yield

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operator that has run: record it if it is one of ``torch.distributed``'s, and check it."""
        self._check_size(func, [*args, *kwargs.values(), result])
        if func.namespace == "c10d":
            names = [each.name for each in func._schema.arguments]
            self._record(func._schema.name.removeprefix("c10d::"), {**dict(zip(names, args)), **kwargs})
        elif self._in_flight and func.namespace == "aten":
            self._check_reuse(func, args, kwargs)

    def _record(self, name: str, arguments: Mapping[str, Any]) -> None:
        known = _NAMES.get(name)
        if known is None:
            self.refused.append(f"{place()}: the operation {name} is not known to the rehearsal")
            return
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        members = tuple(dist.get_process_group_ranks(group))
        tensors = [each for each in flat([*arguments.values()]) if isinstance(each, Tensor)]
        given, peer = tensors[1 if known in _RESULT_FIRST else 0], arguments.get("dst", arguments.get("src"))
        reduction = arguments.get("reduce_op")
        operation = Operation(
            name=known,
            communicator=Communicator(group.group_name, members),
            dtype=given.dtype,
            elements=given.numel(),
            place=place(),
            batch=len(self.operations),
            started_after=self.waits,
            peer=None if peer is None else members[peer],
            reduction=None if reduction is None else dist.ReduceOp.RedOpType(reduction.op()).name,
            grouped=self._grouping,
        )
        self.operations.append(operation)
        self.refused += refusals(operation, tensors, rank=self.rank)
        # A backward pass runs on a thread of autograd's, which the main thread waits for.
        if threading.get_ident() != self._main_thread and torch._C._current_graph_task_id() == -1:
            self.refused.append(
                f"{operation.describe}: it is started by a second thread, whose order with the first's is open"
            )
        parts = [_Bytes.of(each) for each in tensors]
        if known in _RESULT_FIRST:
            read, written = parts[1:], parts[:1]
        else:
            read, written = (parts, []) if known == "send" else ([], parts)
        if arguments.get("async_op", True):  # as torch's schemas say
            started = _InFlight(operation, tuple(read), tuple(written), tuple(tensors))
            self._started.append(started)
            for part in {*read, *written}:
                self._in_flight.setdefault(part.storage, []).append(started)
        else:
            operation.waited = self.waits
            self.waits += 1

    def _check_size(self, func: Any, values: Sequence[Any]) -> None:
        """Refuse tensors whose elements some kernels can't number, with 32 bits."""
        if func.is_view or func.namespace != "aten" or func._opname in _NUMBERS_ANY or torch.Tag.pointwise in func.tags:
            return
        for x in flat(values):
            if isinstance(x, Tensor) and x.device.type == DEVICE_TYPE and x.numel() >= _NUMBERED:
                self.refused.append(f"{func._opname} at {place()}: a tensor of {x.numel():,} elements, 2³¹ or more")

    def _check_reuse(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse the use of a result that may not be there yet, and a change of what may still be sent."""
        if func.is_view or func._opname in _READS_NO_VALUES:
            return
        for argument, value in zip(func._schema.arguments, [*args, *([None] * len(func._schema.arguments))]):
            changes = argument.alias_info is not None and argument.alias_info.is_write
            for x in flat([kwargs.get(argument.name, value)]):
                if not isinstance(x, Tensor) or x.device.type != DEVICE_TYPE:
                    continue
                part = _Bytes.of(x)
                for each in self._in_flight.get(part.storage, ()):
                    if any(part.overlaps(other) for other in (*each.written, *(each.read if changes else ()))):
                        what = "changes what it uses" if changes else "reads its result"
                        self.refused.append(
                            f"{each.operation.describe}: {func._opname} at {place()} {what} before it is waited for"
                        )


def refusals(operation: Operation, tensors: Sequence[Tensor], *, rank: int) -> Iterator[str]:
    """A sentence for each reason why NCCL would refuse an operation of ``rank`` on ``tensors``: where results and what
    is given are apart, first the result.
    """
    for tensor in tensors:
        if not tensor.is_contiguous():
            yield f"{operation.describe}: its tensor of shape {tuple(tensor.shape)} is not contiguous"
        if tensor.device.type != DEVICE_TYPE:
            yield f"{operation.describe}: its tensor is on the {tensor.device.type}"
    if operation.dtype not in _MOVED:
        yield f"{operation.describe}: NCCL does not have this type"
    elif operation.reduction is not None and operation.dtype not in _REDUCED:
        yield f"{operation.describe}: NCCL does not reduce this type"
    if operation.reduction is not None and operation.reduction not in _REDUCTIONS:
        yield f"{operation.describe}: NCCL does not have this reduction"
    if operation.name in _RESULT_FIRST and not _apart(operation, *tensors[:2], rank=rank):
        yield f"{operation.describe}: its result overlaps what it is given, other than as this rank's part"


def _apart(operation: Operation, result: Tensor, given: Tensor, *, rank: int) -> bool:
    """Whether result and input share no memory, or as NCCL's in-place gather and scatter do."""
    whole, part = _Bytes.of(result), _Bytes.of(given)
    if not whole.overlaps(part):
        return True
    if operation.name == "reduce-scatter":
        whole, part = part, whole
    own = operation.communicator.members.index(rank) * (part.stop - part.start)
    return operation.name != "all-to-all" and part.start == whole.start + own


def flat(values: Sequence[Any]) -> Iterator[Any]:
    """The values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


class Memory:
    """Bytes of the pretended device, or of devices of another type, that are held, and the most that were."""

    def __init__(self, device_type: str = DEVICE_TYPE) -> None:
        self.held = self.highest = 0
        self._device_type = device_type
        self._sizes: dict[int, int] = {}

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """An operator that has run, which may have made tensors."""
        for each in (result,) if isinstance(result, Tensor) else flat([result]):
            if not isinstance(each, Tensor) or each.device.type != self._device_type:
                continue
            storage = each.untyped_storage()
            if storage._cdata not in self._sizes:
                self.see_resized(each)
                weakref.finalize(storage, self._release, storage._cdata)

    def see_resized(self, x: Tensor) -> None:
        """A tensor whose storage has got another size."""
        storage = x.untyped_storage()
        self.held += storage.nbytes() - self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = storage.nbytes()
        self.highest = max(self.highest, self.held)

    def _release(self, key: int) -> None:
        self.held -= self._sizes.pop(key)
