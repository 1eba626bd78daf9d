"""The run's voice: one method for each thing that happens, which decides who says it and where."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

import torch

from megatron.training.reporting.flops import SpeedScale, Throughput, throughput_line
from megatron.training.reporting.memory import memory_line, memory_scalars, memory_use
from megatron.training.reporting.metrics import (
    IntervalTotals,
    StepRecord,
    TrainingLine,
    training_line,
    validation_block,
)
from megatron.training.reporting.progress import ProgressBar
from megatron.training.reporting.tensorboard import TensorBoard
from megatron.training.reporting.timers import Timers, longest, timer_report

if TYPE_CHECKING:
    from megatron.config.reporting import ReportingConfig

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Figures = dict[str, float]
"""Named numbers of one rank: seconds of timers, bytes of memory."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """Who a rank is when something is to be said, and how it hears from the others.

    ``gather`` is a collective that returns every rank's value in rank order.
    """

    rank: int = 0
    world_size: int = 1
    is_first_replica: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gather: Callable[[Figures], list[Figures]] = lambda figures: [figures]

    @property
    def is_last(self) -> bool:
        """Whether this rank prints the log and writes TensorBoard, as in Megatron."""
        return self.rank == self.world_size - 1


class Reporter:
    """Called by the loop on every rank; what a rank doesn't say, it doesn't compute.

    ``log_interval`` and timers make ``step`` and ``aside`` collectives at the same iterations on all ranks.
    """

    def __init__(
        self,
        config: ReportingConfig,
        speaker: Speaker,
        *,
        train_iters: int,
        scale: SpeedScale,
        timers: Timers,
        curves: TensorBoard,
        terminal: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], datetime] = datetime.now,
        out: TextIO | None = None,
    ) -> None:
        self.timers = timers
        self._config, self._speaker = config, speaker
        self._train_iters, self._scale = train_iters, scale
        self._curves, self._clock, self._now, self._out = curves, clock, now, out
        self._terminal = terminal
        self._progress = self._bar(train_iters)
        self._totals = IntervalTotals()
        self._interval_start = clock()
        self._step_start = self._interval_start
        self._recent_seconds: float | None = None
        self._memory_told = False
        self._log_failed = False

    def say(self, text: str) -> None:
        """Print on the last rank, above the progress line."""
        if self._speaker.is_last:
            self._print(text)

    def restart_clock(self, iteration: int = 0) -> None:
        """Count time from now: called when setup is over and training begins after ``iteration``."""
        self._interval_start = self._step_start = self._clock()
        self._progress = self._bar(self._train_iters, initial=iteration)

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Do something that isn't training (``evaluate``, ``save-checkpoint``), timed by itself and kept out of the
        time per iteration; the ranks' times are printed afterwards.
        """
        start = self._clock()
        self._progress.clear()
        with self.timers(name, level=0):
            yield
        self.phase_times(name)
        spent = self._clock() - start
        self._interval_start += spent
        self._step_start += spent
        self._progress.leave_out(spent)

    def phase_times(self, *names: str) -> None:
        """Print the ranks' times of level-0 timers that have run, and forget them. A collective."""
        self.say(timer_report(self._speaker.gather(self.timers.take(*names)), option=self._config.timing_log_option))

    def step(self, step: StepRecord) -> None:
        """Take in a finished step; every ``--log-interval`` iterations print the log line and what goes with it."""
        self._totals.add(step)
        self._curves.step(step)
        if self._config.log_memory_to_tensorboard and self._curves.wants(step.iteration):
            self._curves.scalars(memory_scalars(self._speaker.device), iteration=step.iteration)
        if step.iteration % self._config.log_interval == 0:
            self._log_interval(step)
        self._show_progress(step)

    def _log_interval(self, step: StepRecord) -> None:
        totals, seconds = self._totals, self._clock() - self._interval_start
        speed = self._scale.throughput(samples=totals.samples, seconds=seconds)
        shown = speed.tflops_per_device if self._config.log_throughput else None
        line = TrainingLine(
            time=self._now(),
            step=step,
            train_iters=self._train_iters,
            totals=totals,
            seconds_per_iteration=seconds / totals.iterations,
            tflops_per_device=shown,
        )
        self.say(training_line(line))
        if self._config.log_throughput:
            self.say(throughput_line(speed, self._scale))
        if not self._memory_told:
            self._tell_memory(step.iteration)
        times = self._speaker.gather(self.timers.take()) if self.timers.level > 0 else []
        self.say(timer_report(times, option=self._config.timing_log_option, iterations=totals.iterations))
        if self._config.log_timers_to_tensorboard:
            self._curve_times(
                step.iteration, line.seconds_per_iteration, speed, longest(times, iterations=totals.iterations)
            )
        self._totals = IntervalTotals()
        self._interval_start = self._clock()

    def _tell_memory(self, iteration: int) -> None:
        """Memory of the ranks of the first replica, by the rank that knows about the progress line. A collective."""
        mine = memory_use(self._speaker.device) if self._speaker.is_first_replica else {}
        for rank, use in enumerate(self._speaker.gather({kind: float(size) for kind, size in mine.items()})):
            if use:
                self.say(memory_line(use, rank=rank, iteration=iteration))
        self._memory_told = True

    def _curve_times(self, iteration: int, seconds: float, speed: Throughput, times: Mapping[str, float]) -> None:
        values = {"iteration-time": seconds, **{f"{name}-time": value for name, value in times.items()}}
        if self._config.log_throughput:
            values["throughput"] = speed.tflops_per_device
            values["tokens-per-second"] = speed.tokens_per_second
            if speed.utilization is not None:
                values["mfu"] = speed.utilization
        self._curves.scalars(values, iteration=iteration)

    def _show_progress(self, step: StepRecord) -> None:
        now = self._clock()
        seconds, self._step_start = now - self._step_start, now
        # The first step also builds caches, so it enters the average like any other but soon fades.
        previous = seconds if self._recent_seconds is None else self._recent_seconds
        self._recent_seconds = 0.9 * previous + 0.1 * seconds
        speed = step.global_batch_size * self._scale.tokens_per_sample / self._recent_seconds
        losses = [f"loss {loss:.4f}" for loss in list(step.losses.values())[:1] if loss is not None]
        self._progress.show(step.iteration, *losses, f"{speed:,.0f} tokens/s")

    def _bar(self, total: int | None, *, initial: int = 0) -> ProgressBar:
        return ProgressBar(total, initial=initial, stream=self._terminal, enabled=self._speaker.is_last)

    def evaluating(self, batches: Iterable[Batch], *, total: int | None) -> Iterator[Batch]:
        """The batches of an evaluation, with a line on how far it is. ``total``: how many, None when unknown."""
        bar = self._bar(total)
        for done, batch in enumerate(batches, start=1):
            yield batch
            bar.show(done, "evaluation" if total else f"evaluation, batch {done:,}")
        bar.clear()

    def validation(
        self, where: str, losses: Mapping[str, float], *, iteration: int, consumed_samples: int, data_set: str = ""
    ) -> None:
        """Print validation losses and add them to the curves (``where``: see :func:`metrics.validation_block`).

        ``data_set``: the name of one of several validation sets.
        """
        self.say(validation_block(f"{where} ({data_set})" if data_set else where, losses))
        if not where.endswith("on test set"):
            self._curves.validation(losses, iteration=iteration, consumed_samples=consumed_samples, data_set=data_set)

    def close(self) -> None:
        """Leave the terminal clean and end the event file."""
        self._progress.clear()
        self._curves.close()
        if self._log_failed and self._out is None:  # Python's flush at exit would fail, and the exit code say so
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def _print(self, text: str) -> None:
        if text:
            self._progress.clear()
            stream = self._out or sys.stdout
            try:
                stream.write(text + "\n")
                stream.flush()
            except BrokenPipeError:  # nobody listens any more
                raise
            except OSError as error:  # a full disk under a log file
                if not self._log_failed:
                    logger.warning("the log can't be written (%s): training goes on", error.strerror)
                self._log_failed = True
