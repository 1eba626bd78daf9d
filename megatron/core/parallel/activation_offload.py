"""Activations in main memory: copied out while the next layers run, and back before the backward pass needs them.

Layers are unchanged: what autograd saves while one runs is put aside (torch's hooks of saved tensors). Copies run on
streams of their own, and kernels wait for them, never the host. All device memory comes from the kernels' stream and
is freed where that stream has waited for the copy, so its amount doesn't depend on how fast copies are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.core.device import Event, Stream, event, host_memory


class Offload:
    """The groups of one forward pass, in order; each is what one run of layers saves.

    ``least``: smaller tensors, in elements, stay where they are. ``kept``: tensors that stay in any case, because
    others hold them, too.
    """

    def __init__(self, device: torch.device, *, least: int, kept: Iterable[Tensor]) -> None:
        self._device, self._least = device, least
        self._kept = {each.untyped_storage()._cdata for each in kept}
        self._out, self._back = Stream(device), Stream(device)
        self._leaving: _Group | None = None
        self._latest: _Group | None = None

    @contextmanager
    def group(self) -> Iterator[None]:
        """What is saved in the block leaves when the block has ended."""
        made = _Group(self._device, self._least, self._kept, self._back)
        with saved_tensors_hooks(made.pack, made.unpack):
            yield
        self.finish()
        made.leave(self._out)
        self._leaving = made

    def follow(self, x: Tensor, *, grouped: bool) -> None:
        """``x`` is the result of a run of layers, ``grouped`` or not: when its gradient is known, the backward pass of
        the run is next, and the group before it begins to come back.
        """
        before = self._latest
        if not grouped:
            self.finish()
        if before is not None and x.requires_grad:
            x.register_hook(lambda _: before.return_())  # type: ignore[no-untyped-call]
        self._latest = self._leaving if grouped else None

    def finish(self) -> None:
        """Kernels from now on run when the last group has left; its memory is theirs."""
        if self._leaving is not None:
            self._leaving.left()
            self._leaving = None


class _Away:
    """A storage that is elsewhere: ``here`` until it has left and from its return on, ``there`` from its leaving."""

    def __init__(self, x: Tensor) -> None:
        count = x.untyped_storage().nbytes() // x.element_size()
        self.here: Tensor | None = x.detach().as_strided((count,), (1,), 0).view(torch.uint8)
        self.there: Tensor | None = None


class _View:
    """What autograd keeps of a tensor: its place in a storage."""

    def __init__(self, away: _Away, x: Tensor) -> None:
        self.away, self.dtype = away, x.dtype
        self.size, self.stride, self.offset = x.size(), x.stride(), x.storage_offset()


class _Group:
    """The storages that a run of layers saved. They belong to autograd, which drops each after its last use."""

    def __init__(self, device: torch.device, least: int, kept: set[int], back: Stream) -> None:
        self._device, self._least, self._kept, self._back = device, least, kept, back
        self._known: dict[int, _Away] = {}  # by storage
        self._members: list[ref[_Away]] = []
        self._leaving: list[_Away] = []
        self._gone, self._arrived = event(device), event(device)
        self._returns = False
        self._coming: list[_Away] = []

    def __del__(self) -> None:
        if self._coming:  # a graph that is dropped half-way
            self._arrived.wait()

    def pack(self, x: Tensor) -> Tensor | _View:
        storage = x.untyped_storage()
        is_small = storage.nbytes() // x.element_size() < self._least
        if is_small or storage._cdata in self._kept or x.device.type != self._device.type or x.is_sparse:
            return x
        if storage._cdata not in self._known:
            self._known[storage._cdata] = _Away(x)
        return _View(self._known[storage._cdata], x)

    def leave(self, stream: Stream) -> None:
        """Begin to copy everything out."""
        self._leaving = list(self._known.values())
        self._members = [ref(each) for each in self._leaving]
        self._known = {}
        ready = event(self._device)
        ready.record()
        with torch.no_grad(), stream.used():
            ready.wait()
            for each in self._leaving:
                assert each.here is not None
                each.there = host_memory(each.here.numel(), torch.uint8, self._device)
                each.there.copy_(each.here, non_blocking=True)
            self._gone.record()

    def left(self) -> None:
        """Let go of the device's memory, which kernels queued from now on may use."""
        self._gone.wait()
        for each in self._leaving:
            each.here = None
        self._leaving = []

    def return_(self) -> None:
        """Begin to copy everything back, once."""
        if self._returns:
            return
        self._returns = True
        # Held until kernels wait for the copies: what is dropped earlier would be written to when it is others' memory.
        found = [each for member in self._members if (each := member()) is not None and each.here is None]
        self._coming = found
        with torch.no_grad():
            for each in found:
                assert each.there is not None
                each.here = torch.empty(each.there.shape, dtype=torch.uint8, device=self._device)
            ready: Event = event(self._device)
            ready.record()
            with self._back.used():
                ready.wait()
                for each in found:
                    assert each.here is not None and each.there is not None
                    each.here.copy_(each.there, non_blocking=True)
                self._arrived.record()

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.return_()
        if self._coming:
            self._arrived.wait()
            self._coming = []
        here = packed.away.here
        assert here is not None, "return_() has brought it back"
        return here.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)
