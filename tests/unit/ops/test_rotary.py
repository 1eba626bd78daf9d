"""Rotary positions: against complex arithmetic, and every variant of the frequencies."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron.core.ops.rotary import Rotary, RotaryTable, apply_rotary
from megatron.core.ops.rotary_scaling import UNSCALED, Linear, Llama3, Scaling


def table(length: int, width: int, base: float = 10000.0, scaling: Scaling = UNSCALED) -> RotaryTable:
    return Rotary(width, base, scaling).table(torch.arange(length), length=length, dtype=torch.float64)


def turned(x: Tensor, base: float, *, interleaved: bool) -> Tensor:
    """Pairs of [s, b, n, d] as complex numbers times e^(i·position·frequency)."""
    width = x.shape[-1]
    pairs = x.view(*x.shape[:-1], -1, 2) if interleaved else torch.stack(x.chunk(2, dim=-1), dim=-1)
    frequencies = torch.tensor([base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None, None] * frequencies
    result = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    return result.flatten(-2) if interleaved else torch.cat(result.unbind(-1), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_complex_multiplication(interleaved: bool) -> None:
    """Which elements form a pair is part of a checkpoint's meaning."""
    x = torch.randn(7, 2, 3, 8, dtype=torch.float64)
    actual = apply_rotary(x, table(7, 8, base=100.0), interleaved=interleaved)
    torch.testing.assert_close(actual, turned(x, 100.0, interleaved=interleaved), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_turns_back(interleaved: bool) -> None:
    """The hand-written gradient, with a part of the head that isn't turned."""
    x = torch.randn(3, 2, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = table(3, 4, scaling=Scaling(attention_factor=1.3))
    assert torch.autograd.gradcheck(lambda a: apply_rotary(a, angles, interleaved=interleaved), (x,))


def test_percent_leaves_the_rest_of_the_head_alone() -> None:
    """A width of half a head turns the first half only, with the frequencies of a head half as wide."""
    x = torch.randn(5, 1, 1, 8, dtype=torch.float64)
    out = apply_rotary(x, table(5, 4))
    assert torch.equal(out[..., 4:], x[..., 4:])
    torch.testing.assert_close(out[..., :4], turned(x[..., :4], 10000.0, interleaved=False), rtol=1e-12, atol=1e-12)


def test_scores_depend_on_distance_only() -> None:
    """What rotary positions are for."""
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind(0)
    angles = table(40, 16)
    turned_q, turned_k = apply_rotary(q.expand(40, 1, 1, 16), angles), apply_rotary(k.expand(40, 1, 1, 16), angles)
    scores = torch.einsum("ibnd,jbnd->ij", turned_q, turned_k)
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3], rtol=1e-10, atol=1e-10)


def test_positions_of_each_sample() -> None:
    """Packed documents restart their positions, differently in every sample."""
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    rotary = Rotary(4)
    x = torch.randn(5, 2, 3, 4)
    out = apply_rotary(x, rotary.table(positions, length=5))
    for sample in range(2):
        alone = apply_rotary(x[:, sample : sample + 1], rotary.table(positions[sample], length=5))
        assert torch.equal(out[:, sample : sample + 1], alone)


def test_linear_interpolation_divides_positions() -> None:
    """--rotary-seq-len-interpolation-factor 4: position 8 looks like position 2."""
    plain, stretched = table(3, 8), table(9, 8, scaling=Linear(factor=4.0))
    torch.testing.assert_close(stretched.cos[8], plain.cos[2], rtol=1e-12, atol=1e-12)


def test_llama3_scaling_of_every_frequency() -> None:
    """Fast pairs keep their speed, slow ones are divided by the factor, those between are blended, without a step."""
    plain = Scaling().frequencies(128, 500000.0, length=1)
    llama3 = Llama3(factor=8.0, low=1.0, high=4.0, original_length=8192)
    scaled = llama3.frequencies(128, 500000.0, length=1)
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192 / 1:
            assert after == pytest.approx(before / 8, rel=1e-12)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before, rel=1e-12)


def test_far_positions_keep_their_precision() -> None:
    """At position 10^6 an angle computed in fp32 is off by 6 %; ours stays right to the last bit of the table."""
    far = Rotary(2).table(torch.tensor([1_000_003]), length=1_000_004)
    assert far.cos.item() == pytest.approx(math.cos(1_000_003), abs=1e-7)


def test_bf16_is_turned_in_fp32() -> None:
    """Only the result is rounded; an 8-bit cosine would be off by up to 0.4 %."""
    x = torch.randn(64, 1, 2, 16).to(torch.bfloat16)
    angles = Rotary(16).table(torch.arange(64), length=64)
    out = apply_rotary(x, angles)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rotary(x.float(), angles).to(torch.bfloat16))


def test_far_positions_turn_by_their_angle_in_narrow_types() -> None:
    """Frequencies rounded to 16 bits turn position 4,000 by another angle: texts longer than a few words lose order."""
    rotary, far = Rotary(64), torch.tensor([4000])
    exact, narrow = (rotary.table(far, length=4096, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    assert torch.equal(narrow.cos, exact.cos.to(torch.bfloat16))
    assert torch.equal(narrow.sin, exact.sin.to(torch.bfloat16))
