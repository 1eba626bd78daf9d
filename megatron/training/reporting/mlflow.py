"""Curves in MLflow, an optional package, under the same names as in TensorBoard."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.errors import RESTART_CANNOT_HELP, ConfigError, exit_code_of

if TYPE_CHECKING:
    from megatron.config.reporting import ReportingConfig

logger = logging.getLogger(__name__)

_AGAINST_SAMPLES = " vs samples"
_POINTS = 500  # which are sent at a time; MLflow's server takes at most 1000
_LONGEST = 6000  # characters of a setting that MLflow's server takes
_WAITING = 1000  # requests that wait for the server at most
_SECONDS_AT_END = 30.0  # that the end of a run waits for the server
_AT_OPENING = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own settings wait for a server for some minutes: in a thread they may, not before training."""


def open_mlflow(config: ReportingConfig) -> MLflowWriter | None:
    """Writer into an MLflow run of ``--mlflow-experiment``; None without the flag or, after a warning, when its server
    is away: a run that starts again at night goes on without its curves.
    """
    try:
        return None if config.mlflow_experiment is None else MLflowWriter(config)
    except OSError as error:
        logger.warning("%s: training continues without its curves; they resume when the run is restarted", error)
        return None


class MLflowWriter:
    """Writes the points of a TensorBoard writer to an MLflow run, some hundred at a time or when they are flushed.

    MLflow draws against steps, which are iterations; points against samples are left out. Names have no characters that
    MLflow refuses. Texts are artifacts. A thread sends everything, so that training never waits for the server.
    """

    def __init__(self, config: ReportingConfig) -> None:
        """Start an MLflow run.

        Raises ConfigError when the package is missing or the experiment can't be opened, OSError when the server is
        away.
        """
        asked = f"--mlflow-experiment {config.mlflow_experiment}"
        try:
            import mlflow
            from mlflow.entities import Metric, Param
        except ModuleNotFoundError:
            raise ConfigError(
                f"{asked} needs the mlflow package, which is not installed; "
                "pip install mlflow-skinny, or leave the flag out"
            ) from None
        self._metric, self._param = Metric, Param
        self._points: list[Any] = []
        self._failure: Exception | None = None
        self._requests: queue.Queue[Callable[[], object] | None] = queue.Queue(_WAITING)
        try:
            with _impatient():
                self._open(mlflow, config)
        except Exception as error:  # each store has its own: a database's, a connection's, MLflow's
            where = config.mlflow_tracking_uri or "$MLFLOW_TRACKING_URI"
            reason = str(error).strip().splitlines()
            said = f"{asked} can't be opened at {where} ({reason[0] if reason else type(error).__name__})"
            if _is_away(error):
                raise OSError(said) from error
            raise ConfigError(
                f"{said}: start its server, name another --mlflow-tracking-uri, or leave the flag out"
            ) from error
        self._sender = threading.Thread(target=self._send, name="mlflow", daemon=True)
        self._sender.start()

    def _open(self, mlflow: Any, config: ReportingConfig) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=config.mlflow_tracking_uri)
        experiment = self._client.get_experiment_by_name(str(config.mlflow_experiment))
        number = experiment.experiment_id if experiment else self._client.create_experiment(config.mlflow_experiment)
        self._run = self._client.create_run(number, run_name=config.mlflow_run_name).info.run_id

    def _send(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                request()
            except Exception as error:  # as above; the next call reports it
                self._failure = error
                return

    def _later(self, request: Callable[[], object] | None) -> None:
        """Let the thread send a request. Raises what an earlier one met."""
        if self._failure is not None:
            raise self._failure
        try:
            self._requests.put_nowait(request)
        except queue.Full:
            raise TimeoutError(f"{_WAITING} requests wait for its server") from None

    def settings(self, values: Mapping[str, object]) -> None:
        """Every setting as a parameter of the run."""
        every = [self._param(name, str(value)[:_LONGEST]) for name, value in values.items()]
        for start in range(0, len(every), 100):  # as many as MLflow takes at a time
            some = every[start : start + 100]
            self._later(partial(self._client.log_batch, self._run, params=some))

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One point of the curve ``tag``."""
        if tag.endswith(_AGAINST_SAMPLES):
            return
        now = int(time.time() * 1000)
        self._points.append(self._metric(tag.replace("%", " percent"), float(scalar_value), now, global_step))
        if len(self._points) >= _POINTS:
            self.flush()

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        """A text of an iteration, as a file of the run."""
        name = f"texts/iteration {global_step:08d}/{tag}.txt"
        self._later(partial(self._client.log_text, self._run, text_string, name))

    def flush(self) -> None:
        """Send the points that wait."""
        points, self._points = self._points, []
        if points:
            self._later(partial(self._client.log_batch, self._run, metrics=points))

    def close(self) -> None:
        """Send what waits, and end the run; not longer than for half a minute."""
        self.flush()
        self._later(partial(self._client.set_terminated, self._run))
        self._later(None)
        self._sender.join(_SECONDS_AT_END)
        if self._failure is not None:
            raise self._failure
        if self._sender.is_alive():
            raise TimeoutError(f"its server has not taken everything in {_SECONDS_AT_END:.0f} s")


@contextmanager
def _impatient() -> Iterator[None]:
    """Let MLflow give up soon during the block, unless its variables say otherwise."""
    missing = {name: value for name, value in _AT_OPENING.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _is_away(error: BaseException | None) -> bool:
    """Whether a connection failed in a way that may pass, as requests say by an OSError that is no ValueError."""
    while error is not None:
        if isinstance(error, OSError) and not isinstance(error, ValueError):
            return exit_code_of(error) != RESTART_CANNOT_HELP
        error = error.__cause__ or error.__context__
    return False
