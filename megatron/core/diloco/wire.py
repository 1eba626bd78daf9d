"""Formats of differences on their way between workers: as they are, in bf16, or in 8 or 4 bits with shared scales."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.config.diloco import WireType

_SHARING = 256  # numbers that share a scale
_LARGEST = 2.0**6  # of fp4's magnitudes: zero, and the powers of two from 1 on
_BETWEEN = (0.5, 1.5, 3.0, 6.0, 12.0, 24.0, 48.0)  # in the middle of two of them


class Wire(Protocol):
    """Numbers as bytes. Rows have a multiple of ``block`` numbers."""

    block: int

    def encode(self, rows: Tensor) -> Tensor:
        """The bytes of each row of ``rows`` [rows, numbers], uint8."""

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of ``codes``, in ``dtype``."""


class Plain:
    """Numbers in a floating-point type of torch; None: in the one that they have."""

    block = 1

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def encode(self, rows: Tensor) -> Tensor:
        """Each number rounded to nearest."""
        return rows.to(self._dtype or rows.dtype).contiguous().view(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers."""
        return codes.view(self._dtype or dtype).to(dtype)


class Int8:
    """Whole numbers from -127 to 127 times an fp32 scale for each block."""

    block = _SHARING

    def encode(self, rows: Tensor) -> Tensor:
        """Codes, then scales."""
        blocks, scales = _scaled(rows, largest=127.0)
        return _joined(blocks.round().to(torch.int8).view(torch.uint8).view(len(rows), -1), scales)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Codes times scales."""
        numbers, scales = _parted(codes, block_bytes=self.block)
        return _times(numbers.contiguous().view(torch.int8).to(dtype), scales)


class Fp4:
    """A sign and three bits of exponent (E3M0), two numbers in a byte, times an fp32 scale for each block."""

    block = _SHARING

    def encode(self, rows: Tensor) -> Tensor:
        """Codes, then scales."""
        blocks, scales = _scaled(rows, largest=_LARGEST)
        exponents = torch.bucketize(blocks.abs(), torch.tensor(_BETWEEN, device=rows.device, dtype=blocks.dtype))
        codes = (exponents + 8 * (blocks < 0)).to(torch.uint8).view(len(rows), -1, 2)
        return _joined(codes[..., 0] | codes[..., 1] << 4, scales)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Powers of two times scales."""
        pairs, scales = _parted(codes, block_bytes=self.block // 2)
        nibbles = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(len(codes), -1).long()
        magnitudes = torch.tensor([0.0, *(2.0**power for power in range(7))], dtype=dtype, device=codes.device)
        return _times(torch.cat((magnitudes, -magnitudes))[nibbles], scales)


def _scaled(rows: Tensor, *, largest: float) -> tuple[Tensor, Tensor]:
    """Blocks ``[rows, blocks, numbers]`` in fp32, divided by their scales ``[rows, blocks]`` to at most ``largest``."""
    blocks = rows.float().view(len(rows), -1, _SHARING)
    scales = blocks.abs().amax(-1) / largest
    return blocks / torch.where(scales == 0, torch.ones_like(scales), scales).unsqueeze(-1), scales


def _joined(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat((codes, scales.view(torch.uint8)), dim=1)


def _parted(codes: Tensor, *, block_bytes: int) -> tuple[Tensor, Tensor]:
    blocks = codes.shape[1] // (block_bytes + 4)
    numbers, scales = torch.split(codes, [blocks * block_bytes, 4 * blocks], dim=1)
    return numbers, scales.contiguous().view(torch.float32)


def _times(numbers: Tensor, scales: Tensor) -> Tensor:
    blocks = numbers.view(*scales.shape, _SHARING)
    return (blocks * scales.to(numbers.dtype).unsqueeze(-1)).view(len(numbers), -1)


WIRES: dict[WireType, Wire] = {"fp32": Plain(), "bf16": Plain(torch.bfloat16), "int8": Int8(), "fp4": Fp4()}
"""Formats by their names in ``--diloco-dtype``; fp32 is the type of master weights, in fp64 runs that."""
