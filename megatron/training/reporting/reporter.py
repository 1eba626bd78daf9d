"""What a run prints and plots: one method for each event, which decides which rank reports it and where."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

import torch

from megatron.training.reporting.curves import Curves
from megatron.training.reporting.events import EventName, Observers
from megatron.training.reporting.flops import SpeedScale, Throughput, throughput_line
from megatron.training.reporting.memory import memory_line, memory_scalars, memory_use
from megatron.training.reporting.metrics import (
    IntervalTotals,
    StepRecord,
    training_line,
    validation_block,
)
from megatron.training.reporting.progress import ProgressBar
from megatron.training.reporting.timers import Timers, longest, timer_report

if TYPE_CHECKING:
    from megatron.config.reporting import ReportingConfig

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Figures = dict[str, float]
"""Named numbers of one rank: seconds of timers, bytes of memory."""


@dataclass(frozen=True, kw_only=True)
class ReportingRank:
    """The rank's part in reporting. ``gather``: a collective that returns every rank's value in rank order.
    ``average``: a collective that returns means over the workers of DiLoCo.
    """

    rank: int = 0
    world_size: int = 1
    is_first_replica: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gather: Callable[[Figures], list[Figures]] = lambda figures: [figures]
    average: Callable[[Figures], Figures] = lambda figures: figures

    @property
    def is_last(self) -> bool:
        """Whether this rank prints the log and writes the curves, as in Megatron."""
        return self.rank == self.world_size - 1


LayerMetricsReport = Callable[[Mapping[str, Sequence[float]]], tuple[str, Mapping[str, float]]]
"""A function from sums of what layers report to a log line and numbers for curves."""


class Reporter:
    """Writes the log lines and curves of a run. The loop calls it on every rank; only the last rank prints.

    ``step`` and ``aside`` gather times and memory from all ranks, so they are collectives.
    """

    def __init__(
        self,
        config: ReportingConfig,
        reporting_rank: ReportingRank,
        *,
        train_iters: int,
        scale: SpeedScale,
        timers: Timers,
        curves: Curves,
        terminal: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = datetime.now,
        out: TextIO | None = None,
        describe_layer_metrics: LayerMetricsReport | None = None,
    ) -> None:
        self.timers = timers
        self.observers = Observers()
        self._config, self._rank = config, reporting_rank
        self._train_iters, self._scale = train_iters, scale
        self._curves, self._clock, self._now, self._out = curves, clock, now, out
        self._terminal, self._describe_layer_metrics = terminal, describe_layer_metrics
        self._progress = self._bar(train_iters)
        self._totals = IntervalTotals()
        self._interval_start = clock()
        self._step_start = self._interval_start
        self._recent_seconds: float | None = None
        self._memory_reported = False
        self._log_failed = False
        self._unreported: StepRecord | None = None

    def say(self, text: str) -> None:
        """Print on the last rank, above the progress bar; nothing for an empty text."""
        if not (self._rank.is_last and text):
            return
        self._progress.clear()
        stream = self._out or sys.stdout
        try:
            stream.write(text + "\n")
            stream.flush()
        except BrokenPipeError:  # the reader of the log has ended
            raise
        except OSError as error:  # a full disk under a log file
            if not self._log_failed:
                logger.warning("the log can't be written (%s): training continues", error.strerror)
            self._log_failed = True

    def tell(self, name: EventName, **fields: object) -> None:
        """Let the observers of this rank see an event."""
        self.observers.tell(name, **fields)

    def restart_clock(self, iteration: int = 0) -> None:
        """Measure time from now: called when setup is over, or a checkpoint was loaded again, and training begins after
        ``iteration``. A collective.
        """
        self.tell_rest()
        self._interval_start = self._step_start = self._clock()
        self._progress = self._bar(self._train_iters, initial=iteration)

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Time work that isn't training (``evaluate-time``, ``save-checkpoint``) separately, leave it out of the time
        per iteration, and print the ranks' times. A collective.
        """
        start = self._clock()
        self._progress.clear()
        with self.timers(name, level=0):
            yield
        times = self._rank.gather(self.timers.take(name))
        self.say(timer_report(times, option=self._config.timing_log_option))
        spent = self._clock() - start
        self.tell("aside", what=name, seconds=spent)
        self._interval_start += spent
        self._step_start += spent
        self._progress.leave_out(spent)

    def step(self, step: StepRecord) -> None:
        """Add a finished step to the curves; every ``--log-interval`` iterations print the log line. A collective."""
        self._totals.add(step)
        if self._config.writes_curves and step.iteration % self._config.tensorboard_log_interval == 0:
            step = replace(step, losses=self._rank.average(dict(step.losses)))
        self._curves.step(step)
        if step.layer_metrics and self._describe_layer_metrics is not None and self._curves.wants(step.iteration):
            self._curves.scalars(self._describe_layer_metrics(step.layer_metrics)[1], iteration=step.iteration)
        if self._config.log_memory_to_tensorboard and self._curves.wants(step.iteration):
            self._curves.scalars(memory_scalars(self._rank.device), iteration=step.iteration)
        self._unreported = step
        if step.iteration % self._config.log_interval == 0:
            self._log_interval(step)
        now = self._clock()
        seconds, self._step_start = now - self._step_start, now
        # A moving average: the first step, which also builds caches, soon loses its weight.
        previous = seconds if self._recent_seconds is None else self._recent_seconds
        self._recent_seconds = 0.9 * previous + 0.1 * seconds
        speed = step.global_batch_size * self._scale.tokens_per_sample / self._recent_seconds
        losses = [f"loss {loss:.4f}" for loss in list(step.losses.values())[:1] if loss is not None]
        self._progress.show(step.iteration, *losses, f"{speed:,.0f} tokens/s")

    def _log_interval(self, step: StepRecord) -> None:
        totals, seconds = self._totals, self._clock() - self._interval_start
        totals.average(self._rank.average)
        speed = self._scale.throughput(samples=totals.samples, seconds=seconds)
        line = training_line(
            step,
            totals,
            time=self._now(),
            train_iters=self._train_iters,
            seconds_per_iteration=seconds / totals.iterations,
            tflops_per_device=speed.tflops_per_device if self._config.log_throughput else None,
        )
        self.say(line)
        self._tell_steps(step, seconds=seconds, speed=speed)
        if self._config.log_throughput:
            self.say(throughput_line(speed, self._scale))
        if totals.layer_metrics and self._describe_layer_metrics is not None:
            self.say(self._describe_layer_metrics(totals.layer_metrics)[0])
        if not self._memory_reported:
            self._report_memory(step.iteration)
        times = self._rank.gather(self.timers.take()) if self.timers.level > 0 else []
        self.say(timer_report(times, option=self._config.timing_log_option, iterations=totals.iterations))
        if self._config.log_timers_to_tensorboard:
            slowest = longest(times, iterations=totals.iterations)
            values: dict[str, float | None] = {"iteration-time": seconds / totals.iterations}
            values |= {f"{name}-time": value for name, value in slowest.items()}
            if self._config.log_throughput:
                values |= {
                    "throughput": speed.tflops_per_device,
                    "tokens-per-second": speed.tokens_per_second,
                    "mfu": speed.utilization,
                }
            self._curves.scalars(values, iteration=step.iteration)
        self._begin_interval()

    def tell_rest(self) -> None:
        """Let observers see the steps since the last log line, which no line will report. A collective."""
        if self._unreported is not None:
            seconds = self._clock() - self._interval_start
            self._totals.average(self._rank.average)
            speed = self._scale.throughput(samples=self._totals.samples, seconds=seconds)
            self._tell_steps(self._unreported, seconds=seconds, speed=speed)
            self._begin_interval()

    def _begin_interval(self) -> None:
        self._totals, self._unreported = IntervalTotals(), None
        self._interval_start = self._clock()

    def _tell_steps(self, step: StepRecord, *, seconds: float, speed: Throughput) -> None:
        """Tell of the steps since the log line before. A collective where metrics of all ranks are served."""
        totals, memory = self._totals, list[Figures]()
        if self._config.metrics_port is not None:
            memory = self._rank.gather({kind: float(size) for kind, size in memory_use(self._rank.device).items()})
        if not self.observers:
            return
        self.tell(
            "steps",
            iteration=step.iteration,
            iterations=totals.iterations,
            consumed_samples=step.consumed_samples,
            seconds=seconds,
            seconds_per_iteration=seconds / totals.iterations,
            tokens_per_second=speed.tokens_per_second,
            tflops_per_device=speed.tflops_per_device,
            mfu=speed.utilization,
            losses=totals.mean_losses(),
            learning_rate=step.learning_rate,
            grad_norm=step.grad_norm,
            loss_scale=step.loss_scale,
            global_batch_size=step.global_batch_size,
            skipped_iterations=totals.skipped_iterations,
            nan_iterations=totals.nan_iterations,
            memory=memory,
        )

    def _report_memory(self, iteration: int) -> None:
        """Print the memory of the ranks of the first replica. A collective."""
        mine = memory_use(self._rank.device) if self._rank.is_first_replica else {}
        for rank, use in enumerate(self._rank.gather({kind: float(size) for kind, size in mine.items()})):
            if use:
                self.say(memory_line(use, rank=rank, iteration=iteration))
        self._memory_reported = True

    def _bar(self, total: int | None, *, initial: int = 0) -> ProgressBar:
        return ProgressBar(total, initial=initial, stream=self._terminal, enabled=self._rank.is_last)

    def evaluating(self, batches: Iterable[Batch], *, total: int | None) -> Iterator[Batch]:
        """The batches of an evaluation, with a progress bar. ``total``: how many; None when unknown."""
        bar = self._bar(total)
        for done, batch in enumerate(batches, start=1):
            yield batch
            bar.show(done, "evaluation" if total else f"evaluation, batch {done:,}")
        bar.clear()

    def validation(
        self,
        where: str,
        losses: Mapping[str, float],
        *,
        iteration: int,
        consumed_samples: int,
        data_set: str = "",
        batches: str = "",
    ) -> None:
        """Print validation losses and add them to the curves; a test set's losses are only printed.

        ``where``, ``batches``: see :func:`metrics.validation_block`. ``data_set``: the name of one of several
        validation sets.
        """
        self.say(validation_block(f"{where} ({data_set})" if data_set else where, losses, batches=batches))
        self.tell("validation", where=where, iteration=iteration, data_set=data_set, losses=dict(losses))
        if not where.endswith("on test set"):
            self._curves.validation(losses, iteration=iteration, consumed_samples=consumed_samples, data_set=data_set)

    def samples(self, continued: Sequence[tuple[str, str]], *, iteration: int) -> None:
        """Print prompts and what the model wrote after them, and add the texts to the curves."""
        quoted = [tuple(json.dumps(text, ensure_ascii=False) for text in pair) for pair in continued]
        lines = [f"   {prompt} -> {text}" for prompt, text in quoted]
        self.say("\n".join([f"samples at iteration {iteration}:", *lines]))
        for prompt, text in continued:
            self.tell("sample", iteration=iteration, prompt=prompt, text=text)
        texts = {f"sample {number}": prompt + text for number, (prompt, text) in enumerate(continued, start=1)}
        self._curves.texts(texts, iteration=iteration)

    def numbers(self, line: str, values: Mapping[str, float], *, iteration: int) -> None:
        """Print a line, and add the numbers that it is about to the curves."""
        self.say(line)
        self.tell("numbers", iteration=iteration, values=dict(values))
        self._curves.scalars(values, iteration=iteration)

    def close(self) -> None:
        """Clear the progress bar and close the curves' writers."""
        self._progress.clear()
        self._curves.close()
        if self._log_failed and self._out is None:  # Python's flush at exit would fail and change the exit code
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
