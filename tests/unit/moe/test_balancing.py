"""Losses that balance the load of experts, against loops and differences."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.moe.layer import MoELayer
from tests.unit.moe.test_experts import EXPERTS, HIDDEN, NOTHING, hidden_states, inputs, layer, model_config, moe_config


def test_balancing_losses() -> None:
    """Uniform routing has a loss of 1 each; all tokens to one expert, E / k times its share."""
    names = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    moe = moe_config(
        num_experts=4,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type=names,
        moe_aux_loss_coeff=(1.0, 1.0, 1.0),
        moe_z_loss_coeff=1.0,
    )
    built = layer(model_config(), moe)
    x = torch.zeros(4, 2, HIDDEN, dtype=torch.float64)
    for position in range(4):
        x[position, :, position] = 1.0
    for strength in (0.0, 3.0):
        with torch.no_grad():
            built.router.weight.zero_()
            built.router.weight[:, :4] = strength * torch.eye(4, dtype=torch.float64)
        given = inputs()
        built(x, given)
        found = {name: (total / count).item() for name, (total, count) in given.side_losses.take()[0].items()}
        for name in ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss"):
            assert found[name] == pytest.approx(1.0), (name, strength)
        assert found["z_loss"] == pytest.approx(math.log(3 + math.exp(strength)) ** 2)
    with torch.no_grad():
        built.router.weight[:] = 0.0
        built.router.weight[2] = 1.0  # x sums to 1: logits 0, 0, 1, 0
    given = inputs()
    built(x, given)
    total, count = given.side_losses.take()[0]["load_balancing_loss"].tolist()
    assert total / count == pytest.approx(4 * math.e / (math.e + 3))


def test_losses_of_a_layer() -> None:
    """Each by hand, over two passes; the mean of the layers is what is reported for all."""
    names = {"load_balancing_loss": "aux_loss", "seq_load_balancing_loss": "seq_aux_loss"}
    moe = moe_config(
        moe_router_load_balancing_type=(*names.values(),),
        moe_aux_loss_coeff=(0.3, 0.2),
        moe_z_loss_coeff=0.1,
        moe_per_layer_logging=True,
    )
    given, means = inputs(), dict[str, list[float]]()
    for number in (0, 7):
        built = layer(model_config(), moe, number=number)
        with torch.no_grad():
            built.router.weight.mul_(number + 1)
        expected = dict.fromkeys((*names, "z_loss"), 0.0)
        for seed in range(2):
            x = hidden_states(seed=seed)
            built(x, dataclasses.replace(given, kept={}))
            logits = (x.detach() @ built.router.weight.detach().T).transpose(0, 1)  # [b, s, E]
            expected["z_loss"] += logits.logsumexp(-1).square().mean().item() / 2
            for name, groups in (
                ("load_balancing_loss", [logits.flatten(0, 1)]),
                ("seq_load_balancing_loss", [*logits]),
            ):
                for rows in groups:
                    of_expert = [0.0] * EXPERTS
                    for row in rows:
                        for expert in row.sort(descending=True).indices[:2].tolist():
                            of_expert[expert] += 1
                    shares, tokens = rows.softmax(-1).sum(0).tolist(), len(rows)
                    value = EXPERTS / (2 * tokens**2) * sum(p * c for p, c in zip(shares, of_expert))
                    expected[name] += value / len(groups) / 2
        for name, value in expected.items():
            means.setdefault(name, []).append(value)
    losses, layer_metrics = given.side_losses.take()
    for name, (first, last) in means.items():
        for number, value in ((0, first), (7, last)):
            total, count = layer_metrics[f"{name} of layer {number}"].tolist()
            assert total / count == pytest.approx(value, rel=1e-12), (name, number)
        assert abs(first - last) > 1e-3
        assert (losses[name][0] / losses[name][1]).item() == pytest.approx((first + last) / 2, rel=1e-12)


def test_gradients_of_balancing_losses() -> None:
    """Each loss's gradient of the router is that of its value; one at a time, by differences."""
    cases: tuple[dict[str, Any], ...] = (
        {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.7,)},
        {"moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (0.7,)},
        {
            "moe_router_load_balancing_type": ("aux_loss",),
            "moe_aux_loss_coeff": (0.7,),
            "moe_router_score_function": "sigmoid",
        },
        {"moe_z_loss_coeff": 0.7},
    )
    for settings in cases:
        built, x = layer(model_config(), moe_config(**settings)), hidden_states().detach()

        def value(built: MoELayer = built, x: Tensor = x) -> float:
            given = inputs()
            with torch.no_grad():
                built(x, given)
            ((total, _),) = given.side_losses.take()[0].values()
            return 0.7 * float(total)

        out = built(x, inputs())
        torch.autograd.backward(out, torch.zeros_like(out))
        weight, gradient = built.router.weight, built.router.weight.grad
        assert gradient is not None
        for at in ((0, 0), (3, 5), (7, 15)):
            ends = []
            for step in (1e-6, -2e-6):
                with torch.no_grad():
                    weight[at] += step
                ends.append(value())
            with torch.no_grad():
                weight[at] += 1e-6
            assert gradient[at].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-9), settings


def test_balancing_losses_are_about_plain_scores() -> None:
    """Biases and groups change what tokens choose; a loss that counted that would work against its own router."""
    settings: dict[str, Any] = {"moe_router_load_balancing_type": ("seq_aux_loss",), "moe_aux_loss_coeff": (1.0,)}
    found = set()
    for more in (
        NOTHING,
        {"moe_router_enable_expert_bias": True},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
    ):
        moe = moe_config(moe_router_score_function="sigmoid", **settings, **more)
        built, given, x = layer(model_config(), moe), inputs(), hidden_states(length=32)
        if built.router.expert_bias is not None:
            with torch.no_grad():
                built.router.expert_bias.copy_(torch.arange(EXPERTS))  # all tokens choose the last ones
        built(x, given)
        losses, counts = given.side_losses.take()
        found.add((round(losses["seq_load_balancing_loss"][0].item(), 9), str(counts["experts of layer 0"].tolist())))
    assert len({loss for loss, _ in found}) == 1
    assert len({counts for _, counts in found}) == 3
