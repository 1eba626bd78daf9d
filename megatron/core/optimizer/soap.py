"""SOAP: Adam in the eigenvectors of the second moments of rows and of columns (arXiv:2409.11321)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.optimizer.update_rule import Shape, Step

_DAMPING = 1e-3  # of the mean eigenvalue: without it rounding would choose the vectors of those that are zero


class Soap:
    """Adam's update of each gradient in the basis of Shampoo's eigenvectors, turned back.

    The vectors start as the unit matrix's, and come nearer to the eigenvectors with every refresh.
    The owner of a matrix [m, n] keeps m² + n² numbers twice, besides Adam's 2·m·n.
    """

    state_names: tuple[str, ...] = ()
    reads_weights = False

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def matrix_state(self, shape: Shape) -> Mapping[str, Shape]:
        """Both moments in the eigenbasis's place, second moments of rows and columns, and their eigenvectors."""
        (rows, columns), state = shape, dict[str, Shape]()
        state |= {"soap_exp_avg": shape, "soap_exp_avg_sq": shape}
        state |= {"soap_rows": (rows, rows), "soap_columns": (columns, columns)}
        return state | {"soap_row_vectors": (rows, rows), "soap_column_vectors": (columns, columns)}

    def direction(self, grads: Tensor, state: list[Tensor], step: Step) -> Tensor:
        """The mean gradients."""
        return step.unscaled(grads)

    def workspace(self, shapes: Sequence[tuple[int, int]]) -> int:
        """Bytes of a refresh of the longer side's vectors, or of gradients in their basis and what becomes of them."""
        return max((4 * max(5 * max(shape) ** 2, 4 * shape[0] * shape[1]) for shape in shapes), default=0)

    def transform(
        self,
        matrices: Sequence[Tensor],
        weights: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[int],
    ) -> list[Tensor]:
        """Updates of the ``matrices`` of gradients."""
        return [self._update(*each) for each in zip(matrices, states, numbers)]

    def _update(self, grads: Tensor, state: Mapping[str, Tensor], number: int) -> Tensor:
        """One matrix's step. ``soap_exp_avg`` is in the basis of the weights, ``soap_exp_avg_sq`` in that of the
        eigenvectors, which a refresh turns only a little.
        """
        config, average, squares = self._config, state["soap_exp_avg"], state["soap_exp_avg_sq"]
        left, right = state["soap_row_vectors"], state["soap_column_vectors"]
        for moments, square in ((state["soap_rows"], grads @ grads.mT), (state["soap_columns"], grads.mT @ grads)):
            moments.lerp_(square, 1.0 - config.soap_shampoo_beta)
        if number == 1 or number % config.soap_precondition_frequency == 0:
            for moments, vectors in ((state["soap_rows"], left), (state["soap_columns"], right)):
                turned_by = moments if number == 1 else moments @ vectors
                damping = _DAMPING * moments.diagonal().mean()
                before = torch.eye(len(moments), dtype=moments.dtype, device=moments.device) if number == 1 else vectors
                vectors.copy_(torch.linalg.qr(turned_by + damping * before).Q)  # a step of power iteration
        average.lerp_(grads, 1.0 - config.adam_beta1)
        turned = left.mT @ grads @ right
        squares.mul_(config.adam_beta2).addcmul_(turned, turned, value=1.0 - config.adam_beta2)
        root = (squares / (1.0 - config.adam_beta2**number)).sqrt_().add_(config.adam_eps)
        step = (left.mT @ average @ right).div_(root).div_(1.0 - config.adam_beta1**number)
        return left @ step @ right.mT
