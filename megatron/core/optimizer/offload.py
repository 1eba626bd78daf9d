"""Optimizer state in CPU memory: gradients are copied to the CPU, which takes the step, and weights back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.buffers import Bucket, FlatBuffer, Span

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class HostTransfer:
    """Copies chunks between a device and main memory, through staging memory for two chunks each way.

    ``overlaps``: copies run while the CPU computes; waiting is for one chunk at a time. ``pins_gradients``,
    ``pins_weights``: staging memory that the device reads and writes itself, without which copies don't overlap.
    """

    device: torch.device
    overlaps: bool = False
    pins_gradients: bool = True
    pins_weights: bool = True
    _staging: dict[tuple[str, torch.dtype], deque[_Slot]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: OptimizerConfig, device: torch.device) -> HostTransfer:
        """The transfers that the flags ask for."""
        overlaps = config.overlap_cpu_optimizer_d2h_h2d and device.type != "cpu"
        return cls(device, overlaps, config.pin_cpu_grads, config.pin_cpu_params)

    def to_host(self, source: Tensor, *, purpose: str) -> Callable[[], Tensor]:
        """Begin to copy ``source`` [elements] to main memory; what is returned waits for the copy, and gives it until
        the second call of this for the same ``purpose``.
        """
        slot = self._slot(purpose, source, pins=self.pins_gradients if purpose == "gradients" else self.pins_weights)
        slot.numbers.copy_(source, non_blocking=self.overlaps)
        slot.begin(self)
        return slot.finished

    def to_device(self, values: Tensor, target: Tensor) -> None:
        """Copy ``values`` of main memory to ``target`` on the device, in its format, in the order of its stream."""
        slot = self._slot("results", target, pins=self.pins_weights)
        slot.numbers.copy_(values)
        target.copy_(slot.numbers, non_blocking=self.overlaps)
        slot.begin(self)

    def _slot(self, purpose: str, like: Tensor, *, pins: bool) -> _Slot:
        """The staging memory that was used longest ago, once the device is done with it."""
        ring = self._staging.setdefault((purpose, like.dtype), deque([_Slot(), _Slot()]))
        ring.rotate(1)
        slot = ring[0]
        slot.finished()
        if slot.memory is None or slot.memory.numel() < like.numel():
            pinned = pins and self.device.type != "cpu"
            slot.memory = torch.empty(like.shape, dtype=like.dtype, device=CPU, pin_memory=pinned)
        slot.numbers = slot.memory[: like.numel()]
        return slot


@dataclass(eq=False)
class _Slot:
    """Staging memory for one chunk, and the copy that the device still makes from or to it."""

    memory: Tensor | None = None
    numbers: Tensor = field(default_factory=lambda: torch.empty(0))
    copied: torch.Event | None = None

    def begin(self, transfer: HostTransfer) -> None:
        if transfer.overlaps:
            self.copied = torch.Event(transfer.device)
            self.copied.record()

    def finished(self) -> Tensor:
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        return self.numbers


def divided(
    owned: Sequence[tuple[FlatBuffer, Bucket, Span]], fraction: float
) -> Iterator[tuple[FlatBuffer, Bucket, Span, bool]]:
    """The spans that a rank owns, cut where the first whole parameters with at least ``fraction`` of all elements end,
    each with whether it is among those. Nothing for 0.
    """
    wanted, passed = fraction * sum(span.size for _, _, span in owned), 0
    for buffer, bucket, span in owned:
        starts = [part.start for entry in bucket.entries if (part := entry.span.overlap(span))]
        ends = [*starts[1:], span.stop]
        cut = next((end for end in [span.start, *ends] if passed + end - span.start >= wanted), span.stop)
        passed += span.size
        if cut > span.start:
            yield buffer, bucket, Span(span.start, cut), True
        if cut < span.stop:
            yield buffer, bucket, Span(cut, span.stop), False
