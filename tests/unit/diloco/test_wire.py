"""Formats of differences between workers: their values, their bytes, and what they do to numbers at the ends."""

from __future__ import annotations

import pytest
import torch

from megatron.config.diloco import WireType
from megatron.core.diloco.wire import WIRES


def test_fp4_has_powers_of_two_and_rounds_to_the_nearest() -> None:
    """Codes of two numbers in a byte were exchanged, or a sign was lost: workers took steps in other directions."""
    levels = torch.tensor([64.0, 32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 0.0, -1.0, -2.0, -64.0, 0.4, 1.4, 2.9, 3.1, -50.0])
    expected = levels.clone()
    expected[11:] = torch.tensor([0.0, 1.0, 2.0, 4.0, -64.0])
    row = torch.cat((levels, torch.zeros(240), 1e-6 * levels, torch.zeros(240))).view(1, 512)
    codes = WIRES["fp4"].encode(row)
    assert codes.dtype == torch.uint8
    assert codes.shape == (1, 256 + 8), "half a byte for each number, and a scale for each 256"
    found = WIRES["fp4"].decode(codes, torch.float32)[0]
    torch.testing.assert_close(found[:16], expected, rtol=0, atol=0)
    torch.testing.assert_close(found[256:272], 1e-6 * expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "relative"), [("fp32", 0.0), ("bf16", 2.0**-8), ("int8", 0.5 / 127), ("fp4", 1 / 3)])
def test_errors_are_within_the_format(name: WireType, relative: float) -> None:
    """A block's scale was taken from another one, and its numbers came out too small."""
    torch.manual_seed(0)
    rows = torch.randn(3, 512) * torch.logspace(-8, 3, 512)
    wire = WIRES[name]
    found = wire.decode(wire.encode(rows), torch.float32)
    largest = rows.abs().view(3, -1, wire.block).amax(-1).repeat_interleave(wire.block, dim=1)
    of_small = {"fp4": largest / 128}.get(name, torch.zeros(()))
    bound = relative * (largest if name == "int8" else rows.abs()) * 1.0001 + of_small
    assert bool(((found - rows).abs() <= bound).all())


@pytest.mark.parametrize("name", ["int8", "fp4"])
def test_zeros_stay_and_a_nan_is_not_hidden(name: WireType) -> None:
    """A block without any difference became NaN, or a worker's NaN a harmless number."""
    rows = torch.zeros(1, 512)
    rows[0, 300] = float("nan")
    found = WIRES[name].decode(WIRES[name].encode(rows), torch.float32)[0]
    assert torch.equal(found[:256], torch.zeros(256))
    assert bool(found[256:].isnan().any())
