"""How a flat range of weights moves: AdamW and SGD, by torch's fused kernels, one pass over memory each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Step:
    """What one step is taken with; ``number`` counts from 1. ``grad_scale``, an fp32 scalar, divides the gradients."""

    number: int
    lr: float
    weight_decay: float
    grad_scale: Tensor | None


class UpdateRule(Protocol):
    """Moves weights, given gradients and the tensors it keeps for every weight."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Those tensors, as checkpoints name them; they start as zeros."""
        ...

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place; all tensors are of one dtype and equally long."""
        ...


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101) and bias correction."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    @property
    def state_names(self) -> tuple[str, ...]:
        """Running means of the gradient and of its square."""
        return ("exp_avg", "exp_avg_sq")

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place."""
        exp_avg, exp_avg_sq = state
        steps_before = torch.tensor(float(step.number - 1), device=weights.device)  # torch adds this one
        adamw(
            [weights],
            [grads],
            [exp_avg],
            [exp_avg_sq],
            [],
            [steps_before],
            fused=True,
            grad_scale=step.grad_scale,
            amsgrad=False,
            beta1=self._config.adam_beta1,
            beta2=self._config.adam_beta2,
            lr=step.lr,
            weight_decay=step.weight_decay,
            eps=self._config.adam_eps,
            maximize=False,
        )


class SGD:
    """Gradient descent with momentum; weight decay is added to the gradient."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum = config.sgd_momentum

    @property
    def state_names(self) -> tuple[str, ...]:
        """The decayed sum of gradients; nothing without momentum."""
        return ("momentum",) if self._momentum else ()

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place."""
        sgd(
            [weights],
            [grads],
            [state[0] if state else None],
            fused=True,
            grad_scale=step.grad_scale,
            weight_decay=step.weight_decay,
            momentum=self._momentum,
            lr=step.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def build_update_rule(config: OptimizerConfig) -> UpdateRule:
    """The rule that ``--optimizer`` names."""
    return AdamW(config) if config.optimizer == "adam" else SGD(config)
