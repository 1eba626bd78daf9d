"""Optimizer state in main memory, and steps there: the same numbers as on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed.buffers import FlatBuffer, Span
from megatron.core.optimizer.offload import HostTransfer, divided
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.context import ParallelContext
from tests.unit.optimizer.test_storage import NARROW, buffers_of, optimizer_of, take_steps

OFFLOADED = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}


def state_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps."""
    return {entry.name: entry.tensor for entry in optimizer.entries()}


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("settings", [{}, NARROW, {"optimizer": "sgd"}], ids=["adam", "narrow", "sgd"])
def test_steps_are_the_same(
    settings: dict[str, Any], dtype: torch.dtype, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights would miss a chunk, or take another's gradients, or be rounded otherwise."""
    monkeypatch.setattr("megatron.core.optimizer.optimizer._CPU_CHUNK", 4096)
    here, there = buffers_of(dtype), buffers_of(dtype)
    plain = optimizer_of(here, **settings)
    offloaded = optimizer_of(there, **settings, **OFFLOADED, optimizer_offload_fraction=fraction)
    for buffers, optimizer in ((here, plain), (there, offloaded)):
        take_steps(buffers, optimizer, range(3))
    assert all(torch.equal(mine.params, theirs.params) for mine, theirs in zip(here, there))
    expected, found = state_of(plain), state_of(offloaded)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def spans_of(buffers: list[FlatBuffer], parts: int) -> list[Any]:
    """Buckets and the last of ``parts`` equal parts of each."""
    found = []
    for buffer in buffers:
        for bucket in buffer.buckets:
            size = bucket.span.size // parts // 64 * 64
            found.append((buffer, bucket, Span(bucket.span.stop - size, bucket.span.stop)))
    return found


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.3, 0.99, 1.0])
def test_whole_parameters_are_offloaded(parts: int, fraction: float) -> None:
    """A parameter in both places would be twice in a checkpoint; spans in neither would never be updated."""
    owned = spans_of(buffers_of(torch.float32), parts)
    found = list(divided(owned, fraction))
    elements = sum(span.size for _, _, span in owned)
    offloaded = sum(span.size for _, _, span, away in found if away)
    assert sum(span.size for _, _, span, _ in found) == elements
    assert fraction * elements <= offloaded <= (elements if fraction else 0)
    held = [
        entry.name for _, bucket, span, _ in found for entry in bucket.entries if entry.span.overlap(span) is not None
    ]
    assert len(held) == len({*held})


def test_staging_memory_is_not_filled_while_it_is_read() -> None:
    """Gradients of a chunk would be those of the next one."""
    transfer = HostTransfer(ParallelContext.single().device)
    chunks = torch.arange(12.0).view(3, 4)
    first, second = (transfer.to_host(chunk, purpose="gradients") for chunk in chunks[:2])
    assert torch.equal(first(), chunks[0])
    assert torch.equal(second(), chunks[1])


def test_staging_memory_is_filled_again_when_its_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the weights of a chunk would be those of a later one, or gradients be read before they are there."""
    said: list[str] = []

    class Place:
        def __init__(self, device: torch.device) -> None:
            self.number = sum("begins" in each for each in said)

        def record(self) -> None:
            said.append(f"copy {self.number} begins")

        def synchronize(self) -> None:
            said.append(f"wait for {self.number}")

    monkeypatch.setattr(torch, "Event", Place)
    transfer, chunk = HostTransfer(ParallelContext.single().device, overlaps=True), torch.zeros(4)
    for _ in range(3):
        transfer.to_device(chunk, chunk.clone())
    assert said == ["copy 0 begins", "copy 1 begins", "wait for 0", "copy 2 begins"]
    said.clear()
    transfer.to_host(chunk, purpose="gradients")()
    assert said == ["copy 0 begins", "wait for 0"]
