"""What differs between a CPU and a GPU beside tensors: one module, whose functions do the same or nothing on a CPU.

Elsewhere a device is an argument, and nobody asks of which kind it is to call torch's module for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


def gpus() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu(number: int) -> torch.device:
    """The GPU with this number, which becomes the process's current device."""
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device


def current_gpu() -> int:
    """Number of this process's own GPU."""
    return torch.cuda.current_device()


def is_gpu(device: torch.device) -> bool:
    """Whether kernels on ``device`` are queued, and its collectives are NCCL's."""
    return device.type == "cuda"


def without_tf32() -> None:
    """Multiply fp32 numbers as they are, not rounded to the 10 bits of TF32, whatever was set before."""
    torch.set_float32_matmul_precision("highest")


def describe(device: torch.device) -> str:
    """Name of the device for reports."""
    if is_gpu(device):
        major, minor = torch.cuda.get_device_capability(device)
        tf32 = "with" if torch.backends.cuda.matmul.allow_tf32 else "without"
        return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, fp32 products {tf32} TF32)"
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' * (threads > 1)} a rank"


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a GPU, e.g. (9, 0) of an H100; None for other devices."""
    return torch.cuda.get_device_capability(device) if is_gpu(device) else None


def cuda_release() -> tuple[int, ...] | None:
    """Release of the CUDA that torch was built with, such as (12, 9), or None without it."""
    found = torch.version.cuda
    return None if found is None else tuple(map(int, found.split(".")))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which kernels draw that cannot be given one."""
    if not is_gpu(device):
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


class Event(Protocol):
    """A place in a queue of kernels."""

    def record(self) -> None:
        """Put it behind what the current stream has been given so far."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until the device has come to it."""
        ...

    def wait(self) -> None:
        """Let the current stream wait for it, not the host."""
        ...


class _NoEvent:
    """An event of a CPU, where everything before it is done when it is recorded."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait(self) -> None:
        pass


def event(device: torch.device) -> Event:
    """A new event for streams of ``device``."""
    return torch.cuda.Event() if is_gpu(device) else _NoEvent()  # type: ignore[no-untyped-call]


class Stream:
    """A queue of its own beside that of the kernels; on a CPU work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_gpu(device) else None  # type: ignore[no-untyped-call]

    def used(self) -> AbstractContextManager[object]:
        """For a ``with`` block: what is queued goes to this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def read_by_kernels(x: Tensor) -> None:
    """``x`` was allocated for another stream: its memory may be reused only after kernels queued from now on."""
    if is_gpu(x.device):
        x.record_stream(torch.cuda.current_stream(x.device))


def host_memory(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for ``length`` numbers from which ``device`` copies without the host: pinned for a GPU."""
    return torch.empty(length, dtype=dtype, pin_memory=is_gpu(device))


def start_copy(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; on a GPU the copy from ``host_memory`` goes on after the return."""
    return x.to(device, non_blocking=True)
