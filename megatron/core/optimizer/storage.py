"""Storage formats of main parameters and moments between steps; a step computes in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.distributed.buffers import ALIGNMENT, Span
from megatron.core.optimizer.offload import CPU, HostTransfer

_WIDE = (torch.float32, torch.float64)


class StateStorage(Protocol):
    """Numbers for the weights of a span; a part of it is given relative to its start, and begins on ``ALIGNMENT``."""

    def read(self, part: Span) -> Tensor:
        """The numbers in the format of the step: the memory itself where that is the format, else a copy."""

    def write(self, part: Span, values: Tensor) -> None:
        """Keep ``values``, which may be what ``read`` returned, changed in place; a copy may be changed further."""

    def stored(self, part: Span) -> tuple[Tensor, Callable[[], None] | None]:
        """What a checkpoint keeps, and what must be called when loading has filled it, if anything."""


@dataclass(frozen=True, eq=False)
class PlainStateStorage:
    """Storage in the memory of ``numbers``, rounded to nearest where its format is narrower than ``wide``."""

    numbers: Tensor
    wide: torch.dtype

    def read(self, part: Span) -> Tensor:
        """The numbers of ``part`` in the format of the step."""
        return part.of(self.numbers).to(self.wide)

    def write(self, part: Span, values: Tensor) -> None:
        """Round ``values`` to the format of the memory; in the format of the step, they are the memory itself."""
        if self.numbers.dtype != self.wide:
            part.of(self.numbers).copy_(values)

    def stored(self, part: Span) -> tuple[Tensor, Callable[[], None] | None]:
        """The memory itself, which a checkpoint writes and fills."""
        return part.of(self.numbers), None


@dataclass(frozen=True, eq=False)
class DeviceWeights(PlainStateStorage):
    """Wide weights on a device, ``numbers``, for steps in main memory."""

    transfer: HostTransfer

    @override
    def read(self, part: Span) -> Tensor:
        """A copy of the part's weights in main memory."""
        return self.transfer.to_host(part.of(self.numbers), purpose="weights")()

    @override
    def write(self, part: Span, values: Tensor) -> None:
        """Send ``values`` to the weights on the device."""
        self.transfer.to_device(values, part.of(self.numbers))


@dataclass(frozen=True, eq=False)
class StochasticallyRounded(PlainStateStorage):
    """Positive numbers in bf16. A number between two of bf16 becomes the upper one with the probability that makes the
    expectation right: rounded to nearest, a sum of squares whose step is below 2⁻⁹ of it would never change again.

    ``key``: names the step and the buffer; ``offset``: where the span begins in its buffer. The draw depends on those
    and the place alone, not on how a buffer is divided.
    """

    key: Callable[[], int]
    offset: int

    @override
    def write(self, part: Span, values: Tensor) -> None:
        """Store ``values`` rounded stochastically."""
        bits = values.float().view(torch.int32)
        bits.add_(_random_halves(self.offset + part.start, part.size, self.key(), values.device))
        part.of(self.numbers).view(torch.int16).copy_(bits.bitwise_right_shift_(16))


@dataclass(frozen=True, eq=False)
class MainParams:
    """fp32 copies of 16-bit weights, which each step rounds to the weights. ``transfer``: for CPU memory."""

    numbers: Tensor
    weights: Tensor
    transfer: HostTransfer | None = None

    @classmethod
    def of(cls, weights: Tensor, transfer: HostTransfer | None = None) -> MainParams:
        """Main parameters with the values of ``weights``."""
        home = weights if transfer is None else weights.to(CPU)
        return cls(home.float(), weights, transfer)

    def read(self, part: Span) -> Tensor:
        """The fp32 numbers of ``part``: the memory itself."""
        return part.of(self.numbers)

    def write(self, part: Span, values: Tensor) -> None:
        """Round ``values`` to the weights."""
        if self.transfer is None:
            part.of(self.weights).copy_(values)
        else:
            self.transfer.to_device(values, part.of(self.weights))

    def stored(self, part: Span) -> tuple[Tensor, Callable[[], None] | None]:
        """The fp32 numbers themselves, which a checkpoint writes and fills."""
        return part.of(self.numbers), None


@dataclass(frozen=True, eq=False)
class Remainders:
    """fp32 masters of bf16 weights, stored as remainders: exact, in 17 bits beside the weight instead of 32.

    A master's bits are those of its weight, shifted by 16, plus a remainder from −2¹⁵ to 2¹⁵. Both ends are ties, which
    rounding resolves to even, so ``low`` [elements], int16, is −2¹⁵ for both, and ``ties`` [elements / 8], bits of
    uint8, marks the upper end. The weights remain masters rounded to nearest, bit for bit as with ``MainParams``.
    """

    weights: Tensor
    low: Tensor
    ties: Tensor

    @classmethod
    def of(cls, weights: Tensor) -> Remainders:
        """Main parameters with the values of bf16 ``weights``, whose number is a multiple of eight."""
        low = torch.zeros(weights.shape, dtype=torch.int16, device=weights.device)
        return cls(weights, low, torch.zeros(weights.numel() // 8, dtype=torch.uint8, device=weights.device))

    def read(self, part: Span) -> Tensor:
        """The fp32 masters of ``part``, put together from the weights and the remainders."""
        bits = part.of(self.weights).view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        bits.add_(part.of(self.low))
        marks = (self._ties_of(part).unsqueeze(1) >> self._shifts()) & 1
        bits.add_(marks.view(-1), alpha=1 << 16)
        return bits.view(torch.float32)

    def write(self, part: Span, values: Tensor) -> None:
        """Split fp32 ``values`` into the weights and the remainders."""
        weights = part.of(self.weights)
        weights.copy_(values)
        rest = values.view(torch.int32) - weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        part.of(self.low).copy_(rest)
        marks = (rest == 1 << 15).view(-1, 8).to(torch.uint8)
        self._ties_of(part).copy_((marks << self._shifts()).sum(1, dtype=torch.uint8))

    def stored(self, part: Span) -> tuple[Tensor, Callable[[], None] | None]:
        """The fp32 masters, in main memory, so that any run continues from them."""
        whole = Span(part.start, min(-(-part.stop // ALIGNMENT) * ALIGNMENT, self.low.numel()))
        masters = self.read(whole).cpu()
        return masters[: part.size], lambda: self.write(whole, masters.to(self.low.device))

    def _ties_of(self, part: Span) -> Tensor:
        return self.ties[part.start // 8 : part.stop // 8]

    def _shifts(self) -> Tensor:
        return torch.arange(8, dtype=torch.uint8, device=self.ties.device)


def build_main_params(
    weights: Tensor, transfer: HostTransfer | None, *, as_remainders: bool
) -> PlainStateStorage | MainParams | Remainders:
    """How the fp32 numbers of ``weights`` are kept: wide weights are their own. ``transfer``: for steps in main memory,
    which has room for whole masters.
    """
    if weights.dtype in _WIDE:
        return (
            PlainStateStorage(weights, weights.dtype)
            if transfer is None
            else DeviceWeights(weights, weights.dtype, transfer)
        )
    if transfer is not None:
        return MainParams.of(weights, transfer)
    if as_remainders and weights.dtype == torch.bfloat16:
        return Remainders.of(weights)
    return MainParams.of(weights)


def _random_halves(start: int, size: int, key: int, device: torch.device) -> Tensor:
    """16 random bits for each of the places ``[start, start + size)``, int32: a hash of place and ``key``."""
    mixed = torch.arange(size, dtype=torch.int32, device=device).add_(_signed(start))
    for factor, also in ((0x7FEB352D, key), (0x846CA68B, 0)):
        mixed.bitwise_xor_(mixed.bitwise_right_shift(16)).mul_(_signed(factor))
        mixed.bitwise_xor_(mixed.bitwise_right_shift(15)).bitwise_xor_(_signed(also))
    mixed.bitwise_xor_(mixed.bitwise_right_shift(16))
    return mixed.bitwise_and_(0xFFFF)


def _signed(number: int) -> int:
    """The int32 with the same low 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
