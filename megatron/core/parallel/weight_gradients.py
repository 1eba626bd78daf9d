"""How weight gradients are computed: at once or postponed, in a new tensor or added to the gradient buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

Work = Callable[[], None]


@dataclass(frozen=True, eq=False)
class MainGrad:
    """Where the gradients of a weight are summed.

    ``sum``: shaped like the weight. ``opened``: to be called before a gradient is added to it, ``added``: after.
    """

    sum: Tensor
    added: Callable[[], None]
    opened: Callable[[], None] = lambda: None


@dataclass(eq=False)
class WeightGradients:
    """Whether the linear layers of a rank compute the gradients of their weights now or note them down for later.

    ``may_wait``: whether any backward pass of the run leaves them for later, which needs another form of the layer.
    ``noted``: where the running backward pass notes them down; None when it computes them at once. A layer's input and
    the gradient of its output are kept until the noted gradient is computed.
    ``main_grads``: the weights whose gradients linear layers add to a sum as they multiply. Autograd, which else adds
    them up, sees nothing of those. ``fuses_accumulation``: whether gradient sync gives weights such sums.
    ``added``: adds a gradient of a weight to its sum, where autograd would copy it first.
    """

    may_wait: bool = False
    noted: list[Work] | None = None
    fuses_accumulation: bool = False
    main_grads: dict[Tensor, MainGrad] = field(default_factory=dict)
    added: dict[Tensor, Callable[[Tensor], None]] = field(default_factory=dict)

    def main_grad_of(self, weight: Tensor) -> MainGrad | None:
        """Where the gradients of a weight are summed; None where autograd accumulates them."""
        assert weight in self.main_grads or not self.fuses_accumulation, "gradient sync adds up elsewhere"
        return self.main_grads.get(weight)

    def forget(self) -> None:
        """Let autograd accumulate all gradients from now on."""
        self.fuses_accumulation = False
        self.main_grads.clear()
        self.added.clear()

    def do(self, work: Work, *, at_once: bool) -> None:
        """Compute the gradient of a weight, or note it down where that is asked for and not ``at_once``: as for a
        recomputed layer, the inputs of whose products would all be kept until then, which it is there to forget.
        """
        if self.noted is None or at_once:
            work()
        else:
            self.noted.append(work)

    @contextmanager
    def left_for_later(self) -> Iterator[list[Work]]:
        """Backward passes inside this block note the gradients of weights down in the list that it yields."""
        assert self.may_wait, "may_wait must be set before the first forward pass"
        self.noted = noted = list[Work]()
        try:
            yield noted
        finally:
            self.noted = None
