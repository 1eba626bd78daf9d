"""Gradients of weights that a backward pass leaves for later: zero-bubble schedules compute them in waiting time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Work = Callable[[], None]


@dataclass(eq=False)
class WeightGradients:
    """Whether the linear layers of a rank compute the gradients of their weights now or note them down for later.

    ``may_wait``: whether any backward pass of the run leaves them for later, which needs another form of the layer.
    ``noted``: where the running backward pass notes them down; None when it computes them at once. A layer's input and
    the gradient of its output are kept until the noted gradient is computed.
    """

    may_wait: bool = False
    noted: list[Work] | None = None

    @contextmanager
    def left_for_later(self) -> Iterator[list[Work]]:
        """Backward passes inside this block note the gradients of weights down in the list that it yields."""
        assert self.may_wait, "may_wait must be set before the first forward pass"
        self.noted = noted = list[Work]()
        try:
            yield noted
        finally:
            self.noted = None
