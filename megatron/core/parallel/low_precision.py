"""Which layers of a rank multiply in FP8, and the state that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.config.fp8 import Fp8Config


@dataclass(eq=False)
class LowPrecision:
    """``settings`` of a run whose model has ``num_layers`` layers, and what layers share during a step.

    ``weights``: what layers have made of their weights in the step that runs, so that they are quantized once a step
    and not once a microbatch; None outside of a step. ``trains``: whether that step has backward passes. ``gathered``:
    the weights that ranks have gathered in 8 bits and that are there in no other form: the matrices of each, and its
    largest magnitude in this rank's shard.
    """

    settings: Fp8Config = field(default_factory=Fp8Config)
    num_layers: int = 0
    weights: dict[Tensor, Any] | None = None
    trains: bool = False
    gathered: dict[Tensor, Any] = field(default_factory=dict)

    def serves(self, layer: int | None) -> bool:
        """Whether products of this layer, None for what belongs to none, are in 8 bits."""
        return layer is not None and self.settings.serves(layer, num_layers=self.num_layers)

    @contextmanager
    def step(self, *, trains: bool) -> Iterator[None]:
        """Mark the block as the passes of one step, during which no weight changes."""
        if not self.settings.is_on:
            yield
            return
        self.weights, self.trains = {}, trains
        try:
            yield
        finally:
            self.weights, self.trains = None, False
