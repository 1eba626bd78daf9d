"""What the module of devices asks of torch on a GPU, by stubs; on a CPU it asks for nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron.core import device

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def test_memory_for_copies_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory waits for all kernels, so nothing would overlap."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "empty", lambda *_, **given: made.append(given))
    for each in (GPU, CPU):
        device.host_memory(4, torch.uint8, each)
    assert [each["pin_memory"] for each in made] == [True, False]


def test_copies_go_on_after_the_return() -> None:
    """The host would wait for the device once a batch."""
    asked: list[tuple[Any, dict[str, Any]]] = []
    x = cast(Tensor, SimpleNamespace(to=lambda place, **given: asked.append((place, given))))
    device.start_copy(x, GPU)
    assert asked == [(GPU, {"non_blocking": True})]


def test_memory_of_another_stream_is_kept_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gathered weight would be overwritten while products still read it."""
    noted: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: f"stream of {place}")
    for place in (GPU, CPU):
        device.read_by_kernels(cast(Tensor, SimpleNamespace(device=place, record_stream=noted.append)))
    assert noted == ["stream of cuda:3"]


def test_streams_and_events_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in the kernels' own stream would take turns with them; an event that waits for nothing lets them race."""
    used: list[str] = []

    def stream(which: str) -> AbstractContextManager[None]:
        used.append(which)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", lambda place: f"new one of {place}")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: "event")
    for place in (GPU, CPU):
        with device.Stream(place).used():
            pass
    assert used == ["new one of cuda:3"]
    assert [str(device.event(GPU)), str(device.event(CPU)) == "event"] == ["event", False]


def test_kernels_draw_from_the_generator_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of a kernel would be seeded on another device, and a recomputed layer draw another mask."""
    monkeypatch.setattr(torch.cuda, "default_generators", ("of 0", "of 1", "of 2", "of 3"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    found = [str(device.default_generator(each)) for each in (GPU, torch.device("cuda"))]
    assert found == ["of 3", "of 2"]
    assert device.default_generator(CPU) is torch.default_generator


def test_a_rank_s_gpu_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL and kernels without a device argument would use the first GPU of the node in all of its ranks."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert device.gpu(3) == GPU
    assert current == [GPU]
