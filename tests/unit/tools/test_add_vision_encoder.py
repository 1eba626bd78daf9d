"""A model of a published encoder and a language model has both as they were, and a projector that is new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="both parts are made and proven by the dev extra's transformers")

import transformers

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.native import read_native
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error
from tests.tiers import tiers
from tests.unit.conversion.test_vision_language_types import LLAMA, SQUARES
from tools.checkpoint.add_vision_encoder import main

SMALL: dict[str, Any] = {**LLAMA}
VISION: dict[str, Any] = {**SQUARES}
ENCODERS: dict[str, Any] = {
    "a whole clip": lambda: transformers.CLIPModel(
        transformers.CLIPConfig(
            vision_config=SQUARES, text_config={**SQUARES, "vocab_size": 20, "max_position_embeddings": 9}
        )
    ),
    "siglip's encoder": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION)),
}


@pytest.mark.parametrize("name", tiers(ENCODERS, first=["a whole clip"]))
def test_both_parts_stay_as_they_were(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part is proven; the model converts to a LLaVA whose logits transformers has, too."""
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "text")
    ENCODERS[name]().save_pretrained(tmp_path / "encoder")
    parts = ["--from", "hf", "--load", str(tmp_path / "text"), "--vision-load", str(tmp_path / "encoder")]
    with expect_error(CheckpointError, "<image>"):
        main([*parts, "--save", str(tmp_path / "both")])
    main([*parts, "--save", str(tmp_path / "both"), "--image-token-id", "98"])
    assert "the projector between encoder and language model has random weights" in capsys.readouterr().out
    convert(Conversion("megatron", tmp_path / "both", "hf", tmp_path / "llava"), list[str]().append)
    assert json.loads((tmp_path / "llava" / "config.json").read_text())["model_type"] == "llava"
    made = read_native(tmp_path / "both")
    weight = made.tensors["vision_projection.linear_fc1.weight"].make()
    assert weight.std() == pytest.approx(0.02, rel=0.1)
    assert not made.tensors["vision_projection.linear_fc1.bias"].make().any()


def test_what_is_no_encoder_is_told(tmp_path: Path) -> None:
    """A model of another kind has no features that a projector could learn to read."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    with expect_error(CheckpointError, "clip or siglip"):
        main(["--from", "hf", "--load", str(tmp_path), "--vision-load", str(tmp_path), "--save", str(tmp_path / "no")])


def test_no_layer_of_an_encoder_is_dropped(tmp_path: Path) -> None:
    """SigLIP's features come from behind its last layer, so none is left out."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "text")
    ENCODERS["siglip's encoder"]().save_pretrained(tmp_path / "encoder")
    settings = tmp_path / "encoder" / "config.json"
    found = json.loads(settings.read_text())
    settings.write_text(json.dumps({**found, "num_hidden_layers": found["num_hidden_layers"] - 1}))
    words = ["--from", "hf", "--load", str(tmp_path / "text"), "--vision-load", str(tmp_path / "encoder")]
    with expect_error(CheckpointError, "not part of this architecture"):
        main([*words, "--save", str(tmp_path / "both"), "--image-token-id", "98"])
    assert not (tmp_path / "both").exists()
