"""Batches on their way to a device that is late: none is overwritten before it has been read, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.datasets import pinned_ring
from megatron.core.datasets.pinned_ring import PinnedRing

CPU = torch.device("cpu")


class LateDevice:
    """Copies only when the host waits for an event behind them, as late as a device may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], None]] = []
        self.log: list[str] = []
        device, done = self, [0]

        class Event:
            def record(self) -> None:
                self.place = done[0] + len(device.queue)

            def synchronize(self) -> None:
                if done[0] < self.place:
                    device.log.append("host waits")
                while done[0] < self.place:
                    device.queue.pop(0)()
                    done[0] += 1

            def wait(self) -> None:
                device.log.append("kernels wait")

        def start_copy(x: Tensor, _: torch.device) -> Tensor:
            arrived = torch.full_like(x, -1)

            def copy() -> None:
                arrived.copy_(x)

            self.queue.append(copy)
            return arrived

        def host_memory(length: int, dtype: torch.dtype, _: torch.device) -> Tensor:
            self.log.append(f"pinned {length}")
            return torch.zeros(length, dtype=dtype)

        fakes: dict[str, Any] = {"start_copy": start_copy, "host_memory": host_memory, "is_gpu": lambda _: True}
        fakes |= {"event": lambda _: Event(), "read_by_kernels": lambda x: self.log.append("kept for kernels")}
        for name, fake in fakes.items():
            monkeypatch.setattr(pinned_ring, name, fake)


def test_memory_is_filled_again_only_after_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device would train on parts of two batches, and no error would say so."""
    late = LateDevice(monkeypatch)
    ring = PinnedRing(CPU)
    batches = [{"tokens": torch.arange(6).view(2, 3) + 10 * number} for number in range(10)]
    arrived = [ring.send(batch) for batch in batches]
    while late.queue:
        late.queue.pop(0)()
    for batch, sent in zip(batches, arrived):
        assert torch.equal(sent["tokens"], batch["tokens"])
    assert late.log.count("pinned 6") == 3, "memory is pinned once for each slot"
    assert late.log.count("kernels wait") == late.log.count("kept for kernels") == 10


def test_the_host_waits_only_for_a_device_that_is_three_batches_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each batch would cost the time in which the host could have queued kernels."""
    late = LateDevice(monkeypatch)
    ring = PinnedRing(CPU)
    for _ in range(3):
        ring.send({"tokens": torch.zeros(4)})
    assert "host waits" not in late.log
    ring.send({"tokens": torch.zeros(4)})
    assert late.log.count("host waits") == 1


def test_a_longer_batch_gets_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batches of an evaluation and ramped-up batches have other shapes."""
    late = LateDevice(monkeypatch)
    ring = PinnedRing(CPU)
    batches = [{"tokens": torch.arange(length), "mask": torch.ones(length)} for length in (4, 2, 8, 8, 3, 6)]
    arrived = [ring.send(batch) for batch in batches]
    while late.queue:
        late.queue.pop(0)()
    for batch, sent in zip(batches, arrived):
        assert all(torch.equal(sent[name], batch[name]) for name in batch)


def test_on_a_cpu_batches_are_what_they_were() -> None:
    """No copy is made of what is there already."""
    tokens = torch.arange(4)
    assert PinnedRing(CPU).send({"tokens": tokens})["tokens"] is tokens
