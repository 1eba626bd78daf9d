"""LLaVA-1.5 converts both ways, and computes what transformers does of texts with images, forward and backward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.flags import flags_of
from megatron.config.vision import VisionConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.huggingface.reading import from_transformers, read_huggingface
from megatron.core.conversion.quantizing.matrices import quantized_parameters
from megatron.core.models.vlm.huggingface import FORMAT
from megatron.core.models.vlm.huggingface.llava import LLAVA
from megatron.core.quantization.scheme import scheme_named
from megatron.errors import CheckpointError
from tests.harness.published import in_fp64
from tests.harness.sentences import expect_error
from tests.unit.conversion.vision_language import check_logits_and_gradients

transformers = pytest.importorskip("transformers", reason="conversion is proven with the dev extra's transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION = {**SIZES, "image_size": 16, "patch_size": 4, "model_type": "clip_vision_model"}
TEXT = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 99, "model_type": "llama"}


def random_llava(**settings: Any) -> Any:
    """Transformers' LLaVA of three encoder layers, of which features pass two."""
    torch.manual_seed(3)
    config = transformers.LlavaConfig(vision_config=VISION, text_config=TEXT, image_token_index=98, **settings)
    model = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that transformers writes."""
    path = tmp_path_factory.mktemp("llava")
    random_llava().save_pretrained(path)
    return path


def test_model_goes_there_and_back(folder: Path, tmp_path: Path) -> None:
    """Each conversion proves logits of a text with an image. The layer that no feature passes stays behind, and a model
    that says so is written, under the names of the released files.
    """
    say = list[str]().append
    convert(Conversion("hf", folder, "megatron", tmp_path / "ours"), say)
    convert(Conversion("megatron", tmp_path / "ours", "hf", tmp_path / "theirs"), say)
    before, after = (read_huggingface(each) for each in (folder, tmp_path / "theirs"))
    assert before.groups == after.groups and before.model == after.model
    assert all(torch.equal(tensor.make(), after.tensors[name].make()) for name, tensor in before.tensors.items())
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["vision_feature_layer"], config["vision_config"]["num_hidden_layers"]) == (-1, 2)
    assert config["text_config"]["model_type"] == "llama" and config["image_token_index"] == 98
    from safetensors import safe_open

    with safe_open(tmp_path / "theirs" / "model.safetensors", framework="pt") as file:
        names = {*file.keys()}
    assert "vision_tower.vision_model.embeddings.class_embedding" in names
    assert "language_model.model.embed_tokens.weight" in names


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_texts_with_images_have_the_logits_and_gradients_of_transformers(strategy: str) -> None:
    """Features at another place, of another layer, or with the class token in between are another model."""
    with in_fp64():
        theirs = random_llava(vision_feature_select_strategy=strategy).double()
    check_logits_and_gradients(theirs)


def test_names_of_all_versions_are_known() -> None:
    """Released files, those of today's transformers and a model in memory have other names for one tensor."""
    first = "vision_tower.vision_model.pre_layrnorm.bias"
    newer = ("vision_tower.pre_layrnorm.bias", "model.vision_tower.pre_layrnorm.bias")
    assert set(LLAVA.current_names([first, *newer]).values()) == {first}
    text = "language_model.model.norm.weight"
    assert set(LLAVA.current_names([text, "model.language_model.norm.weight"]).values()) == {text}
    assert set(LLAVA.current_names(["language_model.lm_head.weight", "lm_head.weight"]).values()) == {
        "language_model.lm_head.weight"
    }


SMALL: dict[str, Any] = {"model_type": "llava", "text_config": TEXT, "vision_config": VISION}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "features of several layers": ({"vision_feature_layer": [-2, -5]}, ("vision_feature_layer", "[-2, -5]")),
    "a layer that isn't there": ({"vision_feature_layer": -9}, ("-9", "3 layers")),
    "no layer": ({"vision_feature_layer": 0}, ("one layer",)),
    "another encoder": ({"vision_config": {**VISION, "model_type": "pixtral"}}, ("clip_vision_model",)),
    "another language model": ({"text_config": {**TEXT, "model_type": "gpt2"}}, ("llama",)),
    "images that aren't squares": ({"vision_config": {**VISION, "image_size": [16, 8]}}, ("image_size", "squares")),
    "a projector without biases": ({"multimodal_projector_bias": False}, ("multimodal_projector_bias",)),
    "no encoder": ({"vision_config": None}, ("vision_config",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_does_not_convert_is_refused(case: str) -> None:
    """A setting that is skipped would be seen in the logits alone, or not at all."""
    settings, words = REFUSED[case]
    with expect_error(CheckpointError, *words):
        reader = FORMAT.reader({**SMALL, **settings}, where="config.json")
        FORMAT.model_from_config(reader, "llava")
        FORMAT.groups_from_config(reader, [str(number) for number in range(99)], where="config.json")


def test_other_vision_language_models_are_not_written_as_llava() -> None:
    """A projector with a norm, or joined patches, would be lost."""
    portable = from_transformers(random_llava())
    vision = VisionConfig.among(portable.groups)
    changed = [
        VisionConfig(**{**_fields(vision), "pixel_shuffle": True, "vision_projection_norm": True})
        if each is vision
        else each
        for each in portable.groups
    ]
    with expect_error(CheckpointError, "--pixel-shuffle", "norm"):
        FORMAT.config_from_model(portable.model, changed, {})


def _fields(vision: VisionConfig) -> dict[str, Any]:
    return {spec.field: getattr(vision, spec.field) for spec in flags_of(VisionConfig)}


def test_encoders_of_images_stay_as_they_are(folder: Path) -> None:
    """Their layers and the projector were rounded with the decoder's."""
    portable = read_huggingface(folder)
    found = quantized_parameters(portable.model, portable.groups)
    assert len(found) == 2 * 4 and not [name for name in found if name.startswith("vision_")]


@pytest.mark.slow(reason="that the encoder isn't quantized is proven above")
def test_a_quantized_folder_with_a_whole_encoder(folder: Path, tmp_path: Path) -> None:
    """transformers reads what is written."""
    rounding = Rounding(scheme_named("int8"))
    said = list[str]()
    convert(Conversion("hf", folder, "hf", tmp_path / "few", rounding=rounding), said.append)
    assert any(line.startswith("proof:") for line in said)
    from safetensors import safe_open

    with safe_open(tmp_path / "few" / "model.safetensors", framework="pt") as file:
        rounded = [name for name in {*file.keys()} if name.endswith("weight_packed")]
    assert len(rounded) == 2 * 7 and not [name for name in rounded if "vision" in name or "projector" in name]
