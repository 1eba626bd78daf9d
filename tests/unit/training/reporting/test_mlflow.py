"""MLflow gets TensorBoard's names, in batches; without the package, the flag that asks for it says so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.config.reporting import ReportingConfig
from megatron.errors import ConfigError
from megatron.training.reporting.curves import Curves, Writer, open_writers
from megatron.training.reporting.mlflow import MLflowWriter, open_mlflow
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


class Server:
    """Stands for MLflow's client and entities; ``away``: it answers no more."""

    def __init__(self) -> None:
        self.away, self.requests = False, list[str]()
        self.reached, self.held = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*_: object, **__: object) -> mock.MagicMock:
            if self.away:
                raise RuntimeError("API request failed") from ConnectionRefusedError()
            self.requests.append(name)
            if name == "log_text":
                self.reached.set()
                self.held.wait(60)
            return mock.MagicMock()

        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """In place of the package, whether it is installed or not."""
    server = Server()
    monkeypatch.setitem(sys.modules, "mlflow", mock.MagicMock(MlflowClient=lambda **_: server))
    monkeypatch.setitem(sys.modules, "mlflow.entities", mock.MagicMock())
    return server


def test_a_server_that_is_away_when_the_run_starts(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A run that started again at night ended with exit code 2, for which no scheduler starts again."""
    server.away = True
    config = ReportingConfig(mlflow_experiment="e", mlflow_tracking_uri="http://127.0.0.1:9")
    assert open_mlflow(config) is None
    assert "http://127.0.0.1:9" in caplog.text and "training continues" in caplog.text


def test_training_waits_for_no_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Each request to one that was away or slow held all ranks up, for minutes; then its curves end with a warning."""
    config = ReportingConfig(mlflow_experiment="e")
    curves = Curves(config, open_writers(config, save=None), world_size=1)
    curves.texts({"sample": "text"}, iteration=1)
    assert server.reached.wait(60)
    curves.scalars({"lm loss": 1.0}, iteration=2)  # while the text before is held up
    server.away = True
    server.held.set()
    curves.close()
    assert server.requests[-1] == "log_text"
    assert caplog.text.count("training continues") == 1
