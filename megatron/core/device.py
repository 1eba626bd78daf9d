"""What differs between a CPU and a GPU beside tensors: one module, whose functions do the same or nothing on a CPU.

Elsewhere a device is an argument, and nobody asks of which kind it is to call torch's module for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU, e.g. (9, 0) of an H100; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which kernels draw that cannot be given one."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def seeded(device: torch.device, seed: int | None) -> Iterator[None]:
    """For a ``with`` block: kernels that draw from the default generator draw from ``seed`` on. None: nothing changes.

    The generator's state lies on the host, so a GPU isn't waited for.
    """
    if seed is None:
        yield
        return
    generator = default_generator(device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
