"""The chunked vocabulary loss against plain torch: values, gradients, padding, masks, precision and memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.ops import matmul
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import (
    VocabularyPart,
    linear_cross_entropy,
    vocab_parallel_argmax,
    vocab_parallel_token_losses,
)

ROWS, WIDTH, VOCAB, PADDED = 37, 8, 50, 64
ONE_RANK: dict[str, Any] = {"vocabulary": VocabularyPart(mesh=Mesh.single(), start=0, valid=VOCAB)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and a shorter last one, whatever the size of the test."""
    monkeypatch.setattr(cross_entropy, "_CPU_CHUNK", VOCAB * 10)


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, labels, loss weights; some of which are zero."""
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(PADDED, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(PADDED, dtype=dtype, requires_grad=True)
    loss_weights = torch.rand(ROWS) * (torch.rand(ROWS) > 0.3)
    return hidden, weight, bias, torch.randint(VOCAB, (ROWS,)), loss_weights


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss_weights: Tensor) -> Tensor:
    """All logits at once, padding cut off."""
    logits = functional.linear(hidden, weight[:VOCAB], None if bias is None else bias[:VOCAB])
    losses = functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="none"
    )
    return (losses * loss_weights).sum()


@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_and_gradients_equal_plain_torch(with_bias: bool) -> None:
    """Chunking, and gradients made in the forward pass, must change nothing; the incoming gradient multiplies."""
    hidden, weight, bias, labels, loss_weights = problem()
    parameters = [hidden, weight, bias] if with_bias else [hidden, weight]
    used_bias = bias if with_bias else None
    expected = plain(hidden, weight, used_bias, labels, loss_weights)
    actual = linear_cross_entropy(hidden, weight, labels, loss_weights, bias=used_bias, **ONE_RANK)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    expected_grads = torch.autograd.grad(expected * 3.0, parameters)
    for mine, theirs in zip(torch.autograd.grad(actual * 3.0, parameters), expected_grads):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("slow", [False, True])
def test_bf16_gradients_have_their_inputs_type(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where products are computed in fp32; then what is rounded is the whole gradient, once."""
    monkeypatch.setattr(matmul, "_is_slow_in_bf16", lambda: slow)
    types: list[torch.dtype] = []
    whole = cross_entropy._LinearCrossEntropy.forward

    def forward(ctx: Any, *inputs: Any) -> Any:
        loss = whole(ctx, *inputs)
        types.extend(each.dtype for each in ctx.gradients[:2])
        return loss

    monkeypatch.setattr(cross_entropy._LinearCrossEntropy, "forward", staticmethod(forward))
    hidden, weight, _, labels, loss_weights = problem(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, loss_weights, **ONE_RANK)
    found = torch.autograd.grad(loss, [hidden, weight])
    assert types == [torch.bfloat16] * 2  # else an fp32 gradient of the vocabulary's size waits for the backward pass
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    expected = torch.autograd.grad(plain(wide[0], wide[1], None, labels, loss_weights), wide)
    for mine, theirs in zip(found, expected):
        close = 0.01 if slow else 0.1  # logits and their gradients are rounded only in the other way
        torch.testing.assert_close(mine.double(), theirs, rtol=0.0, atol=close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_z_loss(dtype: torch.dtype) -> None:
    """A z-loss that weighed the softmax by something else, or went around the soft cap, trained logits that nobody
    asked for. The loss itself stays comparable with other runs: it is the cross entropy.
    """
    inputs = problem(dtype)
    wide = [each.detach().double().requires_grad_() for each in inputs[:3]]
    hidden, weight, bias, labels, loss_weights = inputs
    logits = 2.0 * torch.tanh(functional.linear(wide[0], wide[1][:VOCAB], wide[2][:VOCAB]) / 2.0)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    objective = ((losses + 0.3 * logits.logsumexp(1) ** 2) * loss_weights).sum()
    actual = linear_cross_entropy(hidden, weight, labels, loss_weights, bias=bias, cap=2.0, z_loss=0.3, **ONE_RANK)
    close: dict[str, Any] = {"rtol": 0, "atol": {8: 1e-12, 4: 1e-5, 2: 0.2}[dtype.itemsize], "check_dtype": False}
    torch.testing.assert_close(actual, (losses * loss_weights).sum(), **close)
    for mine, theirs in zip(torch.autograd.grad(actual, inputs[:3]), torch.autograd.grad(objective, wide)):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_capped_logits(dtype: torch.dtype) -> None:
    """Losses, argmax and every gradient are those of cap·tanh(logits / cap), which padding doesn't get."""
    inputs = problem(dtype)
    wide = [each.detach().double().requires_grad_() for each in inputs[:3]]
    hidden, weight, bias, labels, loss_weights = inputs
    logits = 2.0 * torch.tanh(functional.linear(wide[0], wide[1][:VOCAB], wide[2][:VOCAB]) / 2.0)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    expected = (losses * loss_weights).sum()
    actual = linear_cross_entropy(hidden, weight, labels, loss_weights, bias=bias, cap=2.0, **ONE_RANK)
    close: dict[str, Any] = {"rtol": 0, "atol": {8: 1e-12, 4: 1e-5, 2: 0.15}[dtype.itemsize], "check_dtype": False}
    torch.testing.assert_close(actual, expected, **close)
    for mine, theirs in zip(torch.autograd.grad(actual, inputs[:3]), torch.autograd.grad(expected, wide)):
        torch.testing.assert_close(mine, theirs, **close)
    found = vocab_parallel_token_losses(hidden, weight, labels, bias=bias, cap=2.0, **ONE_RANK)
    torch.testing.assert_close(found, losses, **close)
    if dtype == torch.float64:
        best = vocab_parallel_argmax(hidden, weight, bias=bias, cap=2.0, **ONE_RANK)
        assert torch.equal(best, logits.argmax(dim=1))


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "hidden bias", "weight bias"])
def test_frozen_inputs_get_no_gradient_and_cost_none(trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen matrix cost a third of the loss's time for a gradient nobody wanted, and a bias trained by itself had
    none: the loss saw no reason to make it.
    """
    *inputs, labels, loss_weights = problem()
    chosen = [each.requires_grad_(name in trained) for name, each in zip(("hidden", "weight", "bias"), inputs)]
    needed = [each for each in chosen if each.requires_grad]
    if "weight" not in trained:
        monkeypatch.setattr(cross_entropy, "transposed_times", lambda *_, **__: pytest.fail("a gradient of no use"))
    hidden, weight, bias = chosen
    expected = torch.autograd.grad(plain(hidden, weight, bias, labels, loss_weights), needed)
    loss = linear_cross_entropy(hidden, weight, labels, loss_weights, bias=bias, **ONE_RANK)
    for mine, theirs in zip(torch.autograd.grad(loss, needed), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_padding_gets_no_probability_and_no_gradient() -> None:
    """Otherwise the loss would depend on how far the vocabulary is padded, that is, on the number of ranks."""
    hidden, weight, _, labels, loss_weights = problem()
    with torch.no_grad():
        weight[VOCAB:] = 1e4
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, loss_weights, **ONE_RANK), weight)
    assert (grad[VOCAB:] == 0).all()
    losses = vocab_parallel_token_losses(hidden, weight, labels, **ONE_RANK)
    expected = functional.cross_entropy(hidden @ weight[:VOCAB].t(), labels, reduction="none")
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)


def test_masked_rows_count_nothing_and_a_fully_masked_batch_is_zero() -> None:
    """0, never 0/0: a microbatch without a loss-bearing token must not poison the step."""
    hidden, weight, _, labels, loss_weights = problem()
    loss = linear_cross_entropy(hidden, weight, labels, torch.zeros(ROWS), **ONE_RANK)
    assert loss.item() == 0.0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, (hidden, weight)))
    loss = linear_cross_entropy(hidden, weight, labels, loss_weights, **ONE_RANK)
    (grad,) = torch.autograd.grad(loss, hidden)
    assert (grad[loss_weights == 0] == 0).all() and (grad[loss_weights > 0] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    """Softmax and loss in fp32, whatever the matmuls run in; gradients keep the type of their tensors."""
    hidden, weight, _, labels, loss_weights = problem()
    rounded = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    actual = linear_cross_entropy(rounded[0], rounded[1], labels, loss_weights, **ONE_RANK)
    expected = plain(exact[0], exact[1], None, labels, loss_weights)
    assert actual.dtype == torch.float32
    epsilon = torch.finfo(dtype).eps
    assert actual.item() == pytest.approx(expected.item(), rel=2 * epsilon)
    for mine, theirs in zip(torch.autograd.grad(actual, rounded), torch.autograd.grad(expected, exact)):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() / theirs.norm() < 4 * epsilon


def test_large_logits_do_not_overflow() -> None:
    """exp of a raw logit above 88 is infinite in fp32."""
    hidden, weight = torch.full((1, 1), 1e4), torch.tensor([[1.0], [0.0]])
    losses = vocab_parallel_token_losses(
        hidden, weight, torch.tensor([0]), vocabulary=VocabularyPart(mesh=Mesh.single(), start=0, valid=2)
    )
    assert losses.tolist() == [0.0]


def test_gradient_seed_keeps_small_fp16_gradients() -> None:
    """Probabilities below 6e-8 are zero in fp16; with the loss scale applied in time they survive."""
    hidden = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[18.0], [0.0]], dtype=torch.float16, requires_grad=True)
    at: dict[str, Any] = {"vocabulary": VocabularyPart(mesh=Mesh.single(), start=0, valid=2)}
    arguments = (hidden, weight, torch.tensor([0]), torch.ones(1))
    (plain_grad,) = torch.autograd.grad(linear_cross_entropy(*arguments, **at), weight)
    scaled_loss = linear_cross_entropy(*arguments, **at, backward_scale=1024.0)
    (scaled_grad,) = torch.autograd.grad(scaled_loss, weight, torch.tensor(1024.0))
    assert plain_grad[1].item() == 0.0
    assert scaled_grad[1].item() / 1024 == pytest.approx(1.523e-8, rel=2e-3)
    assert scaled_loss.item() == pytest.approx(linear_cross_entropy(*arguments, **at).item())


def test_gradient_seed_is_an_expectation_and_no_factor() -> None:
    """A backward pass that starts from something else would scale every gradient of the run."""
    hidden, weight, _, labels, loss_weights = problem()
    plain = linear_cross_entropy(hidden, weight, labels, loss_weights, **ONE_RANK)
    seeded = linear_cross_entropy(hidden, weight, labels, loss_weights, **ONE_RANK, backward_scale=8.0)
    for grad, expected in zip(
        torch.autograd.grad(seeded, (hidden, weight)), torch.autograd.grad(plain, (hidden, weight))
    ):
        torch.testing.assert_close(grad, expected)


def test_without_gradient_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation must not pay for two of the three matmuls."""
    hidden, weight, _, labels, loss_weights = problem()
    expected = linear_cross_entropy(hidden, weight, labels, loss_weights, **ONE_RANK)
    names = ("times_transposed", "transposed_times", "softmax_")
    calls = {name: mock.Mock(wraps=getattr(cross_entropy, name)) for name in names}
    for name, call in calls.items():
        monkeypatch.setattr(cross_entropy, name, call)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, loss_weights, **ONE_RANK)
    assert torch.equal(loss, expected) and not loss.requires_grad
    chunks = calls["softmax_"].call_count
    assert chunks > 1 and [calls[name].call_count for name in names[:2]] == [chunks, 0]


def test_chunks_do_not_change_the_loss_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are independent, however they fall into chunks."""
    hidden, weight, bias, labels, _ = problem()
    several = vocab_parallel_token_losses(hidden, weight, labels, bias=bias, **ONE_RANK)
    monkeypatch.setattr(cross_entropy, "_CPU_CHUNK", 1 << 24)
    one = vocab_parallel_token_losses(hidden, weight, labels, bias=bias, **ONE_RANK)
    torch.testing.assert_close(several, one, rtol=1e-12, atol=1e-12)


def test_argmax_is_the_lowest_of_the_largest_real_logits() -> None:
    """Greedy decoding and last-word accuracy: never a padding id, and the same choice at any number of ranks."""
    hidden, weight, bias, _, _ = problem()
    with torch.no_grad():
        weight[VOCAB:] = 100.0
        weight[7] = weight[3]
        bias[7] = bias[3]
    expected = (hidden @ weight[:VOCAB].t() + bias[:VOCAB]).argmax(dim=1)
    actual = vocab_parallel_argmax(hidden, weight, bias=bias, **ONE_RANK)
    assert torch.equal(actual, expected) and not (actual == 7).any()
