"""Batches on their way to the device: host memory that is filled again only after the device has read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.core.device import Event, Stream, event, host_memory, is_gpu, read_by_kernels, start_copy

_SLOTS = 3  # one is copied, one waits, one is filled


@dataclass
class _Slot:
    """Memory for a batch. ``read``: where the device has read the last batch that lay here; None before the first."""

    memory: dict[str, Tensor] = field(default_factory=dict)
    read: Event | None = None


class PinnedRing:
    """Copies batches to a device beside its kernels; the host waits only when all slots are still being read.

    A copy from pageable memory would make the host wait for the device, and pinned memory that is refilled too early
    gives the device parts of two batches. On a CPU batches are what they were.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = Stream(device)
        self._slots = [_Slot() for _ in range(_SLOTS)]
        self._sent = 0

    def send(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``batch`` on the device, readable by kernels that are queued from now on."""
        if not is_gpu(self._device):
            return {name: tensor.to(self._device) for name, tensor in batch.items()}
        slot = self._slots[self._sent % _SLOTS]
        self._sent += 1
        if slot.read is not None:
            slot.read.synchronize()
        slot.read = event(self._device)
        with self._stream.used():
            sent = {}
            for name, tensor in batch.items():
                memory = slot.memory.get(name)  # it grows with the largest batch
                if memory is None or memory.numel() < tensor.numel() or memory.dtype != tensor.dtype:
                    memory = slot.memory[name] = host_memory(tensor.numel(), tensor.dtype, self._device)
                held = memory[: tensor.numel()].view(tensor.shape).copy_(tensor)
                sent[name] = start_copy(held, self._device)
            slot.read.record()
        slot.read.wait()
        for tensor in sent.values():
            read_by_kernels(tensor)
        return sent
