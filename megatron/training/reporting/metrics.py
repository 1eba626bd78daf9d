"""Results of a step, their averages, and the log lines that Megatron's log parsers expect: pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from megatron.config.flags import plural_s
from megatron.core.inference.scoring import perplexity


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Results of one optimizer step, the same on every rank of a worker.

    ``losses``: means over the worker's part of the global batch. ``learning_rate``: set after the step, which the next
    step uses.
    ``decoupled_learning_rate``: of word embeddings and output layer, where they have their own. ``skipped``: the
    optimizer left the weights unchanged (an overflow). ``layer_metrics``: sums of what layers report, by name.
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
    layer_metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Results on one data set: sum and count of each loss and of each other mean, by name."""

    totals: Mapping[str, tuple[float, float]]
    seconds: float


@dataclass
class IntervalTotals:
    """Losses and counts since the last log line.

    A non-finite loss counts as a nan iteration, whether or not the optimizer skipped the step.
    """

    iterations: int = 0
    samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    layer_metrics: dict[str, list[float]] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        self.iterations += 1
        self.samples += step.global_batch_size
        self.skipped_iterations += step.skipped
        self.nan_iterations += not all(map(math.isfinite, step.losses.values()))
        for name, counts in step.layer_metrics.items():
            before = self.layer_metrics.get(name, [0] * len(counts))
            self.layer_metrics[name] = [sum(pair) for pair in zip(counts, before)]
        for name, loss in step.losses.items():
            self._sums[name] = self._sums.get(name, 0.0) + (0.0 if step.skipped else loss)

    def average(self, over_workers: Callable[[dict[str, float]], dict[str, float]]) -> None:
        """Replace the losses by their means over several workers."""
        self._sums = over_workers(self._sums)

    def mean_losses(self) -> dict[str, float]:
        """Mean of each loss over the iterations that were not skipped; 0 when all were."""
        taken = max(1, self.iterations - self.skipped_iterations)
        return {name: total / taken for name, total in self._sums.items()}


def training_line(
    step: StepRecord,
    totals: IntervalTotals,
    *,
    time: datetime,
    train_iters: int,
    seconds_per_iteration: float,
    tflops_per_device: float | None = None,
) -> str:
    """The log line of Megatron-LM 0.12: the same fields, order, widths and precisions. Two things are ours: more digits
    of a throughput below 1, and the time left at the speed of this interval, last.

    ``step``: the last of the interval of ``totals``. A loss whose mean is not above zero is left out, as there.
    """
    parts = [f" [{time:%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}/{train_iters:8d}"]
    parts.append(f"consumed samples: {step.consumed_samples:12d}")
    parts.append(f"elapsed time per iteration (ms): {seconds_per_iteration * 1000:.1f}")
    if tflops_per_device is not None:
        parts.append(f"throughput per GPU (TFLOP/s/GPU): {readable(tflops_per_device)}")
    parts.append(f"learning rate: {step.learning_rate:.6E}")
    if step.decoupled_learning_rate is not None:
        parts.append(f"decoupled learning rate: {step.decoupled_learning_rate:.6E}")
    parts.append(f"global batch size: {step.global_batch_size:5d}")
    means = totals.mean_losses().items()
    parts += [f"{name}: {mean:.6E}" for name, mean in means if mean > 0.0 or (mean < 0.0 and not has_perplexity(name))]
    parts.append(f"loss scale: {step.loss_scale:.1f}")
    if step.grad_norm is not None:
        parts.append(f"grad norm: {step.grad_norm:.3f}")
    if step.num_zeros is not None:
        parts.append(f"num zeros: {step.num_zeros}")
    if step.params_norm is not None:
        parts.append(f"params norm: {step.params_norm:.3f}")
    parts.append(f"number of skipped iterations: {totals.skipped_iterations:3d}")
    parts.append(f"number of nan iterations: {totals.nan_iterations:3d}")
    if step.iteration < train_iters:
        parts.append(f"time left: {_duration(round((train_iters - step.iteration) * seconds_per_iteration))}")
    return " | ".join(parts) + " |"


def _duration(seconds: int) -> str:
    """Days, and the rest as ``h:mm:ss``."""
    days, rest = divmod(seconds, 24 * 60 * 60)
    return (f"{days} day{plural_s(days)}, " if days else "") + str(timedelta(seconds=rest))


def readable(value: float) -> str:
    """A number with one digit after the point, or, below 1, as many as show three of its own."""
    if not 0.0 < value < 1.0:
        return f"{value:.1f}"
    return f"{value:.{min(2 - math.floor(math.log10(value)), 12)}f}"


def has_perplexity(name: str) -> bool:
    """Whether the mean of this name is a cross entropy, as "lm loss" is and "load_balancing_loss" is not."""
    return name.endswith(" loss")


def validation_block(where: str, losses: Mapping[str, float], *, batches: str = "") -> str:
    """Validation losses between two rules.

    ``where`` is ``iteration N``, or at the end of a run ``iteration N on validation set`` or ``… on test set``.
    ``batches``: which ones of the set, in words.
    """
    line = f" validation loss at {where} | "
    for name, loss in losses.items():
        line += f"{name} value: {loss:.6E} | "
        if has_perplexity(name):
            line += f"{name} PPL: {perplexity(loss):.6E} | "
    line += f"{batches} | " if batches else ""
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"
