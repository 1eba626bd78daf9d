"""Adafactor for matrices: second moments as means of rows and of columns (arXiv:1804.04235)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.update_rule import Shape, Step

_SMALLEST = 1e-30  # second moment
_SMALLEST_SCALE = 1e-3  # root mean square of weights by which an update is multiplied


class Adafactor:
    """The gradient divided by the root of a rank-one estimate of its second moments, clipped to a root mean square.

    The learning rate is the schedule's, and there is no first moment.
    """

    state_names: tuple[str, ...] = ()

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    @property
    def reads_weights(self) -> bool:
        """Whether updates are multiplied by the root mean square of the weights."""
        return self._config.adafactor_scale_parameter

    def matrix_state(self, shape: Shape) -> Mapping[str, Shape]:
        """Means of squares over each row, and over each column."""
        return {"row_mean_square": shape[:1], "column_mean_square": shape[1:]}

    def direction(self, grads: Tensor, state: list[Tensor], step: Step) -> Tensor:
        """The mean gradients."""
        return step.unscaled(grads)

    def workspace(self, shapes: Sequence[tuple[int, int]]) -> int:
        """Bytes of squares of the largest matrix and of its update, and of its second moments."""
        return max((12 * rows * columns for rows, columns in shapes), default=0)

    def transform(
        self,
        matrices: Sequence[Tensor],
        weights: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[int],
    ) -> list[Tensor]:
        """Updates of the ``matrices`` of gradients."""
        updates = []
        for place, (grads, state, number) in enumerate(zip(matrices, states, numbers)):
            mixed, squares = number**-self._config.adafactor_decay, grads.square()
            rows, columns = state["row_mean_square"], state["column_mean_square"]
            rows.lerp_(squares.mean(1), mixed)
            columns.lerp_(squares.mean(0), mixed)
            moments = torch.outer(rows / rows.mean().clamp(min=_SMALLEST), columns)
            update = grads * moments.clamp_(min=_SMALLEST).rsqrt_()
            update /= (_root_mean_square(update) / self._config.adafactor_clip_threshold).clamp(min=1.0)
            if weights:
                update *= _root_mean_square(weights[place]).clamp(min=_SMALLEST_SCALE)
            updates.append(update)
        return updates


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
