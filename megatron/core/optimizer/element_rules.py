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

    temporaries = 0

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

    temporaries = 0

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


class Lion:
    """The sign of a mix of the gradient and its average (arXiv:2302.06675), with decoupled weight decay."""

    temporaries = 2

    def __init__(self, config: OptimizerConfig) -> None:
        self._beta1, self._beta2 = config.lion_beta1, config.lion_beta2

    @property
    def state_names(self) -> tuple[str, ...]:
        """Name of the average of gradients."""
        return ("lion_momentum",)

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place; all tensors are of one dtype and equally long."""
        (average,) = state
        grads = step.unscaled(grads)
        update = torch.lerp(grads, average, self._beta1).sign_()
        average.lerp_(grads, 1.0 - self._beta2)
        weights.mul_(1.0 - step.lr * step.weight_decay).add_(update, alpha=-step.lr)


class AdEMAMix:
    """AdamW whose first moment is joined by a slow average of gradients (arXiv:2409.03137)."""

    temporaries = 3

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of Adam's moments and of the slow average."""
        return ("exp_avg", "exp_avg_sq", "exp_avg_slow")

    def slow_average(self, number: int) -> tuple[float, float]:
        """Weight α and decay β₃ in step ``number``: α grows linearly, the half-life of β₃ linearly from that of β₁."""
        config = self._config
        done = min(number / config.ademamix_warmup_iters, 1.0) if config.ademamix_warmup_iters else 1.0
        start, end = math.log(config.adam_beta1) if config.adam_beta1 else -math.inf, math.log(config.ademamix_beta3)
        if done == 1.0 or start == -math.inf:
            return config.ademamix_alpha * done, config.ademamix_beta3
        decay = math.exp(start * end / ((1.0 - done) * end + done * start))
        return config.ademamix_alpha * done, min(decay, config.ademamix_beta3)

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place; all tensors are of one dtype and equally long."""
        config, (fast, squares, slow) = self._config, state
        grads = step.unscaled(grads)
        alpha, beta3 = self.slow_average(step.number)
        fast.lerp_(grads, 1.0 - config.adam_beta1)
        slow.lerp_(grads, 1.0 - beta3)
        squares.mul_(config.adam_beta2).addcmul_(grads, grads, value=1.0 - config.adam_beta2)
        root = (squares / (1.0 - config.adam_beta2**step.number)).sqrt_().add_(config.adam_eps * step.eps_multiplier)
        update = (fast / (1.0 - config.adam_beta1**step.number)).add_(slow, alpha=alpha).div_(root)
        weights.mul_(1.0 - step.lr * step.weight_decay).add_(update, alpha=-step.lr)
