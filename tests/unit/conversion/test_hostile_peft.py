"""PEFT folders that are damaged or made to harm: each comes to one sentence, before any model is changed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.core.conversion import matching
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.peft.reading import PREFIX, read_peft, with_peft
from megatron.core.conversion.peft.writing import write_peft
from megatron.core.conversion.portable import PortableModel
from megatron.errors import CheckpointError
from tests.harness.published import random_model
from tests.harness.sentences import expect_error
from tests.unit.conversion.test_peft import CASES, adapted

Folder = Callable[..., Path]
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PortableModel:
    """A base."""
    folder = tmp_path_factory.mktemp("base")
    random_model("qwen2", CASES["qwen2"]).save_pretrained(folder)
    return read_huggingface(folder)


@pytest.fixture
def changed(plain: PortableModel, tmp_path: Path) -> Folder:
    """A folder of adapters beside the base, with other settings and other tensors."""
    write_peft(adapted(plain, ("linear_qkv",)), tmp_path / "peft", base=None)
    text = (tmp_path / "peft" / "adapter_config.json").read_text()

    def made(tensors: dict[str, Tensor] | None = None, **settings: Any) -> Path:
        folder = Path(shutil.copytree(tmp_path / "peft", tmp_path / "changed"))
        (folder / "adapter_config.json").write_text(json.dumps({**json.loads(text), **settings}))
        file = folder / "adapter_model.safetensors"
        save_file({**load_file(file), **(tensors or {})}, file)
        return folder

    return made


HANGS = r"(\w+\.?)+!"
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "targets hang": ({"target_modules": HANGS}, ("takes more than 0.1 s",)),
    "excluded hang": ({"exclude_modules": HANGS}, ("takes more than 0.1 s",)),
    "ranks hang": ({"rank_pattern": {HANGS: 3}}, ("takes more than 0.1 s",)),
    "alphas hang": ({"alpha_pattern": {HANGS: 3}}, ("takes more than 0.1 s",)),
    "layers hang": ({"layers_to_transform": [0, 1], "layers_pattern": HANGS}, ("takes more than 0.1 s",)),
    "alpha is huge": ({"lora_alpha": 1e39}, ("lora_alpha", "1e+39")),
    "alpha is tiny": ({"alpha_pattern": {"q_proj": 5e-324}}, ("q_proj", "5e-324")),
    "alpha is no number": ({"lora_alpha": math.nan}, ("lora_alpha",)),
    "scales apart": ({"lora_alpha": 1e-30, "alpha_pattern": {"q_proj": 1e30}}, (Q_PROJ, "alpha_pattern")),
    "rank of a pattern": ({"rank_pattern": {"q_proj": 65537}}, ("q_proj", "65537")),
    "saved, without tensors": ({"modules_to_save": ["lm_head"]}, ("modules_to_save", "lm_head")),
    "an escape": ({"new\x1b[2J": 1}, (r"new\x1b[2J",)),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings(case: str, changed: Folder, plain: PortableModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern ran for ever, a scale became infinite, or a module that was trained whole was left as it was."""
    if case.endswith("hang"):
        monkeypatch.setattr(matching, "SECONDS", 0.1)
    settings, facts = SETTINGS[case]
    with expect_error(CheckpointError, *facts):
        with_peft(plain, changed(**settings))


def whole(fill: float, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A norm that was trained whole."""
    return {f"{PREFIX}model.norm.weight": torch.full((48,), fill, dtype=dtype)}


TENSORS: dict[str, tuple[dict[str, Tensor], tuple[str, ...]]] = {
    "NaN": (whole(math.nan), ("model.norm.weight", "NaN")),
    "infinite": (whole(math.inf), ("model.norm.weight", "infinity")),
    "whole numbers": (whole(1, torch.int64), ("model.norm.weight", "int64")),
    "two names": (
        {f"{PREFIX}{Q_PROJ}.base_layer.lora_A.weight": torch.zeros(3, 48)},
        (f"{Q_PROJ}.lora_A.weight", "twice"),
    ),
    "an embedding": (
        {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(3, 8)},
        ("model.embed_tokens.lora_embedding_A",),
    ),
    "no factor": ({f"{PREFIX}{Q_PROJ}.lora_A.bias": torch.zeros(3)}, (f"{Q_PROJ}.lora_A.bias",)),
    "an escape": ({f"{PREFIX}\x1b[2Jx": torch.zeros(3)}, (r"\x1b[2Jx",)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, changed: Folder, plain: PortableModel) -> None:
    """NaN was trained on, and of two tensors with one name the second was taken."""
    tensors, facts = TENSORS[case]
    with expect_error(CheckpointError, *facts):
        with_peft(plain, changed(tensors)).tensors["decoder.final_layernorm.weight"].make()


def test_pointers_of_git_lfs(changed: Folder, plain: PortableModel) -> None:
    """A clone without git-lfs has three lines in place of each file, and was called damaged."""
    folder = changed()
    file = folder / "adapter_model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with expect_error(CheckpointError, "adapter_model.safetensors", "git lfs pull"):
        with_peft(plain, folder)
    file.unlink()
    file.mkdir()
    with expect_error(CheckpointError, "adapter_model.safetensors", "is a folder"):
        with_peft(plain, folder)


def test_the_rank_is_bounded_before_factors_are_padded(changed: Folder, plain: PortableModel) -> None:
    """One matrix of rank 60,000 pads all others to it: a server ran out of memory before it compared the rank."""
    rank = 600
    tensors = {
        f"{PREFIX}{Q_PROJ}.lora_A.weight": torch.zeros(rank, 48),
        f"{PREFIX}{Q_PROJ}.lora_B.weight": torch.zeros(48, rank),
    }
    folder = changed(tensors, rank_pattern={Q_PROJ: rank})
    with expect_error(CheckpointError, "600", "512"):
        read_peft(folder, plain.model, plain.groups, "qwen2", most_rank=512)
    assert read_peft(folder, plain.model, plain.groups, "qwen2").lora.rank == rank
