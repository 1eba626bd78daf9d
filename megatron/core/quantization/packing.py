"""Numbers of a few bits in the words of files: neighbours in one word, the first in the lowest bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 32
PACKED_BITS = (2, 4, 8)
"""Widths of which whole numbers fill a byte: of others, programs pack numbers differently."""


def packed(codes: Tensor, bits: int) -> Tensor:
    """Two's complement codes, int8 ``[rows, n]``, as int32 words; the smallest code is stored as 0."""
    numbers = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    numbers = F.pad(numbers, (0, -numbers.shape[1] % (WORD_BITS // bits)))
    each = 8 // bits
    filled = numbers[:, ::each].clone()
    for place in range(1, each):
        filled |= numbers[:, place::each] << (bits * place)
    # A matrix of one row or column may keep strides of another, which a view of other numbers doesn't allow.
    return filled.contiguous().view(-1).view(torch.int32).view(len(codes), -1)


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` numbers of each row, uint8 ``[rows, count]``, of int32 ``[rows, ⌈count·bits/32⌉]``."""
    filled = words.contiguous().view(-1).view(torch.uint8).view(len(words), -1)
    parts = [(filled >> (bits * place)) & ((1 << bits) - 1) for place in range(8 // bits)]
    return torch.stack(parts, dim=-1).flatten(1)[:, :count]


def signed(numbers: Tensor, bits: int) -> Tensor:
    """Numbers from 0 as two's complement codes, int8: the smallest code was stored as 0."""
    return (numbers.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
