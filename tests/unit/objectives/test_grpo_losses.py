"""GRPO's losses, their slopes and advantages are those of trl and of the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.grpo import GRPOConfig
from megatron.core.objectives.grpo_losses import GeneratedTokens, advantages, deviations, loss_weights

RECORDED = json.loads((Path(__file__).parent / "trl_grpo.json").read_text())
"""What trl's trainer computed of four answers, whose log-probabilities and advantages are in the file."""


def flat(name: str) -> Tensor:
    """Log-probabilities of all answers, one after the other."""
    return torch.tensor([each for row in RECORDED[name] for each in row], dtype=torch.float64)


@pytest.mark.parametrize("case", RECORDED["losses"])
def test_losses_and_slopes_are_those_of_trl(case: str) -> None:
    """Another loss than the one that is named would train, and nobody would see it."""
    kind, lower, upper, beta, when, *_ = case.replace("at once", "at-once").split()
    named: Any = {"grpo_loss_type": kind, "grpo_max_new_tokens": RECORDED["max_new_tokens"]}
    settings = GRPOConfig(
        **named,
        grpo_clamp_eps_lower=float(lower),
        grpo_clamp_eps_upper=float(upper),
        grpo_kl_beta=float(beta),
    )
    lengths, expected = RECORDED["lengths"], RECORDED["losses"][case]
    steps = int(case.split()[-1])
    total = sum(lengths) + RECORDED["tokens_of_another_step"] * (steps - 1)
    weights = [loss_weights(settings, each, mean_length=total / (steps * len(lengths))) for each in lengths]
    counts = torch.tensor(lengths)
    shares = torch.tensor([share for share, _ in weights], dtype=torch.float64).repeat_interleave(counts)
    leaf = flat("log_probs").requires_grad_()
    tokens = GeneratedTokens(
        log_probs=leaf,
        old=flat("old") if when == "later" else leaf.detach(),
        reference=flat("reference") if settings.has_reference else None,
        advantages=torch.tensor(RECORDED["advantages"], dtype=torch.float64).repeat_interleave(counts),
    )
    loss = (tokens.losses(settings) * shares).sum() / sum(count for _, count in weights)
    (slopes,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(expected["loss"], abs=1e-6)
    assert slopes.tolist() == pytest.approx([each for row in expected["slopes"] for each in row], abs=1e-6)
    below, above = (each.double().mean().item() for each in tokens.clipped(settings))
    assert [below, above, below + above] == pytest.approx(expected["clip_ratio"], abs=1e-6)
    if settings.has_reference:
        assert tokens.divergences.mean().item() == pytest.approx(expected["kl"], abs=1e-6)


def test_advantages_are_within_the_group() -> None:
    """A hard prompt's only right answer must gain as much as an easy prompt's only wrong one loses."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
    found = advantages(rewards, scale="group")
    assert found[0].tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])
    assert torch.equal(found[1], -found[0])
    assert found[2].tolist() == [0.0] * 4
    assert advantages(rewards, scale="none")[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    spread = rewards.std().item()
    assert advantages(rewards, scale="batch")[0, 0].item() == pytest.approx(0.75 / (spread + 1e-4))


def test_an_answer_without_a_reward_counts_nowhere() -> None:
    """NaN would spread through the mean to all answers of the group."""
    rewards = torch.tensor([[1.0, 0.0, float("nan")]], dtype=torch.float64)
    assert deviations(rewards).item() == pytest.approx(0.5**0.5)
    assert advantages(rewards, scale="none").tolist() == [[0.5, -0.5, 0.0]]
    assert advantages(torch.full((1, 2), float("nan")), scale="group").tolist() == [[0.0, 0.0]]
