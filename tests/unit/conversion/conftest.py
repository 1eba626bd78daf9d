"""Random models of every family, as folders that transformers wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
            model = random_model(*MODELS[name])
            model.save_pretrained(path)
            if MODELS[name][0] == "olmo_hybrid":
                write_as_released(model, path)
        return path

    return folder


def write_as_released(model: Any, folder: Path) -> None:
    """Write the weights of an OLMo Hybrid as its released files name and divide them, and transformers does not."""
    from safetensors.torch import save_file

    nets = model.config
    keys, values = (
        nets.linear_num_key_heads * nets.linear_key_head_dim,
        nets.linear_num_value_heads * nets.linear_value_head_dim,
    )
    tensors = dict[str, Any]()
    for name, tensor in model.state_dict().items():
        if name.endswith(".conv1d.weight"):
            parts = zip("qkv", tensor.split([keys, keys, values]), strict=True)
            tensors |= {name.replace("conv1d", f"{letter}_conv1d"): part.contiguous() for letter, part in parts}
        elif name != "lm_head.weight" or not nets.tie_word_embeddings:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
