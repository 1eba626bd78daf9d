"""The global batch size as a function of consumed samples (``--rampup-batch-size``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchRamp:
    """Grows the global batch from ``start`` by ``increment`` to ``full``, evenly over the first ``samples`` samples."""

    start: int
    increment: int
    samples: int
    full: int

    def size_at(self, consumed_samples: int) -> int:
        """Global batch size of the step that begins after ``consumed_samples`` samples."""
        growths = (self.full - self.start) // self.increment
        if consumed_samples > self.samples or growths == 0:
            return self.full
        grown = int(consumed_samples / (self.samples / growths)) if self.samples else growths
        return min(self.start + grown * self.increment, self.full)

    def sizes(self) -> range:
        """Every batch size of the ramp, in order."""
        return range(self.start, self.full + 1, self.increment)

    def iterations(self, train_samples: int) -> int:
        """Steps that ``train_samples`` samples make: the ramp step by step, then full batches; a rest is left out."""
        consumed = steps = 0
        while consumed <= self.samples and consumed + self.size_at(consumed) <= train_samples:
            consumed += self.size_at(consumed)
            steps += 1
        if consumed <= self.samples:
            return steps
        return steps + (train_samples - consumed) // self.full

    def samples_after(self, iterations: int) -> int:
        """Samples that ``iterations`` steps from the start consume."""
        consumed = steps = 0
        while consumed <= self.samples and steps < iterations:
            consumed += self.size_at(consumed)
            steps += 1
        return consumed + (iterations - steps) * self.full
