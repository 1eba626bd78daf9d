"""Rows of padding in a layer of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.unit.moe.test_experts import hidden_states, inputs, layer, model_config, moe_config

BALANCING: dict[str, Any] = {"moe_aux_loss_coeff": (0.1,), "moe_z_loss_coeff": 0.1}


def test_rows_of_padding_go_to_no_expert() -> None:
    """They have zeros and no gradient, and other rows what they have alone."""
    built, plain = (layer(model_config(), moe_config(**BALANCING)) for _ in range(2))
    x, text = hidden_states(), torch.arange(12) % 3 > 0
    given = dataclasses.replace(inputs(), text_mask=text)
    out = built(x, given)
    torch.autograd.backward(out, torch.ones_like(out))
    assert x.grad is not None
    rows, gradients = out.flatten(0, 1), x.grad.flatten(0, 1)
    assert not rows[~text].any()
    assert not gradients[~text].any()
    alone = x.detach().flatten(0, 1)[text].unsqueeze(1).requires_grad_()
    given_alone = inputs()
    expected = plain(alone, given_alone)
    torch.autograd.backward(expected, torch.ones_like(expected))
    assert alone.grad is not None
    assert torch.allclose(rows[text], expected.flatten(0, 1), atol=1e-14)
    assert torch.allclose(gradients[text], alone.grad.flatten(0, 1), atol=1e-14)
    (losses, layer_metrics), (wanted, counts) = given.side_losses.take(), given_alone.side_losses.take()
    assert layer_metrics["experts of layer 0"].tolist() == counts["experts of layer 0"].tolist()
    for name, pair in wanted.items():
        assert torch.allclose(losses[name], pair, atol=1e-14)


@pytest.mark.parametrize("more", [{}, {"moe_expert_capacity_factor": 1.0}], ids=str)
def test_nothing_but_padding(more: dict[str, Any]) -> None:
    """A microbatch that only fills a batch has no choices; losses over no tokens were NaN."""
    built, x = layer(model_config(), moe_config(**BALANCING, **more)), hidden_states()
    given = dataclasses.replace(inputs(), text_mask=torch.zeros(12, dtype=torch.bool))
    out = built(x, given)
    torch.autograd.backward(out, torch.ones_like(out))
    losses, layer_metrics = given.side_losses.take()
    found = [out, x.grad, *losses.values(), *layer_metrics.values(), *(each.grad for each in built.parameters())]
    assert not any(each is not None and each.any() for each in found)
