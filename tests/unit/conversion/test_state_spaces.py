"""Mamba-2 in its authors' files, whose settings have other names and no ``model_type``."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.hybrid import HybridConfig
from megatron.config.mamba import MambaConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.formats import config_from_model, format_of
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.errors import CheckpointError
from tests.harness.published import random_model
from tests.harness.sentences import expect_error
from tests.published.hybrids import MAMBA2

SETTINGS: dict[str, Any] = {
    "d_model": 48,
    "n_layer": 3,
    "vocab_size": 101,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 6, "headdim": 12, "ngroups": 2},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


def write(folder: Path, **changed: Any) -> Any:
    """A folder of theirs; returns transformers' model with the same weights."""
    model = random_model("mamba2", {**MAMBA2, "vocab_size": 112, "tie_word_embeddings": True})
    state = {name.replace(".embeddings.", ".embedding."): tensor for name, tensor in model.state_dict().items()}
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **changed}))
    return model


def test_there_and_as_transformers_names_it(tmp_path: Path) -> None:
    """The published Mamba-2 models were refused for their settings, and transformers doesn't read their embeddings."""
    model = write(tmp_path / "theirs")
    said: list[str] = []
    convert(Conversion("hf", tmp_path / "theirs", "megatron", tmp_path / "ours"), said.append)
    assert any(line.startswith("proof: largest difference") for line in said)
    found = read_huggingface(tmp_path / "theirs")
    assert MambaConfig.among(found.groups).mamba_num_groups == 2
    assert found.model.vocab_size == 112
    convert(Conversion("megatron", tmp_path / "ours", "hf", tmp_path / "back"), said.append)
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert (written["model_type"], written["num_heads"], written["state_size"]) == ("mamba2", 8, 6)
    assert torch.equal(
        found.tensors["decoder.layers.1.mixer.D"].make(), model.state_dict()["backbone.layers.1.mixer.D"]
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"ssm_cfg": {}},
        {"attn_layer_idx": [1]},
        {"d_intermediate": 64},
        {"ssm_cfg": {**SETTINGS["ssm_cfg"], "norm_before_gate": True}},
    ],
    ids=["Mamba-1", "attention", "MLP", "gate"],
)
def test_what_they_have_and_is_not_available(changed: dict[str, Any], tmp_path: Path) -> None:
    """Such models would be read as others."""
    write(tmp_path / "theirs", **changed)
    with expect_error(CheckpointError):
        read_huggingface(tmp_path / "theirs")


@pytest.mark.parametrize("limits", [None, (2.0, 1e30)])
def test_limits_that_are_written_are_read(
    limits: tuple[float, float] | None, model_folder: Callable[[str], Path]
) -> None:
    """A Nemotron-H that was trained here has no lowest step; it was written as 0, and the files were then refused."""
    found = read_huggingface(model_folder("nemotron_h"))
    groups = [
        dataclasses.replace(each, mamba_time_step_limits=limits) if isinstance(each, MambaConfig) else each
        for each in found.groups
    ]
    written = config_from_model(found.model, groups, dtype="float32", source={}, tokens={})
    published = format_of("nemotron_h")
    assert published is not None
    again = published.groups_from_config(published.reader(written, where="config.json"), (), where="config.json")
    assert MambaConfig.among(again).mamba_time_step_limits == limits


@pytest.mark.parametrize("limit", [[0.0, 0.45], [0.6, float("inf")], [0.4, float("inf")]], ids=["high", "low", "none"])
def test_a_limit_that_programs_read_otherwise(
    limit: list[float], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers' Nemotron-H ignores ``time_step_limit`` and others obey it, so that a model with limits answered
    otherwise than where it was trained, and nothing was said.
    """
    shutil.copytree(model_folder("nemotron_h"), tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "time_step_limit": limit}))
    if limit == [0.4, float("inf")]:  # what time_step_min says
        assert read_huggingface(tmp_path / "theirs").groups == read_huggingface(model_folder("nemotron_h")).groups
        return
    with expect_error(CheckpointError):
        read_huggingface(tmp_path / "theirs")


@pytest.mark.parametrize("changed", [{}, {"normalization": "LayerNorm"}], ids=["limits", "limits and norms"])
def test_a_hybrid_of_no_type_is_compared_with_hybrids(
    changed: dict[str, Any], model_folder: Callable[[str], Path]
) -> None:
    """An upper limit of the time step, which no Nemotron-H has, was hidden: the nearest type was Mamba-2's, which lacks
    attention, or a decoder without a pattern, of whose settings fewer were compared.
    """
    found = read_huggingface(model_folder("nemotron_h"))
    groups = [
        dataclasses.replace(each, mamba_time_step_limits=(0.0, 0.1)) if isinstance(each, MambaConfig) else each
        for each in found.groups
    ]
    norms = ["norms are not RMSNorm"] if changed else []
    with expect_error(CheckpointError, "nemotron_h", "--mamba-time-step-limits is (0.0, 0.1)", *norms):
        config_from_model(dataclasses.replace(found.model, **changed), groups, dtype="float32", source={}, tokens={})


def test_a_pattern_of_no_type_is_all_that_is_said_of_it(model_folder: Callable[[str], Path]) -> None:
    """A hybrid with gated delta nets was told that it lacks a setting, too, which only the published model has."""
    found = read_huggingface(model_folder("nemotron_h"))
    groups = [
        dataclasses.replace(each, hybrid_layer_pattern="M*G-M") if isinstance(each, HybridConfig) else each
        for each in found.groups
    ]
    with expect_error(CheckpointError, "nemotron_h", "it has gated-delta-net layers") as caught:
        config_from_model(found.model, groups, dtype="float32", source={}, tokens={})
    assert "layers_block_type" not in str(caught.value)
