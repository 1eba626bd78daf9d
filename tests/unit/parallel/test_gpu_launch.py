"""What is asked of torch on a GPU when ranks join, by stubs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config.parallel import ParallelConfig
from megatron.core.parallel import launch
from megatron.core.parallel.environment import LaunchEnvironment


@pytest.mark.parametrize(("device", "backend"), [("cuda:3", "nccl"), ("cpu", "gloo")])
def test_communicators_are_made_at_once_and_belong_to_the_gpu(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device NCCL guesses one in a barrier, and makes communicators when only some ranks are ready."""
    asked: dict[str, Any] = {}

    def init_process_group(name: str, **given: Any) -> None:
        asked.update(given, name=name)

    monkeypatch.setattr(launch, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    launch._join(ParallelConfig(), LaunchEnvironment(world_size=2, local_rank=3), torch.device(device))
    assert asked["name"] == backend
    assert asked["device_id"] == (torch.device(device) if backend == "nccl" else None)
