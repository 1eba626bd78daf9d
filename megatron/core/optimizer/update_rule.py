"""What an update rule is: element-wise on any range of weights, or on whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

Shape = tuple[int, ...]


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

    def unscaled(self, grads: Tensor) -> Tensor:
        """Mean gradients from gradient sums, in memory of their own where they are scaled."""
        return grads if self.grad_scale is None else grads / self.grad_scale


class ElementRule(Protocol):
    """An update that treats every weight by itself, so it may be applied to any range of a flat buffer."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """The rule's tensors with a number for every weight, as checkpoints name them; they start as zeros."""

    @property
    def temporaries(self) -> int:
        """Tensors as long as the weights that ``apply`` makes; where it makes none it may be given a large range."""

    def apply(self, weights: Tensor, grads: Tensor, state: list[Tensor], step: Step) -> None:
        """Move 1-D ``weights`` in place; all tensors are of one dtype and equally long."""


@runtime_checkable
class MatrixRule(Protocol):
    """An update of whole logical matrices, in three steps; ``state_names`` as in ``ElementRule``.

    ``direction`` is element-wise, on the range of a flat buffer that a rank owns. ``transform`` sees whole matrices, at
    the rank that owns them. The result ``u`` moves the weights, again element-wise: w ← w·(1 − lr·decay) − lr·u.
    """

    @property
    def state_names(self) -> tuple[str, ...]:
        """The rule's tensors with a number for every weight; they start as zeros."""

    @property
    def reads_weights(self) -> bool:
        """Whether ``transform`` needs the weights."""

    def matrix_state(self, shape: Shape) -> Mapping[str, Shape]:
        """Shapes of the tensors that the owner of a matrix of ``shape`` keeps, by name; they start as zeros."""

    def direction(self, grads: Tensor, state: list[Tensor], step: Step) -> Tensor:
        """What is transformed, for 1-D ``grads``; changes ``state`` in place."""

    def workspace(self, shapes: Sequence[tuple[int, int]]) -> int:
        """Bytes that ``transform`` needs at most for matrices of these shapes, beside them and their updates."""

    def transform(
        self,
        matrices: Sequence[Tensor],
        weights: Sequence[Tensor],
        states: Sequence[Mapping[str, Tensor]],
        numbers: Sequence[int],
    ) -> list[Tensor]:
        """Updates ``[rows, columns]`` of ``matrices``; changes ``states`` in place.

        ``weights``: none unless ``reads_weights``. ``numbers``: each matrix's steps so far, this one included.
        """
