"""Folders that other programs quantized: the numbers that their own library, or a second implementation, reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models of published types come from the dev extra's transformers")

from safetensors.torch import load_file, save_file

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.quantized import widened
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.huggingface.reading import read_config, read_huggingface, tensors_in
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.quantization.scheme import SCHEMES
from megatron.errors import CheckpointError, ConfigError
from tests.harness.sentences import expect_error
from tests.tiers import tiers

Folder = Callable[[str], Path]
Layer = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""From a weight, what files keep in its place, by the last part of a name, and the numbers that are meant."""

GROUP = 16


def quantized(folder: Path, source: Path, layer: Layer, settings: dict[str, Any], dtype: str = "float32") -> Path:
    """``source`` with all projections in another layout, and beside it the same numbers in full."""
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = tensor.to(getattr(torch, dtype))
            continue
        parts, meant[name] = layer(tensor)
        stored |= {f"{name.removesuffix('weight')}{last}": part for last, part in parts.items()}
    config = {**json.loads((source / "config.json").read_text()), "dtype": dtype}
    for name, tensors, quantization in (("few", stored, settings), ("wide", meant, None)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        save_file({key: each.contiguous() for key, each in tensors.items()}, folder / name / "model.safetensors")
    return folder / "few"


def check(folder: Path) -> None:
    """Both folders hold the same numbers, to the last bit, and the quantized one knows its scales."""
    found, expected = (read_huggingface(folder / name) for name in ("few", "wide"))
    for name, tensor in expected.tensors.items():
        assert torch.equal(found.tensors[name].make(), tensor.make()), name
    assert found.dtype == expected.dtype


def by_library(settings: dict[str, Any], dtype: torch.dtype) -> Layer:
    """compressed-tensors' own codes of a weight, and its own numbers of them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    args = scheme.weights
    assert args is not None

    def layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        columns = {"group": GROUP, "channel": weight.shape[1], "tensor": weight.shape[1]}[str(args.strategy)]
        blocks = weight.view(len(weight), -1, columns)
        limit = 448 if args.type == "float" else 2.0 ** (args.num_bits - 1) - 0.5
        low, high = blocks.amin(2), blocks.amax(2)
        state = {"weight": weight.to(dtype), "weight_scale": (torch.maximum(-low, high) / limit).to(dtype)}
        if args.strategy == "tensor":
            state["weight_scale"] = state["weight_scale"].max().view(1)
        if not args.symmetric:
            state["weight_scale"] = ((high - low) / (2**args.num_bits - 1)).to(dtype)
            lowest = -(2 ** (args.num_bits - 1))
            zeros = torch.round(lowest - low / state["weight_scale"].float()).clamp(lowest, -lowest - 1)
            state["weight_zero_point"] = zeros.to(torch.int8)
        parts = compressor.compress(state, scheme)
        return parts, compressor.decompress(parts, scheme)["weight"].to(dtype)

    return layer


def compressed(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
COMPRESSED = {
    "int4": compressed("pack-quantized", **INT4),
    "int4 with zero points": compressed("pack-quantized", **{**INT4, "symmetric": False}),
    "int8": compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    "w8a8": compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    "w8a8 with zero points": compressed("int-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"),
    "fp8": compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
    "fp8 by tensor": compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="tensor"),
}


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compressed_tensors(model_folder: Folder, tmp_path: Path, name: str, dtype: str) -> None:
    """Most quantized models on the Hub are in these layouts, and could not be read."""
    pytest.importorskip("compressed_tensors", reason="the layouts' own library says what they mean")
    settings = COMPRESSED[name]
    quantized(tmp_path, model_folder("llama"), by_library(settings, getattr(torch, dtype)), settings, dtype)
    check(tmp_path)


def numbers_for(weight: Tensor, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[out, in]`` from zero, and scales and zero points ``[groups, out]``, at random."""
    generator = torch.Generator().manual_seed(weight.numel())
    outputs, inputs = weight.shape
    codes = torch.randint(1 << bits, (outputs, inputs), generator=generator)
    scales = torch.rand(inputs // GROUP, outputs, generator=generator).half() / 16
    zeros = torch.randint(1, 1 << bits, (inputs // GROUP, outputs), generator=generator)
    return codes, scales, zeros


def words(numbers: Tensor, dim: int, bits: int, order: tuple[int, ...]) -> Tensor:
    """int32 words of numbers that are neighbours in ``dim``: the one at ``order[i]`` in the i-th lowest bits."""
    each = 32 // bits
    parts = [numbers[at::each] if dim == 0 else numbers[:, at::each] for at in order]
    found = torch.zeros_like(parts[0])
    for place, part in enumerate(parts):
        found |= part << (bits * place)
    return found.to(torch.int32).contiguous()


def meaning(codes: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """A second implementation: one output after the other, in fp64, rounded once to fp16."""
    rows = [
        scales[groups, output].double() * (codes[output] - zeros[groups, output]).double()
        for output in range(len(codes))
    ]
    return torch.stack(rows).half()


@pytest.mark.parametrize(("bits", "version", "ordered"), [(4, "gptq", False), (4, "gptq", True), (8, "gptq_v2", False)])
def test_gptq(model_folder: Folder, tmp_path: Path, bits: int, version: str, ordered: bool) -> None:
    """Zero points that are one off shift all weights; the order of inputs is another with desc_act."""

    def layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, zeros = numbers_for(weight, bits)
        groups = torch.arange(weight.shape[1]) // GROUP
        if ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        order = tuple(range(32 // bits))
        stored = zeros - 1 if version == "gptq" else zeros
        parts = {
            "qweight": words(codes.t(), 0, bits, order),
            "qzeros": words(stored, 1, bits, order),
            "scales": scales,
            "g_idx": groups.to(torch.int32),
        }
        return parts, meaning(codes, scales, zeros, groups)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": False}
    quantized(tmp_path, model_folder("llama"), layer, {**settings, "checkpoint_format": version}, "float16")
    check(tmp_path)


def awq_layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = numbers_for(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(codes.t(), 1, 4, order), "qzeros": words(zeros, 1, 4, order), "scales": scales}
    return parts, meaning(codes, scales, zeros, torch.arange(weight.shape[1]) // GROUP)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def test_awq(model_folder: Folder, tmp_path: Path) -> None:
    """Its words hold outputs in an order of their own."""
    quantized(tmp_path, model_folder("llama"), awq_layer, AWQ, "float16")
    check(tmp_path)


def test_awq_as_its_converter_reads_it() -> None:
    """compressed-tensors has a converter of AWQ, a third implementation of the order of columns."""
    pytest.importorskip("compressed_tensors", reason="the converter is the other opinion")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    parts, meant = awq_layer(torch.empty(32, 48))
    converter = AutoAWQConverter.from_autoawq_config(AWQ)
    codes, scales, zeros = converter._convert_gemm_module(parts["qweight"], parts["scales"], parts["qzeros"])
    spread = [each.repeat_interleave(GROUP, 1) for each in (scales, zeros)]
    assert torch.equal(((codes - spread[1]).float() * spread[0].float()).half(), meant)


def test_fp8_of_outputs_and_of_tensors(model_folder: Folder, tmp_path: Path) -> None:
    """FP8 without blocks was refused."""

    def by_output(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale

    def by_tensor(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}, codes.float() * scale

    source = model_folder("llama")
    quantized(tmp_path / "a", source, by_output, {"quant_method": "fbgemm_fp8"})
    quantized(tmp_path / "b", source, by_tensor, {"quant_method": "fp8", "activation_scheme": "static"})
    quantized(tmp_path / "c", source, by_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"})
    for name in "abc":
        check(tmp_path / name)


Q = "model.layers.0.self_attn.q_proj"
BAD_SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mxfp6": (compressed("mxfp6-pack-quantized", **INT4), ("mxfp6-pack-quantized", "pack-quantized")),
    "three bits": (compressed("pack-quantized", **{**INT4, "num_bits": 3}), ("3 bits", "2, 4, 8 bits")),
    "no group size": (compressed("pack-quantized", **{**INT4, "group_size": 0}), ("group_size 0",)),
    "dense": ({**COMPRESSED["int4"], "quantization_status": "frozen"}, ("quantization_status", "'frozen'")),
    "rotated": ({**COMPRESSED["int4"], "transform_config": {"config_groups": {"u": {}}}}, ("transform_config",)),
    "rotated by a name": ({**COMPRESSED["int4"], "transform_config": "quarot"}, ("transform_config",)),
    "a format of another type": ({**COMPRESSED["int4"], "format": {"name": "int4"}}, ("{'name': 'int4'}",)),
    "no groups": ({**COMPRESSED["int4"], "config_groups": {}}, ("config_groups",)),
    "a target": (
        {**COMPRESSED["int4"], "config_groups": {"group_0": {"targets": ["re:("], "weights": INT4}}},
        ("targets", "'('", "no regular expression"),
    ),
    "gptq of 3": ({"quant_method": "gptq", "bits": 3, "group_size": GROUP}, ("gptq of 3 bits",)),
    "gptq by layer": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "dynamic": {"x": {}}}, ("dynamic",)),
    "gemv": ({**AWQ, "version": "gemv"}, ("'gemv'", "gemm")),
    "no group": ({**AWQ, "group_size": 0}, ("groups of 0",)),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_are_not_read(model_folder: Folder, tmp_path: Path, name: str) -> None:
    """Said by the settings, before any weight is looked at."""
    settings, facts = BAD_SETTINGS[name]
    quantized(tmp_path, model_folder("llama"), awq_layer, settings)
    with expect_error(CheckpointError, "config.json", *facts):
        read_huggingface(tmp_path / "few")


def gptq_layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = numbers_for(weight)
    order = tuple(range(8))
    parts = {"qweight": words(codes.t(), 0, 4, order), "qzeros": words(zeros - 1, 1, 4, order)}
    return {**parts, "scales": scales}, weight


DAMAGED: dict[str, tuple[str, dict[str, Tensor | None], tuple[str, ...]]] = {
    "no scale": ("int4", {"weight_scale": None}, (f"{Q}.weight_scale", "[48, 3]")),
    "another scale": ("int4", {"weight_scale": torch.ones(3, 48)}, (f"{Q}.weight_scale", "[48, 3]")),
    "no shape": ("int4", {"weight_shape": None}, (f"{Q}.weight_shape", "[]")),
    "a large shape": ("int4", {"weight_shape": torch.tensor([48, 1 << 40])}, (f"{Q}.weight_shape", "1099511627776")),
    "a negative shape": ("int4", {"weight_shape": torch.tensor([48, -48])}, (f"{Q}.weight_shape", "-48")),
    "an order": ("int4", {"weight_g_idx": torch.full((48,), 3)}, (f"{Q}.weight_g_idx", "3 groups")),
    "no zero points": ("int4 with zero points", {"weight_zero_point": None}, (f"{Q}.weight_zero_point", "[6, 3]")),
    "gptq without scales": ("gptq", {"scales": None}, (f"{Q}.scales", "[3, 48]")),
    "gptq without zeros": ("gptq", {"qzeros": torch.zeros(3, 5, dtype=torch.int32)}, (f"{Q}.qzeros", "[3, 6]")),
    "gptq in floats": ("gptq", {"qweight": torch.zeros(6, 48)}, (f"{Q}.qweight", "no matrix of int32")),
    "gptq in an order": ("gptq", {"g_idx": torch.full((48,), -1, dtype=torch.int32)}, (f"{Q}.g_idx", "3 groups")),
    "codes alone": ("int4", {"weight_packed": None}, (f"{Q}.weight_shape", "int64")),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(model_folder: Folder, tmp_path: Path, name: str) -> None:
    """One sentence that names the tensor, and no memory for a shape that the file invents."""
    pytest.importorskip("compressed_tensors", reason="the layouts' own library writes the files")
    kind, changes, facts = DAMAGED[name]
    if kind == "gptq":
        settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}

        layer: Layer = gptq_layer
    else:
        settings = COMPRESSED[kind]
        layer = by_library(settings, torch.float32)
    folder = quantized(tmp_path, model_folder("llama"), layer, settings)
    tensors = {**load_file(folder / "model.safetensors"), **{f"{Q}.{last}": each for last, each in changes.items()}}
    save_file({key: each for key, each in tensors.items() if each is not None}, folder / "model.safetensors")
    with expect_error(CheckpointError, "few", *facts):
        read_huggingface(folder)


def test_layers_of_several_groups(model_folder: Folder, tmp_path: Path) -> None:
    """Settings by name go before those by class."""
    pytest.importorskip("compressed_tensors", reason="the layouts' own library writes the files")
    both = COMPRESSED["int8"]["config_groups"]["group_0"], COMPRESSED["int4"]["config_groups"]["group_0"]
    named = {"group_0": both[0], "group_1": {**both[1], "targets": [r"re:.*down_proj$"]}}
    kinds = [by_library(COMPRESSED[name], torch.float32) for name in ("int8", "int4")]
    widths = {132}

    def layer(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return kinds[weight.shape[1] in widths](weight)

    source = model_folder("llama")
    widths = {load_file(source / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].shape[1]}
    folder = quantized(tmp_path, source, layer, {**COMPRESSED["int8"], "config_groups": named})
    check(tmp_path)
    found = widened(read_config(folder), tensors_in(folder), where="few").quantized
    assert {name.split(".")[-2]: weight.grid.bits for name, weight in found.items()}["down_proj"] == 4


@pytest.mark.parametrize("name", tiers(["int4", "gptq", "fp8"], first=["gptq"]))
def test_converted_with_a_proof(model_folder: Folder, tmp_path: Path, name: str) -> None:
    """From quantized folders, by transformers' own dequantization or, where it has none, from the numbers read here."""
    pytest.importorskip("compressed_tensors", reason="the layouts' own library writes the files")
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    layer: Layer = gptq_layer
    if name != "gptq":
        settings = COMPRESSED[name]
        layer = by_library(settings, torch.float32)
    folder = quantized(tmp_path, model_folder("llama"), layer, settings)
    said: list[str] = []
    assert convert(Conversion("hf", folder, "megatron", tmp_path / "ours"), said.append) is not None
    assert any("weights of" in line and f"({settings['quant_method']})" in line for line in said)
    with expect_error(ConfigError, "--quantize int8", "quantized already"):
        convert(Conversion("hf", folder, "hf", tmp_path / "more", rounding=Rounding(SCHEMES["int8"])), said.append)
    assert not (tmp_path / "more").exists()


def test_codes_of_what_was_read(model_folder: Folder, tmp_path: Path) -> None:
    """Scales of queries, keys and values become those of one weight, whose codes are then the file's."""
    pytest.importorskip("compressed_tensors", reason="the layouts' own library writes the files")
    settings = COMPRESSED["int4 with zero points"]
    quantized(tmp_path, model_folder("llama"), by_library(settings, torch.bfloat16), settings, "bfloat16")
    portable = read_huggingface(tmp_path / "few")
    assert portable.quantization is not None and portable.quantization.scheme.name == "int4-asym"
    write_huggingface(portable, tmp_path / "again", max_shard_size=1 << 30)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "few"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
