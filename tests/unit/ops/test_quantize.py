"""Quantizers, byte for byte, against tables that are computed by hand from the formats' definitions."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megatron.core.ops.quantize import (
    E4M3,
    E5M2,
    LARGEST,
    Quantized,
    amax,
    amax_of_part,
    blockwise,
    bytes_of,
    codes_of_part,
    mx_exponents,
    mxfp8,
    power_of_two,
    scale_of,
    tensorwise,
    to_codes,
    with_scale,
)

INFINITY, NAN = math.inf, math.nan
SMALLEST = 2.0**-149  # subnormal number of fp32


def value_of(code: int, fmt: torch.dtype) -> float:
    """What a code means: sign, exponent and mantissa, as the formats' paper defines them (arXiv:2209.05433)."""
    mantissa_bits, bias = (3, 7) if fmt == E4M3 else (2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    if fmt == E4M3 and code & 0x7F == 0x7F:
        return NAN
    if fmt == E5M2 and exponent == 31:
        return sign * INFINITY if mantissa == 0 else NAN
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def finite_codes(fmt: torch.dtype) -> list[int]:
    """Codes of the values from 0 up, in order."""
    return [code for code in range(0x80) if math.isfinite(value_of(code, fmt))]


def codes(values: list[float], fmt: torch.dtype, dtype: torch.dtype = torch.float32) -> list[int]:
    found: list[int] = bytes_of(to_codes(torch.tensor(values, dtype=dtype), fmt)).tolist()
    return found


def next_fp32(value: float, up: bool) -> float:
    """The neighbour of a positive value in fp32."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    (found,) = struct.unpack("<f", struct.pack("<i", bits + (1 if up else -1)))
    return float(found)


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_each_code_stands_for_its_value(fmt: torch.dtype) -> None:
    """All 256 codes, both ways; an infinity of E5M2 is no result of rounding and comes back as the largest value."""
    every = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([value_of(code, fmt) for code in range(256)], dtype=torch.float64)
    found = Quantized(every.view(fmt)[None], torch.ones(())).dequantized(torch.float64)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    largest = finite_codes(fmt)[-1]
    for code, value in enumerate(expected.tolist()):
        (back,) = codes([value], fmt)
        if math.isfinite(value):
            assert back == code
        elif math.isinf(value):
            assert back == largest | (code & 0x80)
        else:
            assert math.isnan(value_of(back, fmt))


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_is_to_the_nearest_code_and_to_even_ones_between(fmt: torch.dtype, sign: float) -> None:
    """Each threshold between two codes, and its neighbours in fp32."""
    low = finite_codes(fmt)[:-1]
    thresholds = [float((Fraction(value_of(code, fmt)) + Fraction(value_of(code + 1, fmt))) / 2) for code in low]
    bit = 0x80 if sign < 0 else 0
    even = [code + code % 2 for code in low]
    assert codes([sign * each for each in thresholds], fmt) == [code | bit for code in even]
    below = [next_fp32(each, up=False) for each in thresholds]
    above = [next_fp32(each, up=True) for each in thresholds]
    assert codes([sign * each for each in below], fmt) == [code | bit for code in low]
    assert codes([sign * each for each in above], fmt) == [(code + 1) | bit for code in low]


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_what_is_too_large_becomes_the_largest_value(fmt: torch.dtype) -> None:
    """Casts alone give infinity in E5M2, and NaN on other devices in E4M3."""
    largest, code = LARGEST[fmt], finite_codes(fmt)[-1]
    beyond = [largest, next_fp32(largest, up=True), largest * 1.1, 1e30, INFINITY]
    assert codes(beyond, fmt) == [code] * 5
    assert codes([-each for each in beyond], fmt) == [code | 0x80] * 5
    assert math.isnan(value_of(codes([NAN], fmt)[0], fmt))
    assert codes([0.0, -0.0, SMALLEST, -SMALLEST], fmt) == [0, 0x80, 0, 0x80]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scale_of_a_tensor(dtype: torch.dtype) -> None:
    """448 divided by the largest magnitude, in fp32; then every value times that, rounded."""
    x = torch.tensor([[0.1, -3.0, 1.5], [0.0, 2.0, 7.0]], dtype=dtype)
    found = tensorwise(x, E4M3)
    scale = torch.tensor(448.0) / torch.tensor(7.0)
    assert found.scales == 1 / scale and found.scales.dtype == torch.float32
    # 64 times the values: 6.4 (6.40625 in bf16), -192, 96, 0, 128, 448.
    assert bytes_of(found.data).tolist() == [[0x4D, 0xF4, 0x6C], [0, 0x70, 0x7E]]


@pytest.mark.parametrize("largest", [0.0, INFINITY, NAN])
def test_a_tensor_without_a_finite_largest_value_isn_t_scaled(largest: float) -> None:
    assert scale_of(torch.tensor(largest), E4M3).item() == 1.0
    found = tensorwise(torch.tensor([[1.0, largest]]), E5M2) if largest != 0.0 else tensorwise(torch.zeros(1, 2), E5M2)
    assert found.scales.item() == 1.0


def test_a_scale_is_finite() -> None:
    """Of tiny values it would overflow: it becomes the largest number of the input's type."""
    tiny = torch.tensor(SMALLEST)
    assert scale_of(tiny, E4M3).item() == torch.finfo(torch.float32).max
    assert scale_of(tiny, E4M3, of_input=torch.bfloat16).item() == torch.finfo(torch.bfloat16).max
    assert scale_of(tiny, E4M3, of_input=torch.float64).item() == torch.finfo(torch.float32).max
    assert scale_of(tiny, E4M3, powers_of_two=True).item() == 2.0**127
    assert tensorwise(torch.full((1, 4), SMALLEST), E4M3).dequantized().isfinite().all()


def test_powers_of_two_are_rounded_down() -> None:
    largest = torch.tensor([448.0, 449.0, 447.0, 1.0, 3.0, 3.4e38])
    expected = [1.0, 0.5, 1.0, 256.0, 128.0, 2.0**-120]
    assert scale_of(largest, E4M3, powers_of_two=True).tolist() == expected


def test_blocks_of_128_have_their_own_scales() -> None:
    """Numbers of one block must not shrink those of its neighbours, and the last block may be short."""
    x = torch.zeros(3, 300)
    x[0, 5], x[0, 130], x[1, 299], x[2, 0] = 1.0, 448.0, -0.4375, 3.0
    found = blockwise(x, E4M3)
    assert found.scales.tolist() == [[1 / 256, 1.0, 1.0], [1.0, 1.0, 2.0**-10], [1 / 128, 1.0, 1.0]]
    assert [bytes_of(found.data)[place].item() for place in ((0, 5), (0, 130), (1, 299))] == [0x78, 0x7E, 0xFE]
    squares = blockwise(x, E4M3, rows=128)
    assert squares.scales.tolist() == [[1 / 128, 1.0, 2.0**-10]]
    assert squares.data.shape == (3, 300) and squares.scales.dtype == torch.float32
    for each in (found, squares):
        torch.testing.assert_close(each.dequantized(), x, rtol=0, atol=0)


def test_exponents_of_blocks_of_32() -> None:
    """The smallest power of two that isn't below the largest magnitude divided by 448."""
    above = torch.tensor([448.0, 447.0, 449.0, 896.0, 1.0, 0.0, INFINITY, NAN, 3.4e38, SMALLEST, 2.0**-126 * 448])
    assert mx_exponents(above).tolist() == [127, 127, 128, 128, 119, 0, 254, 255, 247, 0, 1]
    # 448 times 2^-127 and 2^-128 divide to subnormal numbers: up to the first 2^-127 will do, above it 2^-126.
    assert mx_exponents(torch.tensor([2.0**-127 * 448, 2.0**-127 * 450, 2.0**-128 * 448])).tolist() == [0, 1, 0]
    powers = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)
    expected = torch.tensor([2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127, NAN])
    torch.testing.assert_close(power_of_two(powers), expected, rtol=0, atol=0, equal_nan=True)


def test_blocks_of_32() -> None:
    x = torch.zeros(2, 48)
    x[0, 3], x[0, 40], x[1, 0], x[1, 1] = 449.0, 1.0, -0.5, 0.03125
    found = mxfp8(x)
    assert found.scales.tolist() == [[128, 119], [118, 0]] and found.scales.dtype == torch.uint8
    # 224.5 is rounded to 224; 1 becomes 256; -0.5 becomes -256, 1/32 becomes 16.
    taken = [bytes_of(found.data)[place].item() for place in ((0, 3), (0, 40), (1, 0), (1, 1))]
    assert taken == [0x76, 0x78, 0xF8, 0x58]
    assert found.dequantized()[0, 3].item() == 448.0


@pytest.mark.parametrize("kind", ["tensorwise", "blockwise", "squares", "mxfp8"])
@pytest.mark.parametrize("bad", [INFINITY, NAN])
def test_numbers_that_aren_t_finite(kind: str, bad: float) -> None:
    """NaN stays one, so that a run notices it; infinity becomes the largest value."""
    x = torch.ones(2, 64)
    x[0, 0] = bad
    values = quantizer(kind)(x).dequantized()
    assert values[0, 0].isnan() if math.isnan(bad) else values[0, 0] > 1
    assert values[1, 32:].isfinite().all()


@pytest.mark.parametrize("kind", ["tensorwise", "blockwise", "squares", "mxfp8"])
@pytest.mark.parametrize("power", [-20, -1, 1, 40])
def test_powers_of_two_in_the_input_change_scales_alone(kind: str, power: int) -> None:
    x = torch.randn(130, 160, generator=torch.Generator().manual_seed(0))
    once, scaled = quantizer(kind)(x), quantizer(kind)(x * 2.0**power)
    torch.testing.assert_close(bytes_of(once.data), bytes_of(scaled.data), rtol=0, atol=0)
    torch.testing.assert_close(once.dequantized() * 2.0**power, scaled.dequantized(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["tensorwise", "blockwise", "squares", "mxfp8"])
def test_errors_are_those_of_the_format(kind: str) -> None:
    """Half a unit in the last place of three bits, for numbers that aren't far below the largest of their block."""
    x = torch.rand(140, 200, generator=torch.Generator().manual_seed(1)) + 0.5
    error = (quantizer(kind)(x).dequantized() - x).abs() / x
    assert 0.03 < error.max() <= 0.0626


def test_no_rows() -> None:
    """Experts that no token has chosen."""
    for kind in ("tensorwise", "blockwise", "squares", "mxfp8"):
        assert quantizer(kind)(torch.zeros(0, 64)).dequantized().shape == (0, 64)


def test_transposing_keeps_the_numbers() -> None:
    x = torch.randn(140, 300, generator=torch.Generator().manual_seed(2))
    for found in (tensorwise(x, E4M3), blockwise(x, E4M3, rows=128), blockwise(x, E4M3), mxfp8(x)):
        back = found.transposed().contiguous()
        assert back.data.is_contiguous()
        torch.testing.assert_close(back.dequantized(), found.dequantized().t(), rtol=0, atol=0)


def test_amax_and_a_given_scale() -> None:
    """Delayed scaling clamps what grew since its scale was computed."""
    x = torch.tensor([[1.0, -8.0]], dtype=torch.bfloat16)
    assert amax(x).item() == 8.0 and amax(x).dtype == torch.float32
    found = with_scale(x, torch.tensor(64.0), E4M3)
    assert found.dequantized().tolist() == [[1.0, -7.0]]


def quantizer(kind: str) -> Callable[[Tensor], Quantized]:
    def of(x: Tensor) -> Quantized:
        if kind == "tensorwise":
            return tensorwise(x, E4M3)
        return mxfp8(x) if kind == "mxfp8" else blockwise(x, E4M3, rows=128 if kind == "squares" else 1)

    return of


@pytest.mark.parametrize("shape", [(300, 200), (128, 128), (3, 400), (257, 5), (40, 640)])
def test_parts_of_a_matrix_have_the_codes_of_the_whole(shape: tuple[int, int]) -> None:
    """Ranks that hold parts, cut anywhere, agree on the largest values; a block that is cut belongs to both."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp(4 * torch.randn(shape[0], 1))).bfloat16()
    flat, size = x.flatten(), x.numel()
    for cuts in ([0, size // 2, size], [0, 1, size // 3 + 7, size - 1, size], [0, 0, size], [0, size]):
        parts = [(flat[begin:end], begin) for begin, end in itertools.pairwise(cuts)]
        for block, whole in ((None, tensorwise(x, E4M3)), ((128, 128), blockwise(x, E4M3, rows=128))):
            largest = torch.stack([amax_of_part(part, start, shape, block) for part, start in parts]).amax(0)
            scale = scale_of(largest, E4M3, of_input=x.dtype, powers_of_two=block is not None)
            assert torch.equal(scale.reciprocal(), whole.scales)
            codes = [codes_of_part(part, start, shape, block, scale, E4M3) for part, start in parts if len(part)]
            assert torch.equal(torch.cat(codes), bytes_of(whole.data).flatten())
