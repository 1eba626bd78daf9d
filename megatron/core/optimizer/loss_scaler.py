"""The factor that keeps fp16 gradients inside fp16's range: constant, or adjusted during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from typing_extensions import override

from megatron.config.precision import PrecisionConfig


@dataclass
class LossScaler:
    """A constant scale, by which losses are multiplied before the backward pass: 1 for fp32 and bf16."""

    scale: float = 1.0

    def update(self, *, overflow: bool) -> None:
        """Take note of how a step ended: whether a gradient was infinite or NaN."""

    def state_dict(self) -> dict[str, float]:
        """Numbers to store in a checkpoint: none, the scale is a flag."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from stored numbers. A constant scale ignores them, as its flag overrides the checkpoint."""


@dataclass(kw_only=True)
class DynamicLossScaler(LossScaler):
    """Doubles after ``window`` good steps in a row, halves when overflows go on.

    ``hysteresis_tracker`` is refilled only when the scale grows: the first ``hysteresis - 1`` overflows since then are
    forgiven, every further one halves the scale. Field names are those of Megatron's checkpoints.
    """

    min_scale: float
    window: float
    hysteresis: int
    growth_tracker: int = 0
    hysteresis_tracker: int = 0

    def __post_init__(self) -> None:
        self.hysteresis_tracker = self.hysteresis

    @override
    def update(self, *, overflow: bool) -> None:
        """Adapt the scale to whether the gradients of this step overflowed."""
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self.growth_tracker += 1
        if self.growth_tracker >= self.window:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale *= 2

    @override
    def state_dict(self) -> dict[str, float]:
        """Scale and counters."""
        state = asdict(self)
        return {name: state[name] for name in ("scale", "growth_tracker", "hysteresis_tracker")}

    @override
    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from stored scale and counters; with none (a run that had no dynamic scale) start afresh."""
        if state:
            self.scale = float(state["scale"])
            self.growth_tracker = int(state["growth_tracker"])
            self.hysteresis_tracker = int(state["hysteresis_tracker"])


def build_loss_scaler(precision: PrecisionConfig) -> LossScaler:
    """The loss scale of the flags: other than 1 only for fp16."""
    if not precision.fp16:
        return LossScaler()
    if precision.loss_scale is not None:
        return LossScaler(precision.loss_scale)
    return DynamicLossScaler(
        scale=precision.initial_loss_scale,
        min_scale=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )
