"""Numbers of a few bits in words, there and back, for every shape."""

from __future__ import annotations

import pytest
import torch

from megatron.core.quantization.packing import PACKED_BITS, packed, signed, unpacked


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("shape", [(3, 64), (3, 33), (1, 8), (5, 1), (1, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_there_and_back(bits: int, shape: tuple[int, int], turned: bool) -> None:
    """Zero points of a weight with one group are a transposed column, which could not be written."""
    lowest = -(1 << (bits - 1))
    codes = torch.randint(lowest, -lowest, shape, generator=torch.Generator().manual_seed(1)).to(torch.int8)
    codes = codes.t().contiguous().t() if turned else codes
    words = packed(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (shape[0], -(-shape[1] * bits // 32))
    words = words.t().contiguous().t() if turned else words
    assert torch.equal(signed(unpacked(words, bits, shape[1]), bits), codes)


def test_the_first_number_is_in_the_lowest_bits() -> None:
    """And the smallest code is stored as 0."""
    codes = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, 7]], dtype=torch.int8)
    assert packed(codes, 4).tolist() == [[0xF6543210 - (1 << 32)]]
