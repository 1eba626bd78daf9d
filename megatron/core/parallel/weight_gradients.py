"""Gradients of weights that a backward pass leaves for later: zero-bubble schedules compute them in waiting time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], None]


class WeightGradients:
    """Whether the linear layers of a rank compute the gradients of their weights now or note them down for later.

    ``may_wait``: whether any backward pass of the run leaves them for later, which needs another form of the layer.
    Until a noted gradient is computed, the layer's input and the gradient of its output are kept.
    """

    def __init__(self) -> None:
        self.may_wait = False
        self._noted: list[Work] | None = None

    @property
    def are_waiting(self) -> bool:
        """Whether the running backward pass leaves them for later."""
        return self._noted is not None

    @contextmanager
    def left_for_later(self) -> Iterator[list[Work]]:
        """Backward passes inside this block note the gradients of weights down in the list that it yields."""
        assert self.may_wait, "may_wait must be set before the first forward pass"
        noted: list[Work] = []
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def note(self, work: Work) -> None:
        """Leave ``work`` for later."""
        assert self._noted is not None
        self._noted.append(work)
