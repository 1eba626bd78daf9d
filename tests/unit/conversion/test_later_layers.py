"""Layers of multi-token prediction in published files, which transformers leaves out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="models of published types come from the dev extra's transformers")

from safetensors.torch import load_file, save_file

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.conversion.native import read_native
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error

Folder = Callable[[str], Path]


def with_later_layer(source: Path, target: Path) -> dict[str, Tensor]:
    """A copy of a model of three layers with one of multi-token prediction."""
    shutil.copytree(source, target)
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(3)
    last, later = "model.layers.2.", "model.layers.3."
    found = {name.replace(last, later): tensor for name, tensor in tensors.items() if name.startswith(last)}
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    found |= {
        f"{later}{name}": torch.empty(shape)
        for name, shape in {**shapes, "eh_proj.weight": (hidden, 2 * hidden)}.items()
    }
    found = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in found.items()}
    found[f"{later}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    found[f"{later}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | found, target / "model.safetensors", metadata={"format": "pt"})
    return tensors | found


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_they_are_kept(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """A run that goes on from DeepSeek-V3 would train new layers of multi-token prediction, and servers lack them."""
    tensors = with_later_layer(model_folder(name), tmp_path / "source")
    convert(Conversion("hf", tmp_path / "source", "megatron", tmp_path / "ours"), lambda line: None)
    portable = read_native(tmp_path / "ours")
    assert portable.model.mtp_num_layers == 1
    projection = portable.tensors["mtp.layers.0.eh_proj.weight"].make()
    assert torch.equal(projection, tensors["model.layers.3.eh_proj.weight"])
    write_huggingface(portable, tmp_path / "back", max_shard_size=1 << 40)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[each], tensor) for each, tensor in tensors.items())
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_copy_that_is_none(model_folder: Folder, tmp_path: Path) -> None:
    """The embedding of the last stage is that of the first one: another in the files would be lost."""
    tensors = with_later_layer(model_folder("deepseek_v3"), tmp_path / "source")
    tensors["model.layers.3.embed_tokens.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    with expect_error(CheckpointError, "model.embed_tokens.weight"):
        read_huggingface(tmp_path / "source")
