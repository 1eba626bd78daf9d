"""The vocabulary loss split over ranks: the same numbers as on one, padding or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import (
    VocabularyPart,
    linear_cross_entropy,
    vocab_parallel_argmax,
    vocab_parallel_token_losses,
)
from tests.harness.ranks import run_ranks

ROWS, WIDTH = 23, 6


@dataclass(frozen=True)
class Outcome:
    """What a rank (or one rank alone) computed; gradients of its own part of the weight and bias."""

    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor
    grad_bias: Tensor
    losses: Tensor
    argmax: Tensor


@mock.patch.object(cross_entropy, "_CPU_CHUNK", 64)  # several chunks
def compute(mesh: Mesh, vocab: int, padded: int) -> Outcome:
    """The same problem on every rank, each with its part of the vocabulary."""
    generator = torch.Generator().manual_seed(5)
    draw: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    hidden = torch.randn(ROWS, WIDTH, **draw).requires_grad_()
    labels = torch.randint(vocab, (ROWS,), generator=generator)
    loss_weights = torch.rand(ROWS, generator=generator)
    whole_weight, whole_bias = torch.zeros(padded, WIDTH, dtype=torch.float64), torch.zeros(padded, dtype=torch.float64)
    whole_weight[:vocab] = torch.randn(vocab, WIDTH, **draw)
    whole_bias[:vocab] = torch.randn(vocab, **draw)
    size = padded // mesh.size("tp")
    start = size * mesh.rank("tp")
    weight = whole_weight[start : start + size].clone().requires_grad_()
    bias = whole_bias[start : start + size].clone().requires_grad_()
    part = VocabularyPart(mesh=mesh, start=start, valid=max(0, min(size, vocab - start)))
    at: dict[str, Any] = {"vocabulary": part, "cap": 1.5 if vocab % 2 else None}
    loss = linear_cross_entropy(hidden, weight, labels, loss_weights, bias=bias, **at)
    grad_hidden, grad_weight, grad_bias = torch.autograd.grad(loss, (hidden, weight, bias))
    losses = vocab_parallel_token_losses(hidden, weight, labels, bias=bias, **at)
    argmax = vocab_parallel_argmax(hidden, weight, bias=bias, **at)
    return Outcome(loss.detach(), grad_hidden, grad_weight, grad_bias, losses, argmax)


def compute_on_rank(context: ParallelContext, vocab: int, padded: int) -> Outcome:
    """One rank's outcome."""
    return compute(context.mesh, vocab, padded)


GPT2 = 50257  # prime

CASES = [(2, 64, 64), (4, 50, 64), (4, 17, 64), (3, 50, 51), (2, GPT2, 50432), (3, GPT2, 50304), (4, GPT2, 50688)]


@pytest.mark.parametrize(("tp", "vocab", "padded"), CASES)
def test_split_vocabulary_equals_whole(tp: int, vocab: int, padded: int) -> None:
    """Also where padding ends inside a rank's part, and where whole ranks hold nothing but padding (17 of 64).

    GPT-2's vocabulary divides by nothing: padded with other numbers of words at TP 2, 3 and 4, it has the same loss.
    Odd vocabularies have a soft cap.
    """
    whole = compute(Mesh.single(), vocab, padded)
    ranks = run_ranks(compute_on_rank, vocab, padded, tp=tp)

    def assert_same(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    for rank in ranks:
        assert_same(rank.loss, whole.loss)
        assert_same(rank.losses, whole.losses)
        assert torch.equal(rank.argmax, whole.argmax)
    assert_same(torch.stack([rank.grad_hidden for rank in ranks]).sum(0), whole.grad_hidden)
    assert_same(torch.cat([rank.grad_weight for rank in ranks]), whole.grad_weight)
    assert_same(torch.cat([rank.grad_bias for rank in ranks]), whole.grad_bias)
