"""Weights & Biases gets TensorBoard's names; without the package, the flag that asks for it says so."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatron.config.reporting import ReportingConfig
from megatron.errors import ConfigError
from megatron.training.reporting.curves import Writer
from megatron.training.reporting.wandb import WandbWriter
from tests.harness.sentences import expect_error


class FakeRun:
    """What wandb.init returns, as far as it is used."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.config: dict[str, str] = {}
        self.finished = False

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished = True


def install(monkeypatch: pytest.MonkeyPatch, run: FakeRun) -> dict[str, Any]:
    """Put a wandb module in place; returns what init was called with."""
    asked: dict[str, Any] = {}
    module = types.ModuleType("wandb")
    vars(module).update(
        Error=type("Error", (Exception,), {}), init=lambda **options: asked.update(options) or run, Html=str
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return asked


def test_names_and_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = FakeRun()
    asked = install(monkeypatch, run)
    config = ReportingConfig(wandb_project="p", wandb_exp_name="n", wandb_entity="e")
    writer: Writer = WandbWriter(config, save=str(tmp_path))
    writer.settings({"lr": 0.1})
    writer.add_scalar("lm loss", 2.5, 7)
    writer.add_scalar("lm loss vs samples", 2.5, 70)
    writer.add_text("sample 1", "a <b>\n", 8)
    writer.flush()
    writer.close()
    assert asked == {"project": "p", "entity": "e", "name": "n", "dir": str(tmp_path / "wandb")}
    assert run.logged == [
        ({"lm loss": 2.5}, 7),
        ({"samples vs steps": 70}, 7),
        ({"sample 1": "<pre>a &lt;b&gt;\n</pre>"}, 8),
    ]
    assert run.config == {"lr": "0.1"} and run.finished


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with expect_error(ConfigError, "--wandb-project p"):
        WandbWriter(ReportingConfig(wandb_project="p"), save=None)
