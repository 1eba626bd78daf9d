"""Scalars under Megatron's names, in TensorBoard event files or nowhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron.errors import RESTART_CANNOT_HELP, ConfigError, exit_code_of
from megatron.training.reporting.metrics import StepRecord, has_perplexity, perplexity

if TYPE_CHECKING:
    from megatron.config.reporting import ReportingConfig

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """The part of torch's SummaryWriter that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One point of the curve ``tag``."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """A text under ``tag``."""

    def flush(self) -> None:
        """Write what is queued."""

    def close(self) -> None:
        """Write what is queued and end the file."""


def open_writer(config: ReportingConfig) -> Writer | None:
    """Writer into ``--tensorboard-dir``; None when no folder is named. Call it on the last rank only.

    Raises ConfigError when the tensorboard package is missing or the folder can't be made or written. A full disk and
    the like are a warning, and there is no writer.
    """
    if config.tensorboard_dir is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise ConfigError(
            f"--tensorboard-dir {config.tensorboard_dir} needs the tensorboard package, which is not installed; "
            "pip install tensorboard, or leave the flag out"
        ) from None
    _quiet_about_event_files()
    try:
        Path(config.tensorboard_dir).mkdir(parents=True, exist_ok=True)
        writer: Writer = SummaryWriter(config.tensorboard_dir, max_queue=config.tensorboard_queue_size)
    except OSError as error:
        failed = f"--tensorboard-dir {config.tensorboard_dir} cannot be written"
        if exit_code_of(error) == RESTART_CANNOT_HELP:
            raise ConfigError(f"{failed}: {error.strerror}") from None
        logger.warning(
            "%s (%s): training goes on without its curves; they resume when the run is restarted",
            failed,
            error.strerror or error,
        )
        return None
    return writer


def _quiet_about_event_files() -> None:
    """Let the threads of event files end without a traceback: ``Writers`` warns of the same error."""
    others = threading.excepthook

    def report(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            others(failed)

    threading.excepthook = report


class Writers:
    """Several writers as one. A writer that fails is left out from then on, with a warning: no curve is worth a run."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = list(writers)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One point of the curve ``tag``."""
        self._each(lambda writer: writer.add_scalar(tag, scalar_value, global_step))

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """A text under ``tag``."""
        self._each(lambda writer: writer.add_text(tag, text_string, global_step))

    def flush(self) -> None:
        """Write what is queued."""
        self._each(lambda writer: writer.flush())

    def close(self) -> None:
        """End all of them."""
        self._each(lambda writer: writer.close())

    def _each(self, write: Callable[[Writer], None]) -> None:
        for writer in list(self._writers):
            try:
                write(writer)
            except Exception as error:  # a full disk, a lost service: each library has its own
                self._writers.remove(writer)
                name = type(writer).__name__
                logger.warning(
                    "%s failed (%s): training goes on, but its curves end here, also if the cause is removed; they "
                    "resume when the run is restarted",
                    name,
                    error,
                )


class TensorBoard:
    """Megatron's curve names; every method does nothing without a writer.

    Values of a step go against iterations under their name and against samples under ``NAME vs samples``.
    """

    def __init__(self, config: ReportingConfig, writer: Writer | None, *, world_size: int) -> None:
        self._config = config
        self._writer = writer
        self._world_size = world_size

    def settings(self, values: Mapping[str, object], *, iteration: int) -> None:
        """Every setting of the run as a text."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_text(name, str(value), iteration)

    def wants(self, iteration: int) -> bool:
        """Whether this iteration's values are written (``--tensorboard-log-interval``)."""
        return self._writer is not None and iteration % self._config.tensorboard_log_interval == 0

    def step(self, step: StepRecord) -> None:
        """Values of one optimizer step."""
        if not self.wants(step.iteration):
            return
        values: dict[str, float | None] = {
            "learning-rate": step.learning_rate,
            "decoupled-learning-rate": step.decoupled_learning_rate,
            "batch-size": step.global_batch_size,
            **step.losses,
            "loss-scale": step.loss_scale if self._config.log_loss_scale_to_tensorboard else None,
            "world-size": self._world_size if self._config.log_world_size_to_tensorboard else None,
            "grad-norm": step.grad_norm,
            "num-zeros": step.num_zeros,
            "params-norm": step.params_norm,
        }
        for name, value in values.items():
            if value is not None:
                self._both(name, value, step.iteration, step.consumed_samples)

    def validation(
        self, losses: Mapping[str, float], *, iteration: int, consumed_samples: int, data_set: str = ""
    ) -> None:
        """Validation losses, and their perplexities with ``--log-validation-ppl-to-tensorboard``."""
        of = f" {data_set}" if data_set else ""
        for name, loss in losses.items():
            self._both(f"{name} validation{of}", loss, iteration, consumed_samples)
            if self._config.log_validation_ppl_to_tensorboard and has_perplexity(name):
                self._both(f"{name} validation ppl{of}", perplexity(loss), iteration, consumed_samples)
        if self._writer is not None:
            self._writer.flush()

    def scalars(self, values: Mapping[str, float], *, iteration: int) -> None:
        """Values that have no curve against samples: timers, throughput, memory."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration)

    def _both(self, name: str, value: float, iteration: int, samples: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, iteration)
            self._writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        """End the event file."""
        if self._writer is not None:
            self._writer.close()
