"""Formulas of GRPO: advantages of answers within their groups, and the loss of each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.grpo import GRPOConfig

_LEAST_DEVIATION = 1e-4  # added to standard deviations, as in trl and Megatron-LM


def advantages(rewards: Tensor, *, scale: str) -> Tensor:
    """How much better each answer is than others to its prompt, ``[prompts, answers]``, from ``rewards`` of that shape.

    ``scale``: of ``--grpo-scale-rewards``. NaN stands for an answer without a reward, which counts nowhere and has an
    advantage of 0.
    """
    found = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale == "group":
        found = found / (deviations(rewards)[:, None] + _LEAST_DEVIATION)
    elif scale == "batch":
        found = found / (deviations(rewards.reshape(1, -1)) + _LEAST_DEVIATION)
    return found.nan_to_num(0.0)


def deviations(rewards: Tensor) -> Tensor:
    """Standard deviation of each row of ``rewards`` [rows, n], by n - 1, without NaN: ``[rows]``."""
    counted = ~rewards.isnan()
    spread = (rewards - rewards.nanmean(dim=1, keepdim=True)).nan_to_num(0.0).square().sum(dim=1)
    return (spread / (counted.sum(dim=1) - 1).clamp(min=1)).sqrt()


def loss_weights(settings: GRPOConfig, length: int, *, mean_length: float) -> tuple[float, float]:
    """What the loss of each token of an answer is multiplied by, and what the answer adds to the number by which the
    sum of a step is divided. ``length``: its tokens, ``mean_length``: of all answers made at a time.
    """
    return {
        "grpo": (1.0 / length, 1.0),
        "dr_grpo": (1.0, float(settings.grpo_max_new_tokens)),
        "bnpo": (1.0, float(length)),
        "dapo": (1.0, mean_length),
    }[settings.grpo_loss_type]


@dataclass(frozen=True)
class GeneratedTokens:
    """Tokens of answers, ``[n]`` each: log-probabilities now, when they were generated and of the initial model (None:
    it isn't compared with), and the advantage of each one's answer.
    """

    log_probs: Tensor
    old: Tensor
    reference: Tensor | None
    advantages: Tensor

    @property
    def ratios(self) -> Tensor:
        """Probabilities now over those when the tokens were generated."""
        return (self.log_probs - self.old).exp()

    @property
    def divergences(self) -> Tensor:
        """Estimate of the divergence from the initial model, never negative: r - 1 - log r of the ratio r of its
        probability to the model's; zeros without one.
        """
        if self.reference is None:
            return torch.zeros_like(self.log_probs)
        difference = self.reference - self.log_probs
        return difference.exp() - difference - 1

    def weighted_divergences(self, settings: GRPOConfig) -> Tensor:
        """The divergences as the loss has them: with their gradient unbiased they are multiplied by the ratios
        (DeepSeek-V3.2, arXiv:2512.02556).
        """
        return self.divergences * self.ratios if settings.grpo_use_bias_correction_kl else self.divergences

    def clipped(self, settings: GRPOConfig) -> tuple[Tensor, Tensor]:
        """Which tokens have no gradient as their ratio has left the range: those below it, and those above."""
        ratios = self.ratios
        below = (ratios < 1 - settings.grpo_clamp_eps_lower) & (self.advantages < 0)
        above = (ratios > 1 + settings.grpo_clamp_eps_upper) & (self.advantages > 0)
        return below, above

    def losses(self, settings: GRPOConfig) -> Tensor:
        """The loss of each token, ``[n]``."""
        ratios = self.ratios
        clamped = ratios.clamp(1 - settings.grpo_clamp_eps_lower, 1 + settings.grpo_clamp_eps_upper)
        found = -torch.minimum(ratios * self.advantages, clamped * self.advantages)
        if self.reference is not None:
            found = found + settings.grpo_kl_beta * self.weighted_divergences(settings)
        if settings.grpo_entropy_term_weight:
            found = found + settings.grpo_entropy_term_weight * self.log_probs.exp() * self.log_probs
        return found
