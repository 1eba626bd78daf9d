"""ONNX graphs: onnxruntime computes from them what the source computes, however texts are divided over calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxscript", reason="ONNX graphs are written with the extra onnx")
pytest.importorskip("onnxruntime", reason="onnxruntime proves ONNX graphs; it is in the extra onnx")

import onnx

from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.onnx import texts, writing
from megatron.core.conversion.onnx.graph import onnx_format
from megatron.core.conversion.proof import ProofError
from megatron.errors import CheckpointError
from tests.harness.published import random_model
from tests.harness.sentences import expect_error
from tests.published import FIRST, MODELS
from tests.unit.conversion.test_families import do

Folder = Callable[[str], Path]

RECURRENT = ("mamba2", "nemotron_h", "bamba", "granitemoehybrid", "qwen3_next", "olmo_hybrid")


def smaller(name: str, folder: Path, **settings: Any) -> Path:
    """A model of ``MODELS`` with fewer layers: tracing takes seconds for each."""
    family, of_case = MODELS[name]
    random_model(family, {**of_case, **settings}).save_pretrained(folder)
    return folder


def sizes(graph: onnx.ModelProto) -> dict[str, list[str | int]]:
    ends = [*graph.graph.input, *graph.graph.output]
    return {each.name: [dim.dim_param or dim.dim_value for dim in each.type.tensor_type.shape.dim] for each in ends}


def test_a_decoder_goes_on_with_texts(tmp_path: Path) -> None:
    """Windows, sinks, shared heads and experts with biases, in one layer of each kind; texts in parts and with padding.
    Names are those that optimum and onnxruntime's programs look for.
    """
    kinds = ["sliding_attention", "full_attention"]
    source = smaller("gpt_oss", tmp_path / "source", num_hidden_layers=2, layer_types=kinds)
    said = do("hf", source, "onnx", tmp_path / "graphs")
    assert any(line.startswith("proof: onnxruntime") and "4 ways" in line for line in said)
    found = sizes(onnx.load(tmp_path / "graphs" / "model.onnx"))
    assert list(found)[:4] == ["input_ids", "attention_mask", "position_ids", "past_key_values.0.key"]
    assert found["logits"] == ["batch_size", "sequence_length", 101]
    assert found["past_key_values.1.value"][::2] == ["batch_size", "past_sequence_length"]
    assert found["present.1.value"][2] == "past_sequence_length + sequence_length"
    assert (tmp_path / "graphs" / "config.json").exists()


def test_bert_with_weights_beside_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer takes two inputs that are one tensor for one: types of tokens were then read from their ids. A graph
    of more than 2 GB can't hold its weights.
    """
    monkeypatch.setattr(writing, "_IN_ONE_FILE", 1000)
    do("hf", smaller("bert", tmp_path / "source", num_hidden_layers=1), "onnx", tmp_path / "graphs")
    assert (tmp_path / "graphs" / "model.onnx.data").exists()
    found = sizes(onnx.load(tmp_path / "graphs" / "model.onnx", load_external_data=False))
    assert found["last_hidden_state"][:2] == ["batch_size", "sequence_length"]


@pytest.mark.slow(reason="ten seconds each")
@pytest.mark.parametrize("name", sorted({*FIRST.values()} - {*RECURRENT}))
def test_every_type(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """A setting that attention of graphs leaves out is another model there."""
    said = do("hf", model_folder(name), "onnx", tmp_path / "graphs")
    assert any(line.startswith("proof: onnxruntime") for line in said)


@pytest.mark.parametrize("name", [*RECURRENT, "phi3 longrope, long", "llama dynamic, short"])
def test_what_has_no_graph_is_refused(name: str, model_folder: Folder) -> None:
    """Before the tracer's pages of messages, and by the reason."""
    with expect_error(CheckpointError, "ONNX", "--to hf"):
        onnx_format(read_huggingface(model_folder(name)))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter's own error is about its modules."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with expect_error(CheckpointError, "pip install onnx onnxscript onnxruntime"):
        do("hf", tmp_path, "onnx", tmp_path / "graphs")


def test_a_wrong_graph_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is by the files as onnxruntime runs them, in other sizes than those that were traced."""
    scores = texts._scores
    monkeypatch.setattr(texts, "_scores", lambda *given: scores(*given) * 1.01)
    source = smaller("gpt2", tmp_path / "source", n_layer=1)
    with expect_error(ProofError, "different models", hide=[r"difference \S+", r"up to [\d.]+"]):
        do("hf", source, "onnx", tmp_path / "graphs")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
