"""Element-wise updates: AdamW and SGD by torch's fused kernels, one pass over memory each; Lion and AdEMAMix."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.update_rule import Step


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101) and bias correction."""

    is_fused = True

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the first and second moments."""
        return ("exp_avg", "exp_avg_sq")

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place; all tensors are of one dtype and equally long."""
        exp_avg, exp_avg_sq = state
        steps_before = torch.full((), step.number - 1.0, device=weights.device)  # torch adds this one
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
            eps=self._config.adam_eps * step.eps_multiplier,
            maximize=False,
        )


class SGD:
    """Gradient descent with momentum; weight decay is added to the gradient."""

    is_fused = True

    def __init__(self, config: OptimizerConfig) -> None:
        self._momentum = config.sgd_momentum

    @property
    def state_names(self) -> tuple[str, ...]:
        """Name of the decayed sum of gradients; none without momentum."""
        return ("momentum",) if self._momentum else ()

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place; all tensors are of one dtype and equally long."""
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
