"""Published weights in fewer bits: what they are widened to, and what is wrong with files that lack a part."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models of published types come from the dev extra's transformers")

from safetensors.torch import load_file, save_file

from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error

Folder = Callable[[str], Path]
BLOCK = (16, 8)  # unlike, so that rows and columns cannot take each other's scales


def write(folder: Path, source: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    settings = {**config, "dtype": "bfloat16", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def numbers(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.make() for name, tensor in read_huggingface(folder).tensors.items()}


def in_fp8(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Quantized block by block, and what that stands for."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = tensor
            continue
        rows, columns = tensor.shape
        scales = torch.empty(math.ceil(rows / BLOCK[0]), math.ceil(columns / BLOCK[1]))
        small, wide = (
            torch.empty_like(tensor, dtype=torch.float8_e4m3fn),
            torch.empty_like(tensor, dtype=torch.bfloat16),
        )
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = tuple(slice(at * size, (at + 1) * size) for at, size in zip((row, column), BLOCK))
                scales[row, column] = tensor[place].abs().max() / 448
                small[place] = (tensor[place] / scales[row, column]).to(torch.float8_e4m3fn)
                wide[place] = (small[place].float() * scales[row, column]).to(torch.bfloat16)
        stored |= {name: small, f"{name}_scale_inv": scales}
        meant[name] = wide
    return stored, meant


def test_fp8_in_scaled_blocks(model_folder: Folder, tmp_path: Path) -> None:
    """DeepSeek-V3 is published in fp8; a scale at another block's place would make another model."""
    source = model_folder("deepseek_v3")
    stored, meant = in_fp8(load_file(source / "model.safetensors"))
    write(tmp_path / "fp8", source, stored, {"quant_method": "fp8", "weight_block_size": [*BLOCK]})
    write(tmp_path / "wide", source, meant, {})
    found, expected = numbers(tmp_path / "fp8"), numbers(tmp_path / "wide")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    lacking = {
        name: tensor for name, tensor in stored.items() if not name.endswith("0.self_attn.o_proj.weight_scale_inv")
    }
    write(tmp_path / "lacking", source, lacking, {"quant_method": "fp8", "weight_block_size": [*BLOCK]})
    with expect_error(CheckpointError, "fp8", "model.layers.0.self_attn.o_proj.weight_scale_inv", "[3, 5]"):
        read_huggingface(tmp_path / "lacking")


def test_mxfp4(model_folder: Folder, tmp_path: Path) -> None:
    """gpt-oss is published in mxfp4, with inputs last; its hidden states are as wide as its experts, so a wrong
    transpose would have the right shape.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = model_folder("gpt_oss in whole groups")
    generator = torch.Generator().manual_seed(2)
    stored, meant = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = meant[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(118, 130, blocks.shape[:3], generator=generator).to(torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone()).contiguous()
    write(tmp_path / "mxfp4", source, stored, {"quant_method": "mxfp4"})
    write(tmp_path / "wide", source, meant, {})
    found, expected = numbers(tmp_path / "mxfp4"), numbers(tmp_path / "wide")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_quantized_weights_need_their_settings(model_folder: Folder, tmp_path: Path) -> None:
    """Numbers in fp8 without their scales are no weights."""
    source = model_folder("deepseek_v3")
    stored, _ = in_fp8(load_file(source / "model.safetensors"))
    write(tmp_path / "fp8", source, stored, {})
    with expect_error(CheckpointError, "float8_e4m3fn", "quantization_config"):
        read_huggingface(tmp_path / "fp8")
