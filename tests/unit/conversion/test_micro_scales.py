"""NVFP4, MXFP4 and MXFP8: what compressed-tensors itself makes of the files, and of what others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="quantized folders are proven by transformers")
pytest.importorskip("compressed_tensors", reason="transformers reads quantized folders with compressed-tensors")

from safetensors.torch import load_file, save_file

from megatron.core.conversion.huggingface.micro_scales import MICRO_FORMATS
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.quantization.scheme import scheme_named
from megatron.errors import CheckpointError, ConfigError
from tests.harness.published import random_model
from tests.harness.sentences import expect_error
from tests.published.sizes import SIZES
from tests.tiers import tiers
from tests.unit.conversion.test_families import do

_WIDE: dict[str, Any] = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_EXPERTS = {**_WIDE, "num_local_experts": 3, "num_experts_per_tok": 2}
CASES = [("llama", "nvfp4"), ("llama", "mxfp4"), ("llama", "mxfp8")]
CASES += [("mixtral", "mxfp4")]


def rounding(name: str, *ignored: str) -> Rounding:
    return Rounding(scheme_named(name), ignored)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    random_model("llama", _WIDE).bfloat16().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("case", tiers(CASES, first=CASES[:3]), ids=lambda case: "-".join(case))
def test_there_and_back(case: tuple[str, str], tmp_path: Path) -> None:
    """Codes in another order of nibbles, or scales of another bias, load as noise."""
    kind, scheme = case
    random_model(kind, _WIDE if kind == "llama" else _EXPERTS).bfloat16().save_pretrained(tmp_path / "source")
    said = do("hf", tmp_path / "source", "hf", tmp_path / "few", rounding=rounding(scheme))
    assert any("bit-equal" in line for line in said)
    do("hf", tmp_path / "few", "megatron", tmp_path / "ours")


@pytest.mark.parametrize("scheme", MICRO_FORMATS)
def test_what_the_library_reads(scheme: str) -> None:
    """Every code of the format, of both signs, and a group of zeros."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    micro = MICRO_FORMATS[scheme]
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    weight[0, :32], weight[1, :8], weight[1, 8:32] = 0.0, torch.tensor([0.5, 1, 1.5, 2, 3, 4, -6, -0.5]), 0.0
    held = micro.stored(weight)
    how = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**micro.arguments()))
    theirs = BaseCompressor.get_value_from_registry(micro.format).decompress(dict(held), how)["weight"]
    assert torch.equal(theirs, micro.values(held))
    assert {name: (tuple(each.shape), each.dtype) for name, each in held.items()} == micro.shapes(6, 128)
    step = {4: 0.26, 8: 0.07}[micro.bits]  # half of what is between the largest codes
    assert (theirs.float() - weight).abs().max() <= step * weight.abs().max()


def test_joined_weights_have_one_number(source: Path, tmp_path: Path) -> None:
    """vLLM joins queries, keys and values, and takes the largest of their numbers for all."""
    do("hf", source, "hf", tmp_path / "few", rounding=rounding("nvfp4"), skip_proof=True)
    found = load_file(tmp_path / "few/model.safetensors")
    attention = "model.layers.1.self_attn"
    numbers = {found[f"{attention}.{kind}_proj.weight_global_scale"].item() for kind in "qkv"}
    weight = read_huggingface(source).tensors["decoder.layers.1.self_attention.linear_qkv.weight"].make()
    assert numbers == {(448 * 6 / weight.float().abs().max()).item()}


def test_files_that_others_wrote(source: Path, tmp_path: Path) -> None:
    """Damage and settings that aren't read are named, and what is read is said."""
    do("hf", source, "hf", tmp_path / "few", rounding=rounding("mxfp4"), skip_proof=True)
    assert any("21 weights" in note for note in read_huggingface(tmp_path / "few").notes)
    path = tmp_path / "few/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    path.write_text(json.dumps(config))
    with expect_error(CheckpointError, "group_size is 16", "mxfp4-pack-quantized", "32"):
        read_huggingface(tmp_path / "few")


def test_scales_of_inputs(source: Path, tmp_path: Path) -> None:
    """Most published NVFP4 folders (W4A4) say how inputs are rounded: their scales were refused as unknown tensors."""
    do("hf", source, "hf", tmp_path / "few", rounding=rounding("nvfp4"), skip_proof=True)
    plain = read_huggingface(tmp_path / "few").tensors
    held = load_file(tmp_path / "few/model.safetensors")
    ends = ".weight_global_scale"
    inputs = {name.replace(ends, ".input_global_scale"): torch.full((1,), 9.0) for name in held if name.endswith(ends)}
    save_file({**held, **inputs}, tmp_path / "few/model.safetensors", {"format": "pt"})
    path = tmp_path / "few/config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    path.write_text(json.dumps(config))
    found = read_huggingface(tmp_path / "few")
    assert any("activations aren't rounded" in note for note in found.notes)
    assert found.tensors.keys() == plain.keys()
    assert all(torch.equal(tensor.make(), plain[name].make()) for name, tensor in found.tensors.items())


def test_experts_that_have_no_reader(tmp_path: Path) -> None:
    """transformers takes a scale of two levels for one: other weights, without a word."""
    random_model("mixtral", _EXPERTS).save_pretrained(tmp_path / "source")
    with expect_error(ConfigError, "--quantize nvfp4", "experts", "mxfp4"):
        do("hf", tmp_path / "source", "hf", tmp_path / "few", rounding=rounding("nvfp4"))


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    random_model("llama", SIZES).save_pretrained(tmp_path / "source")
    with expect_error(ConfigError, "--quantize mxfp4", "32", "48", "--quantize-ignore"):
        do("hf", tmp_path / "source", "hf", tmp_path / "few", rounding=rounding("mxfp4"))
    with expect_error(ConfigError, "--group-size 16", "nvfp4"):
        scheme_named("nvfp4", group_size=16)
    assert not (tmp_path / "few").exists()
