"""Reasons to end a run before its last iteration: an interval, a duration, a signal, a loss that is not finite."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from megatron.core.parallel.environment import EXIT_SIGNALS
from megatron.errors import MegatronError

if TYPE_CHECKING:
    from megatron.config.training import TrainingConfig

Highest = Callable[[Sequence[int]], Sequence[int]]
"""Element-wise maximum over all ranks."""


class ExitWatch:
    """Decides after each step whether to save and exit, by the time and signal that all ranks agree on: or some would
    exit while others wait for them.

    ``highest``: a collective; it is called only when the settings depend on time or signals.
    """

    def __init__(
        self,
        training: TrainingConfig,
        *,
        highest: Highest = list,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
    ) -> None:
        self._training = training
        self._highest = highest
        self._clock = clock
        self._started = clock() if started is None else started
        self._signal = 0

    @contextmanager
    def catching_signals(self) -> Iterator[None]:
        """With ``--exit-signal-handler``, record EXIT_SIGNALS during the block; they don't end the process."""
        if not self._training.exit_signal_handler:
            yield
            return
        before = {number: signal.signal(number, self._note) for number in EXIT_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Launchers and terminals often send a signal twice; the second one must not interrupt the save.
        self._signal = number

    def reason(self, iteration: int) -> str | None:
        """The reason to save and exit after ``iteration``, for the log, the same on every rank; None to continue."""
        training = self._training
        seconds, number = int(self._clock() - self._started), self._signal
        if training.exit_signal_handler or training.exit_duration_in_mins is not None:
            seconds, number = self._highest([seconds, number])
        if number:
            return f"exiting program after receiving {signal.Signals(number).name}."
        if training.exit_duration_in_mins is not None and seconds / 60 > training.exit_duration_in_mins:
            return f"exiting program after {seconds / 60:.1f} minutes"
        if training.exit_interval and iteration % training.exit_interval == 0:
            return f"exiting program at iteration {iteration}"
        return None


class NonFiniteError(MegatronError):
    """A loss or gradient norm that is infinite or NaN."""


def check_finite(
    losses: Mapping[str, float], *, iteration: int, consumed_samples: int, global_batch_size: int, learning_rate: float
) -> None:
    """Raise NonFiniteError when a loss is NaN or infinite, before the optimizer spreads it over the weights.

    ``consumed_samples`` counts the samples before this batch.
    """
    bad = {name: loss for name, loss in losses.items() if not math.isfinite(loss)}
    if bad:
        values = ", ".join(f"{name} is {loss}" for name, loss in bad.items())
        last = consumed_samples + global_batch_size - 1
        raise NonFiniteError(
            f"{values} at iteration {iteration} (samples {consumed_samples} to {last}, "
            f"learning rate {learning_rate:.3E}); the weights are unchanged since the last step. "
            "Look at the grad norm in the lines before: if it grew, lower --lr, lengthen --lr-warmup-iters or set "
            "--clip-grad; if it was steady, look at those samples. Resume from the last checkpoint, or pass "
            "--no-check-for-nan-in-loss-and-grad to continue regardless."
        )


def nonfinite_gradient_error(
    parameters: Sequence[str], *, iteration: int, consumed_samples: int, global_batch_size: int
) -> NonFiniteError:
    """The error for gradients that are NaN or infinite although the loss is finite; ``parameters``: the first."""
    last = consumed_samples + global_batch_size - 1
    return NonFiniteError(
        f"the gradient of {', '.join(parameters)} is not finite at iteration {iteration} (samples {consumed_samples} "
        f"to {last}), though the loss is; the weights are unchanged since the last step. Lower --lr or look at those "
        "samples, and resume from the last checkpoint; with --no-check-for-nan-in-loss-and-grad such steps are skipped."
    )
