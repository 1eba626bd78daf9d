"""What is usual for a loss and a gradient norm, and which step is a spike. Pure: the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from megatron.config.guards import GuardsConfig
from megatron.errors import CheckpointError
from megatron.small_files import as_kind

LEAST_VALUES = 8
"""Values of a window without which nothing is unusual."""
_DEVIATION = 1.4826  # of a normal distribution, in median absolute deviations
_LEAST_SHARE = 0.01  # of the median: values that hardly vary would make every step a spike
_LARGE, _LEARNED = 10.0, 100  # Megatron-LM's factor, and steps from which it takes the largest value
LOSS, NORM = "loss", "grad norm"


@dataclass
class GuardState:
    """What guards remember of a run; checkpoints hold it.

    ``windows``: the last values by name. ``largest``, ``seen``: the largest of the first 100 steps, and how many there
    were. ``acted``: iterations of spikes that were skipped or rolled back. ``passed_over``: first and last iteration of
    ranges whose data are not used.
    """

    windows: dict[str, list[float]] = field(default_factory=lambda: {LOSS: [], NORM: []})
    largest: dict[str, float] = field(default_factory=dict)
    seen: int = 0
    acted: list[int] = field(default_factory=list)
    passed_over: list[list[int]] = field(default_factory=list)

    def take(self, values: Mapping[str, float], *, size: int) -> None:
        """Remember the values of a step that was taken; the windows keep ``size`` of them."""
        for name, value in values.items():
            if math.isfinite(value):
                window = self.windows.setdefault(name, [])
                window.append(value)
                del window[:-size]
                if self.seen < _LEARNED:
                    self.largest[name] = max(self.largest.get(name, 0.0), abs(value))
        self.seen = min(self.seen + 1, _LEARNED)

    def passes_over(self, iteration: int) -> bool:
        """Whether the data of ``iteration`` are not used; ranges that lie before it are forgotten."""
        self.passed_over = [each for each in self.passed_over if each[1] >= iteration]
        return any(first <= iteration <= last for first, last in self.passed_over)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON keeps it, bit for bit."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any] | None) -> GuardState:
        """The state that a checkpoint holds; a new one for None. Raises CheckpointError for a damaged one."""
        if state is None:
            return cls()
        found: GuardState = as_kind(state, cls, where="the checkpoint's guards", error=CheckpointError)
        if any(len(each) != 2 for each in found.passed_over):
            raise CheckpointError("the checkpoint's guards have a range without two ends, so it is damaged")
        return found


def deviations_above(value: float, window: Iterable[float]) -> float | None:
    """How many deviations ``value`` lies above the median of ``window``; None while that has too few values."""
    known = [*window]
    if len(known) < LEAST_VALUES:
        return None
    middle = median(known)
    deviation = _DEVIATION * median(abs(each - middle) for each in known)
    return (value - middle) / max(deviation, _LEAST_SHARE * abs(middle), 1e-30)


def spike_in(values: Mapping[str, float], state: GuardState, settings: GuardsConfig) -> str | None:
    """Which of a step's finite values is a spike, in words; None for a usual step."""
    found = []
    for name, value in values.items():
        if not math.isfinite(value):
            continue
        window = state.windows.get(name, [])
        above = deviations_above(value, window)
        if settings.spike_action is not None and above is not None and above > settings.spike_threshold:
            usual = median(window)
            found.append(f"{name} {value:.4g} is {above:.1f} deviations above the median {usual:.4g}")
    return " and ".join(found) or None


def large_in(values: Mapping[str, float], state: GuardState, settings: GuardsConfig) -> str | None:
    """Which of a step's values is 10 times the largest one of the first 100 steps, in words."""
    asked = {LOSS: settings.check_for_spiky_loss, NORM: settings.check_for_large_grads}
    if state.seen < _LEARNED:
        return None
    found = [
        f"{name} {value:.4g} is {_LARGE:.0f} times the largest of the first {_LEARNED} steps, {state.largest[name]:.4g}"
        for name, value in values.items()
        if asked[name] and math.isfinite(value) and abs(value) >= _LARGE * state.largest.get(name, math.inf)
    ]
    return " and ".join(found) or None
