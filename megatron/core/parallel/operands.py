"""What products of layers multiply: a weight and its input are asked for, so that something may stand for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Grouping:
    """Rows of experts. ``parts``: splits rows [n, …] into those of each expert. ``scales`` [n, 1]: what has multiplied
    each row, if anything has, so that its result is weighted.
    """

    parts: Callable[[Tensor], Sequence[Tensor]]
    scales: Tensor | None = None


class Operands:
    """The operands of a model's products: weights and inputs as they are. A subclass puts others in their place.

    Every product of a linear layer, experts included, asks twice: for its input (``rows``), and for its weight
    (``weight``), which is a function so that the backward pass asks again, and nothing but the parameter is kept.
    Gradients are those of what was multiplied, and are handed to the parameter unchanged. ``replaces``: whether
    anything is replaced, else products don't ask; ``replaces_trained``: whether weights that are trained and their
    inputs are among it.
    """

    replaces = False
    replaces_trained = True

    def weight(self, weight: Tensor) -> Callable[[], Tensor]:
        """What is multiplied in place of ``weight``, without gradient, in its shape."""
        return weight.detach

    def rows(self, rows: Tensor, weight: Tensor, grouping: Grouping | None = None) -> Tensor:
        """What is multiplied in place of the input ``rows`` [..., in] of a product with ``weight`` [..., in].
        ``grouping``: how rows [n, in] belong to the experts of a weight.
        """
        return rows

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the block as the passes of one step, during which no weight changes."""
        yield
