"""FP8 scales of keys and values, and of inputs: in quantized folders, and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="quantized folders are proven by transformers")
pytest.importorskip("compressed_tensors", reason="transformers reads quantized folders with compressed-tensors")

from safetensors.torch import load_file, save_file

from megatron.core.conversion import convert
from megatron.core.conversion.huggingface.reading import from_transformers, read_huggingface
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import PortableModel
from tests.harness.published import random_model
from tests.harness.sentences import check_line
from tests.published import MODELS
from tests.unit.conversion.test_families import assert_same_bytes, do
from tests.unit.conversion.test_tensorrt_llm import in_fp8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bf16 in FP8 with scales of inputs, keys and values, as a folder."""
    base = tmp_path_factory.mktemp("fp8")
    portable = in_fp8(from_transformers(random_model(*MODELS["llama"]).bfloat16()))
    write_native(portable, base / "ours", final=base / "ours")
    said = do("megatron", base / "ours", "hf", base / "theirs")
    assert any(line.startswith("proof: ") for line in said)
    return base / "theirs"


def cache_of(portable: PortableModel) -> dict[str, float]:
    assert portable.quantization is not None
    return {name: tensor.make().item() for name, tensor in portable.quantization.cache.items()}


def test_both_kinds_of_names(folder: Path) -> None:
    """vLLM reads compressed-tensors' names and kv_cache_scheme, TensorRT-LLM those of ModelOpt: without them they keep
    keys and values in 8 bits with a scale of 1, or whole.
    """
    found = load_file(folder / "model.safetensors")
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        for kind, scale in (("k", 0.5), ("v", 0.75)):
            names = (f"{attention}.{kind}_scale", f"{attention}.{kind}_proj.{kind}_scale")
            assert [found[name].tolist() for name in names] == [[scale]] * 2
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8 and config["kv_cache_scheme"]["type"] == "float"
    modelopt = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert (modelopt["quant_algo"], modelopt["kv_cache_quant_algo"]) == ("FP8", "FP8")


def test_back_again_without_loss(folder: Path, tmp_path: Path) -> None:
    """Scales of inputs, keys and values were dropped without a word. The proof failed where scales are in fp32 and the
    model in bf16: transformers doesn't round what it dequantizes in fp32.
    """
    said = do("hf", folder, "megatron", tmp_path / "ours")
    check_line(next(line for line in said if "keys and values" in line), "quantized targets keep")
    wanted = {f"decoder.layers.{n}.self_attention.{k}_scale": v for n in range(3) for k, v in (("k", 0.5), ("v", 0.75))}
    assert cache_of(read_native(tmp_path / "ours")) == wanted
    do("megatron", tmp_path / "ours", "hf", tmp_path / "again", skip_proof=True)
    assert_same_bytes(folder, tmp_path / "again")


@pytest.mark.parametrize(
    ("names", "numbers", "kept"),
    [
        (("{}.k_proj.k_scale", "{}.v_proj.v_scale"), 1, True),
        (("{}.k_proj.output_scale", "{}.v_proj.output_scale"), 1, True),
        (("{}.k_scale", "{}.v_scale"), 2, False),
    ],
    ids=["ModelOpt", "older", "by head"],
)
def test_names_of_other_programs(
    folder: Path, tmp_path: Path, names: tuple[str, str], numbers: int, kept: bool
) -> None:
    """What can't be kept is said."""
    plain = {name: each for name, each in load_file(folder / "model.safetensors").items() if "_scale" not in name[-8:]}
    plain |= {name: each for name, each in load_file(folder / "model.safetensors").items() if "t_scale" in name}
    for layer in range(3):
        for name, scale in zip(names, (0.5, 0.75)):
            plain[name.format(f"model.layers.{layer}.self_attn")] = torch.full((numbers,), scale)
    save_file(plain, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    portable = read_huggingface(tmp_path)
    assert (len(cache_of(portable)) == 6) == kept
    check_line(
        next(note for note in portable.notes if "keys and values" in note),
        "quantized targets keep" if kept else "no target",
    )


def test_a_target_without_a_place(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ONNX graph without the scales was written without a word."""
    monkeypatch.setattr(convert, "check_packages", lambda proves: None)
    monkeypatch.setattr(convert, "write_onnx", lambda portable, folder, say: folder.mkdir(parents=True))
    for target in ("megatron-lm", "onnx"):
        said = do("hf", folder, target, tmp_path / target, skip_proof=True)
        check_line(next(line for line in said if "left out" in line), f"--to {target}")


def test_larger_inputs_of_joined_weights(folder: Path, tmp_path: Path) -> None:
    """Queries, keys and values of other programs may have scales of their own; ours are one weight."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.input_scale"] = torch.tensor([0.5])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    found = read_huggingface(tmp_path).quantization
    assert found is not None and dataclasses.is_dataclass(found)
    inputs = found.scales["decoder.layers.1.self_attention.linear_qkv.weight"].inputs
    assert inputs is not None and inputs.make().tolist() == [0.5]
