"""Scalars under Megatron's names, to TensorBoard event files, Weights & Biases, MLflow, or nowhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron.core.inference.scoring import perplexity
from megatron.errors import RESTART_CANNOT_HELP, ConfigError, exit_code_of
from megatron.training.reporting.metrics import StepRecord, has_perplexity
from megatron.training.reporting.mlflow import open_mlflow
from megatron.training.reporting.wandb import WandbWriter

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from megatron.config.reporting import ReportingConfig

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """Where curves and texts go: the part of torch's SummaryWriter that is used, and the settings of a run."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One point of the curve ``tag``."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """A text under ``tag``."""

    def settings(self, values: Mapping[str, object]) -> None:
        """Every setting of the run, before the first point."""

    def flush(self) -> None:
        """Write what is queued."""

    def close(self) -> None:
        """Write what is queued and close the file."""


def open_writers(config: ReportingConfig, *, save: str | None) -> list[Writer]:
    """The writers that the flags ask for; none is usual. Call it on the last rank only. ``save``: ``--save``.

    Raises ConfigError when a package is missing, the TensorBoard folder can't be made or written, or wandb or MLflow
    refuses. A full disk, a server of MLflow's that is away and the like are a warning, and there is no such writer.
    """
    tensorboard = open_tensorboard(config)
    writers = [] if tensorboard is None else [tensorboard]
    if config.wandb_project is not None:
        writers.append(WandbWriter(config, save=save))
    mlflow = open_mlflow(config)
    return writers if mlflow is None else [*writers, mlflow]


def open_tensorboard(config: ReportingConfig) -> Writer | None:
    """Writer into ``--tensorboard-dir``; None without the flag or, after a warning, when the disk fails."""
    if config.tensorboard_dir is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        raise ConfigError(
            f"--tensorboard-dir {config.tensorboard_dir} needs the tensorboard package, which is not installed; "
            "pip install tensorboard, or leave the flag out"
        ) from None
    _silence_event_file_threads()
    try:
        Path(config.tensorboard_dir).mkdir(parents=True, exist_ok=True)
        return TensorBoardWriter(SummaryWriter(config.tensorboard_dir, max_queue=config.tensorboard_queue_size))
    except OSError as error:
        failed = f"--tensorboard-dir {config.tensorboard_dir} cannot be written"
        if exit_code_of(error) == RESTART_CANNOT_HELP:
            raise ConfigError(f"{failed}: {error.strerror}") from None
        logger.warning(
            "%s (%s): training continues without its curves; they resume when the run is restarted",
            failed,
            error.strerror or error,
        )
        return None


class TensorBoardWriter:
    """A SummaryWriter of torch's that also writes a run's settings, as texts and for TensorBoard's HPARAMS page."""

    def __init__(self, board: SummaryWriter) -> None:
        self._board = board

    def settings(self, values: Mapping[str, object]) -> None:
        """Every setting as a text, and those that are numbers, words or switches as hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        for name, value in values.items():
            self._board.add_text(name, str(value), 0)
        plain = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
        for summary in hparams(plain, {"lm loss": None}):  # type: ignore[no-untyped-call]
            self._board._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One point of the curve ``tag``."""
        self._board.add_scalar(tag, scalar_value, global_step)

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """A text under ``tag``."""
        self._board.add_text(tag, text_string, global_step)

    def flush(self) -> None:
        """Write what is queued."""
        self._board.flush()

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._board.close()


def _silence_event_file_threads() -> None:
    """Print no traceback when an event file's thread fails: ``Curves`` warns of the same error."""
    others = threading.excepthook

    def report(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            others(failed)

    threading.excepthook = report


class Curves:
    """Megatron's curve names, written by each of ``writers``; without writers every method does nothing.

    A writer that fails is dropped with a warning: no curve is worth a run.
    """

    def __init__(self, config: ReportingConfig, writers: Iterable[Writer], *, world_size: int) -> None:
        self._config = config
        self._writers = list(writers)
        self._world_size = world_size

    def settings(self, values: Mapping[str, object]) -> None:
        """Every setting of the run as a text."""

        self._each(lambda writer: writer.settings(values))

    def wants(self, iteration: int) -> bool:
        """Whether this iteration's values are written (``--tensorboard-log-interval``)."""
        return bool(self._writers) and iteration % self._config.tensorboard_log_interval == 0

    def step(self, step: StepRecord) -> None:
        """Values of one optimizer step."""
        if not self.wants(step.iteration):
            return
        values = {
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
        self.scalars(values, iteration=step.iteration, samples=step.consumed_samples)

    def validation(
        self, losses: Mapping[str, float], *, iteration: int, consumed_samples: int, data_set: str = ""
    ) -> None:
        """Validation losses, and their perplexities with ``--log-validation-ppl-to-tensorboard``."""
        of, values = f" {data_set}" if data_set else "", dict[str, float]()
        for name, loss in losses.items():
            values[f"{name} validation{of}"] = loss
            if self._config.log_validation_ppl_to_tensorboard and has_perplexity(name):
                values[f"{name} validation ppl{of}"] = perplexity(loss)
        self.scalars(values, iteration=iteration, samples=consumed_samples)
        self._each(lambda writer: writer.flush())

    def scalars(self, values: Mapping[str, float | None], *, iteration: int, samples: int | None = None) -> None:
        """Values against iterations and, given ``samples``, against samples too, under ``NAME vs samples``; None is
        left out.
        """
        known = {name: value for name, value in values.items() if value is not None}

        def write(writer: Writer) -> None:
            for name, value in known.items():
                writer.add_scalar(name, value, iteration)
                if samples is not None:
                    writer.add_scalar(f"{name} vs samples", value, samples)

        self._each(write)

    def texts(self, values: Mapping[str, str], *, iteration: int) -> None:
        """Texts that belong to an iteration, by name."""

        def write(writer: Writer) -> None:
            for name, text in values.items():
                writer.add_text(name, text, iteration)
            writer.flush()

        self._each(write)

    def close(self) -> None:
        """Close the event file and the wandb run."""
        self._each(lambda writer: writer.close())

    def _each(self, write: Callable[[Writer], None]) -> None:
        for writer in list(self._writers):
            try:
                write(writer)
            except Exception as error:  # a full disk, a lost service: each library has its own
                self._writers.remove(writer)
                logger.warning(
                    "%s failed (%s): training continues, but its curves end here, even if the cause is removed; they "
                    "resume when the run is restarted",
                    type(writer).__name__,
                    error,
                )
