"""Dropout: its distribution, its replay, its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.ops.dropout import dropout


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_keeps_the_expected_share_and_the_mean() -> None:
    """p is the share dropped, and the survivors make up for it."""
    out = dropout(torch.ones(400_001), 0.1, seeded())
    assert sorted(set(out.tolist())) == pytest.approx([0.0, 1 / 0.9], rel=1e-4)
    for part in (out, out[0::4], out[1::4], out[2::4], out[3::4]):  # four elements share one random word
        assert (part == 0).double().mean().item() == pytest.approx(0.1, abs=0.004)
    neighbours = (out[1:] == 0) & (out[:-1] == 0)
    assert neighbours.double().mean().item() == pytest.approx(0.01, abs=0.001)


def test_same_seed_replays_the_mask_and_leaves_global_state_alone() -> None:
    """Recomputation and resume run a layer again and must drop the same elements, whatever ran in between."""
    x = torch.randn(1000)
    state = torch.get_rng_state()
    first = dropout(x, 0.5, seeded(7))
    torch.rand(3, generator=seeded())
    assert torch.equal(first, dropout(x, 0.5, seeded(7)))
    assert not torch.equal(first, dropout(x, 0.5, seeded(8)))
    assert torch.equal(state, torch.get_rng_state())


def test_gradient_uses_the_mask_of_the_forward_pass() -> None:
    """Dropping other elements backward than forward would be silent noise."""
    x = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: dropout(a, 0.3, seeded(3)), (x,))


def test_zero_probability_is_the_identity_and_draws_nothing() -> None:
    """p = 0 must cost nothing."""
    x, generator = torch.randn(5), seeded()
    state = generator.get_state()
    assert dropout(x, 0.0, generator) is x
    assert torch.equal(state, generator.get_state())


def test_tiny_probability_drops_next_to_nothing() -> None:
    """The threshold must not overflow into keeping nothing."""
    assert (dropout(torch.ones(10_000), 1e-7, seeded()) != 0).double().mean().item() > 0.999


def test_probability_one_gives_zeros() -> None:
    """Allowed by the flag's range, so it must not divide by zero."""
    x = torch.randn(5, requires_grad=True)
    out = dropout(x, 1.0, seeded())
    torch.autograd.backward(out.sum())
    assert out.tolist() == [0.0] * 5
    assert x.grad is not None and x.grad.tolist() == [0.0] * 5


def test_keeps_one_byte_per_element() -> None:
    """A mask in the type of the activations would cost four times as much."""
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    x = torch.randn(100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        dropout(x, 0.1, seeded())
    assert sum(kept) == 100
