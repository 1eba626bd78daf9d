"""Updates of a flat range of weights: AdamW and SGD, by torch's fused kernels, one pass over memory each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Step:
    """Parameters of one step; ``number`` counts from 1. ``grad_scale``, an fp32 scalar, divides the gradients.
    ``eps_multiplier``: of an epsilon in the rule.
    """

    number: int
    lr: float
    weight_decay: float
    grad_scale: Tensor | None
    eps_multiplier: float = 1.0


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101) and bias correction."""

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    @property
    def state_names(self) -> tuple[str, ...]:
        """The rule's tensors for every weight, as checkpoints name them; they start as zeros."""
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


UpdateRule = AdamW | SGD
UPDATE_RULES: dict[str, type[UpdateRule]] = {"adam": AdamW, "sgd": SGD}
"""The update rules by their names in ``--optimizer`` and in a parameter's policy."""


def is_narrow(state_name: str, config: OptimizerConfig) -> bool:
    """Whether a tensor of an update rule's state is stored in bf16, and not in fp32."""
    formats = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    return formats.get(state_name) == "bf16"


def state_bytes(config: OptimizerConfig) -> int:
    """Bytes for each parameter of what an optimizer keeps between steps, beside the weights and their masters: the
    state of ``--optimizer``'s update rule and the average of ``--ema-decay``.
    """
    names = UPDATE_RULES[config.optimizer](config).state_names
    return sum(2 if is_narrow(name, config) else 4 for name in names) + 4 * (config.ema_decay is not None)
