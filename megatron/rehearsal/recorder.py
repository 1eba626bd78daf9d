"""What a rank asks of the others, as torch's dispatcher sees it, and the highest number of bytes that it holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
_RESULT_FIRST = ("all-gather", "reduce-scatter", "all-to-all")
# NCCL's table: no 16-bit integers; numbers of 8 bits in other formats are moved as bytes.
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


@dataclass(frozen=True)
class Communicator:
    """A process group: its name, and the world ranks in it."""

    name: str
    members: tuple[int, ...]


@dataclass
class Operation:
    """A collective, or one end of a message.

    ``peer``: the other world rank of a message. ``elements``: of what every rank gives; of a message's tensor.
    ``batch``: operations with one number were started together. ``started_after``: how many waits came before.
    ``waited``: the number of the wait for its end; None for one that nobody has waited for.
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

    @property
    def describe(self) -> str:
        """For messages."""
        where = f" {'to' if self.name == 'send' else 'from'} rank {self.peer}" if self.peer is not None else ""
        return f"{self.name}{where} of {self.elements:,} x {str(self.dtype).removeprefix('torch.')} at {self.place}"


@dataclass
class Recorder:
    """The operations of one rank in order, and what NCCL would refuse of them."""

    rank: int
    operations: list[Operation] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    waits: int = 0
    _pending: list[Operation] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """In the block every operation is recorded, and each wait for one."""
        begin, wait = Handle.__init__, Handle.wait
        owned: dict[int, tuple[Handle[Any], list[Operation]]] = {}  # with the handle, so that no other gets its id

        def begin_recorded(
            handle: Handle[Any], result: Any, works: Sequence[Any] = (), *args: Any, **more: Any
        ) -> None:
            begin(handle, result, works, *args, **more)
            if works:
                owned[id(handle)] = handle, self._take_pending()

        def wait_recorded(handle: Handle[Any]) -> Any:
            for each in owned.pop(id(handle), (handle, []))[1]:
                each.waited = self.waits
            self.waits += 1
            return wait(handle)

        with (
            mock.patch.object(Handle, "__init__", begin_recorded),
            mock.patch.object(Handle, "wait", wait_recorded),
            _Seeing(self),
        ):
            yield

    def _take_pending(self) -> list[Operation]:
        taken, self._pending = self._pending, []
        for each in taken:
            each.batch = taken[0].batch
        return taken

    def see(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Record the operation that torch calls ``name``."""
        known = _NAMES.get(name)
        if known is None:
            self.refused.append(f"{place()}: the operation {name} is not known to the rehearsal")
            return
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        members = tuple(dist.get_process_group_ranks(group))
        tensors = [each for each in _flat([*arguments.values()]) if isinstance(each, Tensor)]
        given, peer = tensors[1 if known in _RESULT_FIRST else 0], arguments.get("dst", arguments.get("src"))
        operation = Operation(
            name=known,
            communicator=Communicator(group.group_name, members),
            dtype=given.dtype,
            elements=given.numel(),
            place=place(),
            batch=len(self.operations),
            started_after=self.waits,
            peer=None if peer is None else members[peer],
        )
        self.operations.append(operation)
        if arguments.get("async_op", True):  # as torch's schemas say
            self._pending.append(operation)
        else:
            operation.waited = self.waits
            self.waits += 1
        self._check(operation, tensors)

    def _check(self, operation: Operation, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_contiguous():
                self.refused.append(
                    f"{operation.describe}: its tensor of shape {tuple(tensor.shape)} is not contiguous"
                )
            if tensor.device.type != DEVICE_TYPE:
                self.refused.append(f"{operation.describe}: its tensor is on the {tensor.device.type}")
        if operation.name in ("all-reduce", "reduce-scatter") and operation.dtype not in _REDUCED:
            self.refused.append(f"{operation.describe}: NCCL does not reduce this type")
        if operation.dtype in (torch.int16, torch.uint16):
            self.refused.append(f"{operation.describe}: NCCL does not have this type")


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace == "c10d":
            names = [each.name for each in func._schema.arguments]
            self._recorder.see(func._schema.name.removeprefix("c10d::"), {**dict(zip(names, args)), **(kwargs or {})})
        return func(*args, **(kwargs or {}))


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the pretended device that are held, and the most that were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.highest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in _flat([result]):
            if isinstance(each, Tensor) and each.device.type == DEVICE_TYPE:
                self._hold(each.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.held += size
        self.highest = max(self.highest, self.held)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size
