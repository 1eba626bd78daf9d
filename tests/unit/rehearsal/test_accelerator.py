"""Where a host waits for the pretended accelerator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.rehearsal.accelerator import Waits, pretending, register, unavailable
from tests.harness.ranks import run_ranks


def waits_of_operations(context: ParallelContext) -> dict[str, int]:
    """How often each operation waits; in a process of its own, since the device stays registered."""
    device, waits, found = register(memory=1 << 30), Waits(), dict[str, int]()

    def failed(error: Exception) -> None:
        raise error

    with pretending(waits, failed):
        x, host = torch.zeros(4, device=device), torch.zeros(4)
        operations: dict[str, Callable[[], object]] = {
            "to the device": lambda: host.to(device),
            "to the device, not blocking": lambda: host.to(device, non_blocking=True),
            "to the host": lambda: x.cpu(),
            "on the device": lambda: x.to(torch.bfloat16),
            "a tensor of numbers": lambda: torch.tensor([1.0, 2.0], device=device),
            "places": lambda: x.nonzero(),
            "a number": lambda: x.sum().item(),
            "a list": lambda: x.tolist(),
            "an event": lambda: torch.Event(device).synchronize(),
        }
        for name, operation in operations.items():
            before = sum(waits.places.values())
            operation()
            found[name] = sum(waits.places.values()) - before
    return found


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_what_the_host_waits_for() -> None:
    """A wait that isn't counted is a stall of each step that a rehearsal calls free."""
    (found,) = run_ranks(waits_of_operations, reuse=False)  # a registered device stays
    assert found == {
        "to the device": 1,
        "to the device, not blocking": 0,
        "to the host": 1,
        "on the device": 0,
        "a tensor of numbers": 1,
        "places": 1,
        "a number": 1,
        "a list": 1,
        "an event": 1,
    }
