"""The gated norm of groups of channels against its formula."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops.gated_norm import gated_norm


def composed(x: Tensor, gate: Tensor, weight: Tensor, groups: int, norm_before_gate: bool) -> Tensor:
    """The formula, left to autograd."""
    value = x if norm_before_gate else x * functional.silu(gate)
    parts = value.chunk(groups, dim=-1)
    normalized = torch.cat([part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in parts], dim=-1)
    return normalized * weight * (functional.silu(gate) if norm_before_gate else 1.0)


def make(*, rows: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, rows, 12), (2, rows, 12), (12,))
    x, gate, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x.requires_grad_(), gate.requires_grad_(), weight.requires_grad_()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_norm_is_the_formula(groups: int, norm_before_gate: bool) -> None:
    """Values and gradients; a norm over all channels instead of each group would be a different model."""
    given = make()
    found = gated_norm(*given, eps=1e-5, groups=groups, norm_before_gate=norm_before_gate)
    wanted = composed(*given, groups, norm_before_gate)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(found.shape, dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad(out, given, upstream) for out in (found, wanted)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_ranks_share_a_group(norm_before_gate: bool) -> None:
    """Two ranks with half of a group each agree with one rank that has it whole, forward and backward."""
    given = make()
    upstream = torch.randn(given[0].shape, dtype=torch.float64)
    whole = gated_norm(*given, eps=1e-5, norm_before_gate=norm_before_gate)
    wanted = (whole, *torch.autograd.grad(whole, given, upstream))
    barrier, means = threading.Barrier(2, timeout=60), dict[int, Tensor]()

    def rank(number: int) -> list[Tensor]:
        def average(mean: Tensor) -> Tensor:
            means[number] = mean
            barrier.wait()
            both = (means[0] + means[1]) / 2
            barrier.wait()
            return both

        parts = [each.chunk(2, dim=-1)[number].detach().requires_grad_() for each in given]
        out = gated_norm(*parts, eps=1e-5, norm_before_gate=norm_before_gate, average=average)
        return [out, *torch.autograd.grad(out, parts, upstream.chunk(2, dim=-1)[number])]

    with ThreadPoolExecutor(2) as ranks:
        halves = list(ranks.map(rank, (0, 1)))
    for *found, other in zip(*halves, wanted, strict=True):
        torch.testing.assert_close(torch.cat(found, dim=-1), other, rtol=1e-11, atol=1e-11)


def test_bf16_is_computed_in_fp32() -> None:
    """Only the stored result may be rounded, and sums over rows are wide."""
    given = [each.detach().bfloat16().requires_grad_() for each in make(rows=1000)]
    wide = [each.detach().double().requires_grad_() for each in given]
    upstream = torch.randn(given[0].shape).bfloat16()
    narrow_out, wide_out = (gated_norm(*each, eps=1e-5, groups=3) for each in (given, wide))
    torch.testing.assert_close(narrow_out.double(), wide_out, rtol=4e-3, atol=1e-6)
    found = torch.autograd.grad(narrow_out, given, upstream)
    wanted = torch.autograd.grad(wide_out, wide, upstream.double())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() <= 4e-3 * other.norm()
