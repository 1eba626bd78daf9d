"""Gradients of weights that a backward pass leaves for later, so that zero-bubble schedules can fill waiting time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Work = Callable[[], None]


class WeightGradients:
    """Tells the linear layers of a rank whether to compute the gradient of their weight now or to note it down.

    ``may_wait``: whether any backward pass of the run does that; layers then take the form that can. A noted gradient
    needs what the layer was given and the gradient of what it returned, which are kept until it is computed.
    """

    def __init__(self) -> None:
        self.may_wait = False
        self._noted: list[Work] | None = None

    @property
    def are_waiting(self) -> bool:
        """Whether a backward pass is running that leaves them for later."""
        return self._noted is not None

    @contextmanager
    def left_for_later(self) -> Iterator[list[Work]]:
        """Backward passes inside this block note the gradients of weights down in the list that it gives."""
        assert self.may_wait, "a run that splits backward passes says so before its first forward pass"
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
