"""What a step produced, its averages, and the lines Megatron's log parsers expect: pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, complete: the same on every rank.

    ``losses`` are means over the global batch (one sum over one count). ``skipped`` means that the optimizer left the
    weights alone (an overflow). ``learning_rate`` is the one set after the step, which the next step uses;
    ``decoupled_learning_rate`` is that of word embeddings and output layer, where they have their own.
    """

    iteration: int
    consumed_samples: int
    global_batch_size: int
    losses: Mapping[str, float]
    learning_rate: float
    decoupled_learning_rate: float | None = None
    loss_scale: float = 1.0
    grad_norm: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    skipped: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What was found on one data set: sum and count of each loss, and of what else is counted, by name."""

    totals: Mapping[str, tuple[float, float]]
    seconds: float


@dataclass
class IntervalTotals:
    """Losses and counts since the last log line.

    A mean is taken over iterations that were not skipped. A non-finite loss counts as a nan iteration, whether the
    optimizer skipped it or, with the check turned off, went on.
    """

    iterations: int = 0
    samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    _sums: dict[str, float] = field(default_factory=dict)

    def add(self, step: StepRecord) -> None:
        """Take in one step."""
        self.iterations += 1
        self.samples += step.global_batch_size
        self.skipped_iterations += step.skipped
        self.nan_iterations += not all(map(math.isfinite, step.losses.values()))
        for name, loss in step.losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + (0.0 if step.skipped else loss)

    def mean_losses(self) -> dict[str, float]:
        """Mean of each loss over the iterations that were not skipped; 0 when all were."""
        taken = max(1, self.iterations - self.skipped_iterations)
        return {name: total / taken for name, total in self._sums.items()}


@dataclass(frozen=True, kw_only=True)
class TrainingLine:
    """Everything on one log line. ``step`` is the last of the interval; ``seconds_per_iteration`` its mean duration."""

    time: datetime
    step: StepRecord
    train_iters: int
    totals: IntervalTotals
    seconds_per_iteration: float
    tflops_per_device: float | None = None


def training_line(line: TrainingLine) -> str:
    """The log line of Megatron-LM 0.12 to the letter (its fields, order, widths and precisions).

    A loss whose mean is not above zero is left out, as there; fields in brackets there appear when they have a value.
    """
    step = line.step
    parts = [f" [{line.time:%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}/{line.train_iters:8d}"]
    parts.append(f"consumed samples: {step.consumed_samples:12d}")
    parts.append(f"elapsed time per iteration (ms): {line.seconds_per_iteration * 1000:.1f}")
    if line.tflops_per_device is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {line.tflops_per_device:.1f}")
    parts.append(f"learning rate: {step.learning_rate:.6E}")
    if step.decoupled_learning_rate is not None:
        parts.append(f"decoupled learning rate: {step.decoupled_learning_rate:.6E}")
    parts.append(f"global batch size: {step.global_batch_size:5d}")
    parts += [f"{name}: {loss:.6E}" for name, loss in line.totals.mean_losses().items() if loss > 0.0]
    parts.append(f"loss scale: {step.loss_scale:.1f}")
    if step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        parts.append(f"num zeros: {step.num_zeros}")
    if step.params_norm is not None:
        parts.append(f"params norm: {step.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {line.totals.skipped_iterations:3d}")
    parts.append(f"number of nan iterations: {line.totals.nan_iterations:3d}")
    return " | ".join(parts) + " |"


def perplexity(loss: float) -> float:
    """exp(loss), with the loss capped at 20 so that an untrained model prints a number."""
    return math.exp(min(20.0, loss))


def has_perplexity(name: str) -> bool:
    """Whether a mean is a loss; an accuracy has no perplexity."""
    return name.endswith("loss")


def validation_block(where: str, losses: Mapping[str, float]) -> str:
    """Validation losses between two rules.

    ``where`` is ``iteration N``, or at the end of a run ``iteration N on validation set`` or ``… on test set``.
    """
    line = f" validation loss at {where} | "
    for name, loss in losses.items():
        line += f"{name} value: {loss:.6E} | "
        if has_perplexity(name):
            line += f"{name} PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"
