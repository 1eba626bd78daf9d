"""Files of a Hugging Face folder with settings of other types and sizes: each comes to one sentence, at once."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.formats import format_of
from megatron.core.conversion.huggingface.reading import read_config, read_huggingface, tensors_in
from megatron.core.conversion.portable import refuse_more_layers
from megatron.errors import CheckpointError, MegatronError
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.tiers import tiers

Folder = Callable[[str], Path]
VALUES: list[Any] = ["abc", True, [], [1], {}, {"factor": "x"}, float("nan"), float("inf"), -1, 0, 0.5, 1e9, 10**9]
VALUES += [10**30, 7, None]


def sentence_of(call: Callable[[], Any]) -> str | None:
    """What the call says to the user; None where it goes well. Anything else than one line fails."""
    found: MegatronError | None = None
    try:
        call()
    except MegatronError as error:
        found = error
    assert found is None or ("\n" not in str(found) and found.exit_code == 2)
    return None if found is None else str(found)


def hostile_files() -> dict[str, bytes]:
    """Contents that no settings file has."""
    return {
        "empty": b"",
        "nested": b'{"a":' * 100_000,
        "digits": b'{"a": ' + b"9" * 5000 + b"}",
        "twice": b'{"a": 1, "a": 2}',
        "latin": b'{"a": "\xe9"}',
        "list": b"[1]",
        "number": b"NaN",
    }


HYBRIDS = ["mamba2", "nemotron_h", "bamba", "granitemoehybrid", "qwen3_next", "olmo_hybrid"]
FAMILIES = ["llama 3", "gpt2", "qwen2", "bert", "t5", *HYBRIDS]


@pytest.mark.parametrize("family", tiers(FAMILIES, first=["llama 3", "t5"]))
def test_every_setting_of_every_type(family: str, model_folder: Folder, tmp_path: Path) -> None:
    """``n_layer: 1e9`` ran for minutes and ``"abc"`` ended in a TypeError; both are named by file, key and value."""
    folder = Path(shutil.copytree(model_folder(family), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    published = format_of(config["model_type"])
    assert published is not None
    kinds = published.kinds_of(config["model_type"])
    for key in [key for key in kinds if key in config or key in ("sliding_window", "tie_word_embeddings")]:
        for value in VALUES:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            said = sentence_of(lambda: read_huggingface(folder))
            if (
                (value == "abc" and str not in (kinds[key], *get_args(kinds[key])))
                or (value == [1] and kinds[key] not in (list[Any], list[int]))
                or (value in (-1, 10**30) and type(value) is int)
            ):
                shown = {"abc": '"abc"', "[1]": "a list of 1"}.get(str(value), str(value))
                expected = "describes a model of type" if key == "model_type" else f"config.json: {key} is {shown}"
                if value == [1] and get_origin(kinds[key]) is list:
                    expected = f"config.json: {key}[0] is 1"
                if family in HYBRIDS and said is not None and expected not in said:
                    expected = f"config.json says {key} = {value}"  # of some settings one value alone is available
                assert said is not None and expected in said, (key, said)
            if said is not None:
                assert str(folder) in said, said


def test_settings_of_rotary_scaling(model_folder: Folder, tmp_path: Path) -> None:
    """A missing factor was a KeyError, and a text in its place a ValueError."""
    folder = Path(shutil.copytree(model_folder("llama 3"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    wrong: dict[str, dict[str, Any]] = {
        "rope_parameters lacks factor": {"rope_type": "linear"},
        'rope_parameters: factor is "4"; expected a number': {"rope_type": "linear", "factor": "4"},
        "rope_parameters: rope_theta is NaN; expected a number": {"rope_theta": float("nan")},
        "rope_parameters: rope_type is a list of 0; expected a text": {"rope_type": []},
    }
    for message, rope in wrong.items():
        (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
        assert message in (sentence_of(lambda: read_huggingface(folder)) or "")


def said_about(folder: Path, config: dict[str, Any]) -> str:
    """What the user hears about these settings."""
    (folder / "config.json").write_text(json.dumps(config))
    return sentence_of(lambda: read_huggingface(folder)) or ""


WRONG_HYBRIDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("mamba2", {"time_step_limit": []}, ("time_step_limit = []", "two numbers")),
    (
        "mamba2",
        {"num_heads": 1 << 16, "head_dim": 1 << 24, "hidden_size": 1 << 24, "expand": 1 << 16},
        ("x 16,777,216",),
    ),
    ("nemotron_h", {"n_groups": 1 << 16, "ssm_state_size": 1 << 24, "hidden_size": 1 << 24}, ("x 16,777,216",)),
    (
        "nemotron_h",
        {"max_position_embeddings": 1 << 31},
        ("max_position_embeddings is 2147483648", "at most 2147483647"),
    ),
    ("granitemoehybrid with experts", {"num_experts_per_tok": 0}, ("num_experts_per_tok = 0",)),
    ("granitemoehybrid with experts", {"layer_types": ["mamba"] * 9999}, ("layer_types = a list of 9999",)),
    ("qwen3_next", {"linear_key_head_dim": 1 << 24}, ("a weight of 67,108,952 x 48 numbers",)),
    ("olmo_hybrid", {"layer_types": ["full_attention"] * 4}, ("layer_types =", "layers of both kinds")),
    ("olmo_hybrid", {"linear_num_value_heads": 3}, ("linear_num_value_heads = 3", "the 2 key heads")),
    ("olmo_hybrid", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("rope_scaling = ", "rope_theta")),
]


IDS = ["limits", "overflow", "states", "context", "choices", "list", "rows", "one kind", "heads", "no base"]


@pytest.mark.parametrize(("family", "changed", "parts"), WRONG_HYBRIDS, ids=IDS)
def test_settings_of_hybrids(
    family: str, changed: dict[str, Any], parts: tuple[str, ...], model_folder: Folder, tmp_path: Path
) -> None:
    """Sizes ended in an overflow or took the memory of all rows, a list was printed whole, and what no checkpoint may
    have was found when the checkpoint was read again, under a folder's name that had gone by then.
    """
    folder = Path(shutil.copytree(model_folder(family), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    check_sentence(said_about(folder, {**config, **changed}), f"{folder}/config.json", *parts)


def test_transformers_fails_when_it_computes(model_folder: Folder, tmp_path: Path) -> None:
    """transformers looks at some settings in its forward pass alone, and its IndexError was the user's."""
    folder = Path(shutil.copytree(model_folder("mamba2"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "time_step_limit": [-1e308, 1e308]}))
    said = sentence_of(lambda: convert(Conversion("hf", folder, "megatron", tmp_path / "ours"), print))
    check_sentence(said, f"transformers loads {folder}", "RuntimeError")


def test_more_layers_than_tensors(model_folder: Folder) -> None:
    """A model of so many layers would be built first, for minutes, and then compared with the files."""
    portable = read_huggingface(model_folder("llama"))
    many = dataclasses.replace(portable.model, num_layers=99_999)
    with expect_error(CheckpointError, "99,999 layers", "30 tensors"):
        refuse_more_layers(many, (), portable.tensors.keys() | map(str, range(30 - len(portable.tensors))), where="x")


def test_other_files_in_place_of_settings(tmp_path: Path) -> None:
    """Nested 100,000 deep it was a RecursionError, and a folder of that name an IsADirectoryError."""
    for name, content in hostile_files().items():
        (tmp_path / "config.json").write_bytes(content)
        assert "config.json" in (sentence_of(lambda: read_config(tmp_path)) or ""), name
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        assert "index.json" in (sentence_of(lambda: tensors_in(tmp_path)) or ""), name
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).unlink()
        (tmp_path / name).mkdir()
    check_sentence(sentence_of(lambda: read_config(tmp_path)), f"{tmp_path}/config.json")
    check_line(sentence_of(lambda: tensors_in(tmp_path)) or "", "model.safetensors.index.json")


def test_indexes_of_other_types(tmp_path: Path) -> None:
    """Names that leave the folder, that no disk takes, and none at all: an index without weights is no model."""
    (tmp_path.parent / "outside.safetensors").write_bytes(b"")
    wrong: list[Any] = [None, [], "abc", {"x": 1}, {"x": None}, {"x": ["a"]}, {}]
    for weights in wrong:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        assert "index.json" in (sentence_of(lambda: tensors_in(tmp_path)) or ""), weights
    for name in (
        "../outside.safetensors",
        "..",
        ".",
        "",
        "a\0b",
        "x" * 5000,
        str(tmp_path.parent / "outside.safetensors"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        assert "names files that are not in the folder" in (sentence_of(lambda: tensors_in(tmp_path)) or ""), name


def test_hostile_headers_of_safetensors(tmp_path: Path) -> None:
    """Sizes and places beyond the file are said before anything is allocated."""
    path = tmp_path / "model.safetensors"
    tensor: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    headers: list[Any] = [
        {"x": {**tensor, "data_offsets": [0, 1 << 60]}},
        {"x": {**tensor, "data_offsets": [8, 0]}},
        {"x": {**tensor, "data_offsets": [-8, 0]}},
        {"x": {**tensor, "data_offsets": "abc"}},
        {"x": {**tensor, "shape": [1 << 40, 1 << 40]}},
        {"x": {**tensor, "shape": [-1]}},
        {"x": {**tensor, "shape": ["2"]}},
        {"x": {**tensor, "dtype": "F3"}},
        {"x": {**tensor, "dtype": 1}},
        {"x": 1},
        {"x": tensor, "y": tensor},
        [],
    ]
    texts = [json.dumps(header).encode() for header in headers] + [b"[" * 10_000, b'{"a":' * 10_000, b"\xff" * 9, b""]
    files = [struct.pack("<Q", len(text)) + text + bytes(8) for text in texts]
    for content in [*files, struct.pack("<Q", 1 << 62), struct.pack("<Q", (1 << 64) - 1) + b"{}", b"", b"x"]:
        path.write_bytes(content)
        assert f"{path} is damaged or incomplete" in (sentence_of(lambda: tensors_in(tmp_path)) or ""), content[:80]
    path.unlink()
    path.mkdir()
    assert str(path) in (sentence_of(lambda: tensors_in(tmp_path)) or "")
