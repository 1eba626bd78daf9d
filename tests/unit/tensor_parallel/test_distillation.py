"""The distilled vocabulary loss against plain torch: values, gradients, temperature, stored tops and their rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import VocabularyPart, linear_cross_entropy
from megatron.core.tensor_parallel.distillation import (
    Head,
    Mix,
    Target,
    TopOfDistribution,
    distilled_cross_entropy,
    top_of_distribution,
)

ROWS, WIDTH, VOCAB, PADDED = 37, 8, 50, 64
ONE_RANK: dict[str, Any] = {"vocabulary": VocabularyPart(mesh=Mesh.single(), start=0, valid=VOCAB)}
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and a shorter last one, whatever the size of the test."""
    monkeypatch.setattr(cross_entropy, "_CPU_CHUNK", VOCAB * 80)


def student() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """hidden, weight and bias, then labels and loss weights, some of which are zero."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True) for rows in (ROWS, PADDED))
    bias = torch.randn(PADDED, dtype=torch.float64, requires_grad=True)
    return (hidden, weight, bias), torch.randint(VOCAB, (ROWS,)), torch.rand(ROWS) * (torch.rand(ROWS) > 0.3)


def teacher() -> Head:
    """A teacher of another width, with a soft cap."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 12, dtype=torch.float64, generator=generator) for size in (ROWS, PADDED))
    return Head(hidden=hidden, weight=weight, cap=3.0)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, cap: float | None) -> Tensor:
    """All logits at once, padding cut off."""
    found = functional.linear(hidden, weight[:VOCAB], None if bias is None else bias[:VOCAB])
    return found if cap is None else cap * torch.tanh(found / cap)


def check(mix: Mix, target: Target, expected_divergence: Any, *, cap: float | None = None) -> None:
    """Compare sums and gradients with those of ``expected_divergence`` [rows] of all logits."""
    inputs, labels, weights = student()
    logits = logits_of(*inputs, cap)
    hard = (functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    soft = (expected_divergence(logits) * weights).sum()
    expected = mix.cross_entropy * hard + mix.divergence * soft
    sums = distilled_cross_entropy(
        inputs[0], inputs[1], labels, weights, target, mix=mix, bias=inputs[2], cap=cap, **ONE_RANK
    )
    for mine, theirs in ((sums.cross_entropy, hard), (sums.divergence, soft), (sums.total, expected)):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    trained = expected + mix.z_loss * (logits.logsumexp(1) ** 2 * weights).sum()
    found = torch.autograd.grad(sums.total * 3.0, inputs)
    for mine, theirs in zip(found, torch.autograd.grad(trained * 3.0, inputs)):
        torch.testing.assert_close(mine, theirs, **CLOSE)


MIXES = (
    Mix(cross_entropy=0.0, divergence=1.0),
    Mix(cross_entropy=0.3, divergence=0.7, z_loss=0.1),
    Mix(cross_entropy=0.4, divergence=2.4, temperature=2.0, z_loss=0.1),
    Mix(cross_entropy=0.0, divergence=0.2, temperature=0.5),
)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("mix", MIXES)
def test_divergence_from_a_teacher_equals_plain_torch(mix: Mix, cap: float | None) -> None:
    """KL(teacher ‖ student) at a temperature, mixed with the cross entropy at temperature 1, with every gradient."""
    head = teacher()
    theirs = logits_of(head.hidden, head.weight, None, head.cap)

    def expected(logits: Tensor) -> Tensor:
        of_student, of_teacher = ((each / mix.temperature).log_softmax(1) for each in (logits, theirs))
        return functional.kl_div(of_student, of_teacher, reduction="none", log_target=True).sum(1)

    check(mix, head, expected, cap=cap)


@pytest.mark.parametrize("count", [1, 7, VOCAB])
@pytest.mark.parametrize("mix", MIXES)
def test_divergence_from_the_top_of_a_distribution(mix: Mix, count: int) -> None:
    """The k likeliest ids and one bucket for all others; with k = V that is the divergence from the teacher."""
    head = teacher()
    theirs = (logits_of(head.hidden, head.weight, None, head.cap) / mix.temperature).log_softmax(1)
    top = top_of_distribution(head, count, temperature=mix.temperature, **ONE_RANK)
    torch.testing.assert_close(top.log_probs, theirs.topk(count).values, **CLOSE)

    def buckets(logs: Tensor) -> Tensor:
        kept = torch.zeros_like(logs, dtype=torch.bool).scatter_(1, top.ids, True)
        rest = (logs.exp() * ~kept).sum(1, keepdim=True)
        return torch.cat((logs.gather(1, top.ids).exp(), rest), dim=1)

    def expected(logits: Tensor) -> Tensor:
        ours, goal = buckets((logits / mix.temperature).log_softmax(1)), buckets(theirs)
        shares = torch.where(goal > 0, goal * (goal.clamp(min=1e-300).log() - ours.clamp(min=1e-300).log()), 0.0)
        return shares.sum(1)

    check(mix, top, expected)
    if count == VOCAB:
        inputs, labels, weights = student()
        given = (inputs[0], inputs[1], labels, weights)
        whole = distilled_cross_entropy(*given, head, mix=mix, bias=inputs[2], **ONE_RANK)
        stored = distilled_cross_entropy(*given, top, mix=mix, bias=inputs[2], **ONE_RANK)
        torch.testing.assert_close(stored.total, whole.total, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_teacher_equal_to_its_student_teaches_exactly_nothing(dtype: torch.dtype, temperature: float) -> None:
    """Zero loss and zero gradient, not rounding noise, whatever the type."""
    inputs, labels, weights = student()
    hidden, weight = (each.detach().to(dtype).requires_grad_() for each in inputs[:2])
    head = Head(hidden=hidden.detach(), weight=weight.detach())
    mix = Mix(cross_entropy=0.0, divergence=temperature**2, temperature=temperature)
    sums = distilled_cross_entropy(hidden, weight, labels, weights, head, mix=mix, **ONE_RANK)
    assert sums.total.item() == 0.0 and sums.divergence.item() == 0.0
    assert all((grad == 0).all() for grad in torch.autograd.grad(sums.total, (hidden, weight)))


def test_no_share_of_the_teacher_is_the_plain_loss() -> None:
    """With a factor of 0 the teacher only reports."""
    inputs, labels, weights = student()
    mix = Mix(cross_entropy=1.0, divergence=0.0)
    sums = distilled_cross_entropy(
        inputs[0], inputs[1], labels, weights, teacher(), mix=mix, bias=inputs[2], **ONE_RANK
    )
    alone = linear_cross_entropy(inputs[0], inputs[1], labels, weights, bias=inputs[2], **ONE_RANK)
    torch.testing.assert_close(sums.total, alone, **CLOSE)
    for mine, theirs in zip(torch.autograd.grad(sums.total, inputs), torch.autograd.grad(alone, inputs)):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_stored_probabilities_that_were_rounded_still_add_up() -> None:
    """In fp16 they add up to a little more or less than 1, which would pull every logit up or down."""
    inputs, labels, weights = student()
    exact = top_of_distribution(teacher(), 5, **ONE_RANK)
    rounded = TopOfDistribution(ids=exact.ids.int(), log_probs=exact.log_probs.half(), rest=exact.rest.half())
    mix = Mix(cross_entropy=0.0, divergence=1.0)
    found = [
        distilled_cross_entropy(inputs[0], inputs[1], labels, weights, top, mix=mix, **ONE_RANK)
        for top in (exact, rounded)
    ]
    torch.testing.assert_close(found[1].total, found[0].total, rtol=1e-3, atol=1e-3)
    (by_bias,) = torch.autograd.grad(
        distilled_cross_entropy(
            inputs[0], inputs[1], labels, weights, rounded, mix=mix, bias=inputs[2], **ONE_RANK
        ).total,
        inputs[2],
    )
    assert by_bias.sum().abs() < 1e-12  # gradients of a row's logits cancel
