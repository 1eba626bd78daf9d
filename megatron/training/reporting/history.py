"""What a run's events tell in the end: curves without steps that were done again, launches, what happened when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.training.reporting.events import OF_STEPS, Event
from megatron.training.reporting.goodput import Goodput

Curve = dict[int, float]
"""A number by iteration."""
_UNKNOWN_END = "still running, or killed"


@dataclass
class History:
    """A run as its events tell it. ``label``: its name in reports.

    ``curves``: training losses and other numbers of steps by name. ``validation``: losses of evaluations by name and
    data set. ``numbers``: others by name, such as scores of tasks. ``samples``: prompt and text by iteration.
    ``start``: the fields of the newest start. ``events``: what happened, without steps.
    """

    label: str
    curves: dict[str, Curve] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    validation: dict[str, Curve] = field(default_factory=dict)
    numbers: dict[str, Curve] = field(default_factory=dict)
    samples: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    goodput: Goodput = field(default_factory=Goodput)
    iteration: int = 0
    state: str = _UNKNOWN_END

    @classmethod
    def of(cls, label: str, events: Iterable[Event]) -> History:
        """The history of a run's events, in their order."""
        history = cls(label)
        for event in events:
            history.see(event)
        return history

    def see(self, event: Event) -> None:
        """Add an event."""
        fields, iteration = event.fields, int(event.fields.get("iteration", 0))
        self.goodput.see(event)
        if event.name == "start":
            self.start, self.state = fields, _UNKNOWN_END
            if fields.get("trains", True):
                self._forget_after(iteration)
        elif event.name == "rollback":
            self._forget_after(iteration)
        elif event.name == "steps":
            for name, value in {**fields["losses"], **{name: fields.get(name) for name in OF_STEPS}}.items():
                if value is not None:
                    self.curves.setdefault(name, {})[iteration] = float(value)
            self.losses += [name for name in fields["losses"] if name not in self.losses]
            self.iteration = iteration
        elif event.name == "validation" and not fields["where"].endswith("on test set"):
            for loss, value in fields["losses"].items():
                name = " ".join(filter(None, (loss, fields.get("data_set", ""))))
                self.validation.setdefault(name, {})[iteration] = float(value)
        elif event.name == "numbers":
            for name, value in fields["values"].items():
                self.numbers.setdefault(name, {})[iteration] = float(value)
        elif event.name == "sample":
            self.samples.setdefault(iteration, []).append((str(fields["prompt"]), str(fields["text"])))
        elif event.name == "end":
            self.state = str(fields["state"])
        if event.name not in ("steps", "aside", "sample", "numbers"):
            self.events.append(event)

    def _forget_after(self, iteration: int) -> None:
        """Leave out what a launch that goes on from ``iteration`` does again."""
        for curve in (*self.curves.values(), *self.validation.values(), *self.numbers.values()):
            for later in [each for each in curve if each > iteration]:
                del curve[later]
        for later in [each for each in self.samples if each > iteration]:
            del self.samples[later]
        self.iteration = iteration
