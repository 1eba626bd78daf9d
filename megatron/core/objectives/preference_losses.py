"""Losses of pairs of answers from their log-probabilities: DPO and its variants, as formulas of a few tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron.config.preference import PreferenceConfig


@dataclass(frozen=True)
class Answers:
    """One side of some pairs, ``[pairs]`` each: the log-probability of an answer as a sum over its tokens, that of the
    initial model, and the number of tokens.
    """

    log_probs: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def ratio(self) -> Tensor:
        """The log of how much likelier the answer is than to the initial model."""
        return self.log_probs - self.reference

    @property
    def mean(self) -> Tensor:
        """The log-probability as a mean over tokens."""
        return self.log_probs / self.tokens.clamp(min=1)


def preference_losses(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """The loss of each pair, ``[pairs]``, without the cross entropy of chosen answers."""
    assert settings.preference_loss is not None
    return _LOSSES[settings.preference_loss](settings, chosen, rejected)


def rated_losses(
    settings: PreferenceConfig, answers: Answers, is_desirable: Tensor, baseline: Tensor | float
) -> Tensor:
    """The loss of each answer that is rated alone, ``[answers]``: KTO (arXiv:2402.01306), or the unpaired APO-zero
    (arXiv:2408.06266) with a ``baseline`` of 0. ``baseline``: what a reward is compared with, before its factor.
    """
    value = (settings.beta * (answers.ratio - baseline)).sigmoid()
    return torch.where(is_desirable, settings.desirable_weight * (1 - value), settings.undesirable_weight * value)


def rewards(settings: PreferenceConfig, answers: Answers) -> Tensor:
    """What the loss takes as the rewards of answers, ``[pairs]``: multiples of log ratios, or of mean log-probabilities
    where there is no initial model to compare with.
    """
    return settings.beta * (answers.ratio if settings.has_reference else answers.mean)


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def _margin(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    return rewards(settings, chosen) - rewards(settings, rejected)


def _dpo(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """DPO (arXiv:2305.18290), with label smoothing conservative DPO."""
    return _smoothed(_margin(settings, chosen, rejected), settings.preference_label_smoothing)


def _ipo(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """IPO (arXiv:2310.12036) of means over tokens, as its authors and trl compute it."""
    each = (answers.ratio / answers.tokens.clamp(min=1) for answers in (chosen, rejected))
    return (next(each) - next(each) - 1 / (2 * settings.beta)) ** 2


def _hinge(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """The hinge loss of SLiC (arXiv:2305.10425)."""
    return (1 - _margin(settings, chosen, rejected)).relu()


def _robust(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """Robust DPO (arXiv:2403.00409): unbiased where a known share of pairs is the wrong way round."""
    margin, share = _margin(settings, chosen, rejected), settings.preference_label_smoothing
    return (-(1 - share) * logsigmoid(margin) + share * logsigmoid(-margin)) / (1 - 2 * share)


def _exo(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """EXO (arXiv:2402.00856): the divergence of the model's choice between both from the labels'."""
    margin, share = _margin(settings, chosen, rejected), settings.preference_label_smoothing
    right, wrong = logsigmoid(margin), logsigmoid(-margin)
    return right.exp() * (right - math.log1p(-share)) + wrong.exp() * (wrong - math.log(share))


def _nca(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """NCA (arXiv:2402.05369)."""
    up, down = rewards(settings, chosen), rewards(settings, rejected)
    return -logsigmoid(up) - 0.5 * logsigmoid(-up) - 0.5 * logsigmoid(-down)


def _sppo(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """SPPO (arXiv:2405.00675) with probabilities of 1 and 0."""
    aim = 0.5 / settings.beta
    return (chosen.ratio - aim) ** 2 + (rejected.ratio + aim) ** 2


def _apo_zero(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """APO-zero (arXiv:2408.06266), for chosen answers that are better than the model's."""
    return 1 - rewards(settings, chosen).sigmoid() + rewards(settings, rejected).sigmoid()


def _apo_down(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """APO-down (arXiv:2408.06266), for chosen answers that are worse than the model's."""
    return rewards(settings, chosen).sigmoid() + 1 - _margin(settings, chosen, rejected).sigmoid()


def _orpo(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """The odds ratio of ORPO (arXiv:2403.07691)."""
    odds = (answers.mean - _log_of_rest(answers.mean) for answers in (chosen, rejected))
    return -settings.beta * logsigmoid(next(odds) - next(odds))


def _log_of_rest(log_prob: Tensor) -> Tensor:
    """log(1 - exp(x)) without cancellation; the argument is at most just below 0."""
    x = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _simpo(settings: PreferenceConfig, chosen: Answers, rejected: Answers) -> Tensor:
    """SimPO (arXiv:2405.14734)."""
    margin = _margin(settings, chosen, rejected) - settings.simpo_gamma
    return _smoothed(margin, settings.preference_label_smoothing)


_LOSSES: dict[str, Callable[[PreferenceConfig, Answers, Answers], Tensor]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "sppo_hard": _sppo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "orpo": _orpo,
    "simpo": _simpo,
}
