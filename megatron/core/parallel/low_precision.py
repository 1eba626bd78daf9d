"""Which layers of a rank multiply in FP8, and the state that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.config.fp8 import Fp8Config


@dataclass(eq=False)
class LowPrecision:
    """``settings`` of a run, off unless ``configure`` is called before its model is built.

    ``weights``: what layers have made of their weights in the step that runs, so that they are quantized once a step
    and not once a microbatch; None outside of a step. ``trains``: whether that step has backward passes. ``at_start``,
    ``at_end``: called at both ends of a step with backward passes, on every rank. ``gathered``: a weight in 8 bits, see
    ``Fp8Weights.codes``; None for one that is there as it is.
    """

    settings: Fp8Config = field(default_factory=Fp8Config)
    num_layers: int = 0
    weights: dict[Tensor, Any] | None = None
    trains: bool = False
    at_start: Callable[[], None] = lambda: None
    at_end: Callable[[], None] = lambda: None
    gathered: Callable[[Tensor], Any] = lambda weight: None

    def configure(self, settings: Fp8Config, *, num_layers: int) -> None:
        """Take the settings of a run whose model has ``num_layers`` layers."""
        self.settings, self.num_layers = settings, num_layers
        self.weights, self.trains = None, False
        self.at_start = self.at_end = lambda: None
        self.gathered = lambda weight: None

    def serves(self, layer: int | None) -> bool:
        """Whether products of this layer, None for what belongs to none, are in 8 bits."""
        return layer is not None and self.settings.serves(layer, num_layers=self.num_layers)

    @contextmanager
    def step(self, *, trains: bool) -> Iterator[None]:
        """Mark the block as the passes of one step, during which no weight changes."""
        if not self.settings.is_on:
            yield
            return
        if trains:
            self.at_start()
        self.weights, self.trains = {}, trains
        try:
            yield
        finally:
            self.weights, self.trains = None, False
        if trains:
            self.at_end()
