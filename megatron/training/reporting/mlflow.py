"""Curves in MLflow, an optional package, under the same names as in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config.reporting import ReportingConfig

_AGAINST_SAMPLES = " vs samples"
_POINTS = 500  # which are sent at a time; MLflow's server takes at most 1000
_LONGEST = 6000  # characters of a setting that MLflow's server takes


class MLflowWriter:
    """Writes the points of a TensorBoard writer to an MLflow run, some hundred at a time or when they are flushed.

    MLflow draws against steps, which are iterations; points against samples are left out. Names have no characters that
    MLflow refuses. Texts are artifacts.
    """

    def __init__(self, config: ReportingConfig) -> None:
        """Start an MLflow run. Raises ConfigError when the package is missing or the server can't be reached."""
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
        try:
            self._client = mlflow.MlflowClient(tracking_uri=config.mlflow_tracking_uri)
            experiment = self._client.get_experiment_by_name(str(config.mlflow_experiment))
            number = (
                experiment.experiment_id if experiment else self._client.create_experiment(config.mlflow_experiment)
            )
            self._run = self._client.create_run(number, run_name=config.mlflow_run_name).info.run_id
        except Exception as error:  # each store has its own: a database's, a connection's, MLflow's
            where = config.mlflow_tracking_uri or "$MLFLOW_TRACKING_URI"
            reason = str(error).strip().splitlines()
            raise ConfigError(
                f"{asked} can't be opened at {where} ({reason[0] if reason else type(error).__name__}): "
                "start its server, name another --mlflow-tracking-uri, or leave the flag out"
            ) from error

    def settings(self, values: Mapping[str, object]) -> None:
        """Every setting as a parameter of the run."""
        every = [self._param(name, str(value)[:_LONGEST]) for name, value in values.items()]
        for start in range(0, len(every), 100):  # as many as MLflow takes at a time
            self._client.log_batch(self._run, params=every[start : start + 100])

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
        self._client.log_text(self._run, text_string, name)

    def flush(self) -> None:
        """Send the points that wait."""
        points, self._points = self._points, []
        if points:
            self._client.log_batch(self._run, metrics=points)

    def close(self) -> None:
        """Send what waits, and end the run."""
        self.flush()
        self._client.set_terminated(self._run)
