"""Random models of every family, as folders that transformers wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.published import random_model
from tests.published import MODELS

pytest.importorskip("transformers", reason="conversion is proven with the dev extra's transformers")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of ``MODELS``, written once."""
    base = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = base / name.replace(" ", "-").replace(",", "")
        if not path.exists():
            random_model(*MODELS[name]).save_pretrained(path)
        return path

    return folder


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
