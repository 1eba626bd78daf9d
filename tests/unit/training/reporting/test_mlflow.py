"""MLflow gets TensorBoard's names, in batches; without the package, the flag that asks for it says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.config.reporting import ReportingConfig
from megatron.errors import ConfigError
from megatron.training.reporting.curves import Writer
from megatron.training.reporting.mlflow import MLflowWriter
from tests.harness.sentences import expect_error


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError's traceback said nothing of the flag."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with expect_error(ConfigError, "--mlflow-experiment", exit_code=2):
        MLflowWriter(ReportingConfig(mlflow_experiment="e"))


@pytest.mark.filterwarnings("ignore")  # MLflow's own use of its database
def test_curves_settings_and_texts(tmp_path: Path) -> None:
    """By MLflow itself: what its client reads back of a run in a database."""
    mlflow = pytest.importorskip("mlflow", reason="the mlflow package is optional")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no database")
    address = f"sqlite:///{tmp_path}/runs.db"
    config = ReportingConfig(mlflow_experiment="e", mlflow_run_name="n", mlflow_tracking_uri=address)
    writer: Writer = MLflowWriter(config)
    writer.settings({"lr": 0.1, **{f"flag {number}": "x" * 9000 for number in range(150)}})
    for step in range(1200):
        writer.add_scalar("lm loss", 2.5 - step / 1000, step)
        writer.add_scalar("lm loss vs samples", 2.5, 10 * step)
    writer.close()
    client = mlflow.MlflowClient(tracking_uri=address)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["lr"]) == ("n", "FINISHED", "0.1")
    assert len(run.data.params) == 151
    history = client.get_metric_history(run.info.run_id, "lm loss")
    assert [point.step for point in sorted(history, key=lambda point: point.step)] == list(range(1200))


def test_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before training, by its address."""
    pytest.importorskip("mlflow", reason="the mlflow package is optional")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with expect_error(ConfigError, "http://127.0.0.1:9", exit_code=2, hide=[r"\(.*\)"]):
        MLflowWriter(ReportingConfig(mlflow_experiment="e", mlflow_tracking_uri="http://127.0.0.1:9"))
