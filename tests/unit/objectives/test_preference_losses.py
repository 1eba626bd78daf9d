"""Losses of pairs and of rated answers are those of trl, and of the formulas in the papers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.preference import PreferenceConfig
from megatron.core.objectives.preference_losses import Answers, preference_losses, rated_losses, rewards

RECORDED = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
"""What trl's trainers computed of four pairs, whose sums and lengths are in the file."""
RATED = json.loads((Path(__file__).parent / "trl_kto.json").read_text())
"""What its trainer computed of six rated answers (tests/golden/regenerate_trl.py)."""


def answers(side: str) -> Answers:
    """One side of the recorded pairs."""
    numbers = (torch.tensor(RECORDED[side][name], dtype=torch.float64) for name in ("log_probs", "reference", "tokens"))
    return Answers(*numbers)


@pytest.mark.parametrize("case", RECORDED["losses"])
def test_losses_are_those_of_trl(case: str) -> None:
    """Another loss than the one that is named would train, and nobody would see it."""
    name, beta, smoothing = case.split()
    found: Any = {"preference_loss": name, "preference_beta": float(beta), "simpo_gamma": RECORDED["simpo_gamma"]}
    settings = PreferenceConfig(**found, preference_label_smoothing=float(smoothing))
    mean = preference_losses(settings, answers("chosen"), answers("rejected")).mean().item()
    assert mean == pytest.approx(RECORDED["losses"][case], abs=1e-6)


@pytest.mark.parametrize("case", RATED["losses"])
def test_losses_of_rated_answers_are_those_of_trl(case: str) -> None:
    """The batch is one whose other answers are likelier than before, and one where they aren't: KTO's baseline is never
    below 0.
    """
    name, beta, good, bad, *_ = case.split()
    named: Any = {"preference_loss": name, "preference_beta": float(beta)}
    settings = PreferenceConfig(**named, desirable_weight=float(good), undesirable_weight=float(bad))
    expected = RATED["losses"][case]
    (trained, other), (initial, other_initial) = (expected[side] for side in ("trained", "initial"))
    found = Answers(torch.tensor(trained).double(), torch.tensor(initial).double(), torch.ones(len(trained)))
    baseline = 0.0
    if settings.has_baseline:
        baseline = max((torch.tensor(other) - torch.tensor(other_initial)).mean().item(), 0.0)
        assert baseline == pytest.approx(expected["kl"], abs=1e-6)
    is_desirable = torch.tensor(RATED["labels"])
    mean = rated_losses(settings, found, is_desirable, baseline).mean().item()
    assert mean == pytest.approx(expected["loss"], abs=1e-6)
    each = rewards(settings, found)
    assert [each[is_desirable].mean().item(), each[~is_desirable].mean().item()] == pytest.approx(expected["rewards"])


def test_conservative_dpo_mixes_both_orders() -> None:
    """With a smoothing of e: (1 - e) times the loss, and e times that of exchanged answers."""
    sides = answers("chosen"), answers("rejected")
    plain = PreferenceConfig(preference_loss="dpo", preference_beta=0.3)
    smooth = PreferenceConfig(preference_loss="dpo", preference_beta=0.3, preference_label_smoothing=0.2)
    expected = 0.8 * preference_losses(plain, *sides) + 0.2 * preference_losses(plain, *sides[::-1])
    torch.testing.assert_close(preference_losses(smooth, *sides), expected)


def test_rewards_without_an_initial_model_are_of_means() -> None:
    """Of ORPO and SimPO, which hold the model to none, rewards would otherwise grow with an answer's length."""
    found = rewards(PreferenceConfig(preference_loss="simpo"), answers("chosen"))
    side = RECORDED["chosen"]
    assert found.tolist() == pytest.approx([2 * a / b for a, b in zip(side["log_probs"], side["tokens"])])
