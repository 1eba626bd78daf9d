"""Sinkhorn routing against loops over tokens and experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.moe.sinkhorn import expert_scales, sinkhorn_scores
from megatron.core.parallel.context import ParallelContext
from tests.unit.moe.test_experts import EXPERTS, hidden_states, inputs, layer, model_config, moe_config

ALONE = ParallelContext.single()
SINKHORN: dict[str, Any] = {"moe_router_load_balancing_type": ("sinkhorn",)}


def scores_by_hand(logits: list[list[float]]) -> list[list[float]]:
    """Rows and columns of exp(logits), scaled in turn until the scales of the experts change by 1e-4 at most."""
    wanted = [[math.exp(each) for each in row] for row in logits]
    tokens, experts = len(wanted), len(wanted[0])
    columns, change = [1.0] * experts, math.inf
    while change > 1e-4:
        rows = [1 / (tokens * (sum(a * b for a, b in zip(row, columns)) + 1e-8)) for row in wanted]
        sums = [sum(rows[token] * wanted[token][expert] for token in range(tokens)) for expert in range(experts)]
        before, columns = columns, [1 / (experts * (each + 1e-8)) for each in sums]
        change = sum(abs(a - b) for a, b in zip(before, columns)) / experts
    return [[scale * a * b for a, b in zip(row, columns)] for scale, row in zip(rows, wanted)]


def logits_of(tokens: int, *, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    lopsided = torch.linspace(2, 0, EXPERTS, dtype=torch.float64)
    return scale * (torch.randn(tokens, EXPERTS, dtype=torch.float64, generator=generator) + lopsided)


def test_scores_are_megatron_lms() -> None:
    """Up to a factor of each row, by which no choice changes."""
    logits = logits_of(24)
    expected = torch.tensor(scores_by_hand(logits.tolist()), dtype=torch.float64)
    found = sinkhorn_scores(logits, ALONE, batch=2, text=None)
    assert torch.allclose(found / found.sum(1, keepdim=True), expected / expected.sum(1, keepdim=True), rtol=1e-6)
    assert logits.argmax(1).bincount(minlength=EXPERTS).max() > 2 * found.argmax(1).bincount(minlength=EXPERTS).max()


def test_padding_has_no_part_in_it() -> None:
    """Rows of padding took their share of the experts that they prefer."""
    logits, text = logits_of(30), torch.arange(30) % 3 > 0
    logits[~text] = torch.tensor([50.0] + [0.0] * (EXPERTS - 1), dtype=torch.float64)
    found = sinkhorn_scores(logits, ALONE, batch=2, text=text)
    assert torch.allclose(found[text], sinkhorn_scores(logits[text], ALONE, batch=2, text=None), rtol=1e-12)
    nothing = sinkhorn_scores(logits, ALONE, batch=2, text=torch.zeros_like(text))
    assert nothing.isfinite().all()


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_large_logits_have_finite_scores(scale: float) -> None:
    """exp of a logit of 90 is infinite in fp32, and all experts of such a token would be NaN."""
    found = sinkhorn_scores(logits_of(16, scale=scale).float(), ALONE, batch=2, text=None)
    assert found.isfinite().all()
    assert (found.amax(1) > 0).all()


def test_logits_of_a_broken_run_end() -> None:
    """The loss says that they are not finite; a loop without an end would hide it."""
    assert expert_scales(torch.full((4, EXPERTS), math.nan)).isnan().all()


@pytest.mark.parametrize("chosen", [1, 2])
def test_layer_chooses_by_it_in_training_alone(chosen: int) -> None:
    """Weights are sigmoids of logits, or their softmax over all experts; evaluation chooses by these."""
    moe = moe_config(moe_router_topk=chosen, **SINKHORN).resolved(model_config(), (1,))
    built, x = layer(model_config(), moe), hidden_states(length=32)
    logits = x.flatten(0, 1) @ built.router.weight.t()
    scores = logits.sigmoid() if chosen == 1 else logits.softmax(-1)
    found = built.train().router(x, inputs())
    assert torch.equal(found.ids, sinkhorn_scores(logits, ALONE, batch=2, text=None).topk(chosen).indices)
    assert torch.allclose(found.weights, scores.gather(1, found.ids))
    plain = built.eval().router(x, inputs())
    assert torch.equal(plain.ids, scores.topk(chosen).indices)
    assert not torch.equal(plain.ids, found.ids)
