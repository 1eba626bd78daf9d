"""Published vision-language models convert both ways, and compute what transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.models.vlm.huggingface import FORMAT
from megatron.errors import CheckpointError
from tests.harness.published import in_fp64
from tests.harness.sentences import expect_error
from tests.tiers import tiers
from tests.unit.conversion.vision_language import check_logits_and_gradients, check_several_images

transformers = pytest.importorskip("transformers", reason="conversion is proven with the dev extra's transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SQUARES = {**SIZES, "image_size": 16, "patch_size": 4}
TWICE = {**SIZES, "image_size": (16, 16), "patch_size": (4, 4), "model_type": "internvl_vision"}
SIGLIP = {**SQUARES, "model_type": "siglip_vision_model"}
CLIP = {**SQUARES, "model_type": "clip_vision_model"}
LLAMA = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 99, "model_type": "llama"}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_EXPERTS = {**QWEN2, **EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}


def of(name: str, **settings: Any) -> Callable[[], Any]:
    """Makes transformers' model of a class with these settings."""
    config, model = f"{name}Config", f"{name}ForConditionalGeneration"
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings))


MODELS: dict[str, Callable[[], Any]] = {
    "internvl": of(
        "InternVL",
        vision_config={**TWICE, "use_qk_norm": True, "norm_type": "rms_norm"},
        text_config=QWEN2,
        image_token_id=98,
    ),
    "internvl 300M, untied": of(
        "InternVL",
        vision_config={**TWICE, "attention_bias": True},
        text_config={**QWEN2, "model_type": "qwen3", "head_dim": 8},
        image_token_id=98,
        tie_word_embeddings=False,
    ),
    "llava of siglip": of(
        "Llava",
        vision_config=SIGLIP,
        text_config=LLAMA,
        image_token_index=98,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "llava next": of(
        "LlavaNext",
        vision_config=CLIP,
        text_config={**LLAMA, "model_type": "mistral"},
        image_token_index=98,
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32], [48, 16]],
    ),
    "llava next of siglip": of(
        "LlavaNext",
        vision_config=SIGLIP,
        text_config=QWEN2,
        image_token_index=98,
        image_grid_pinpoints=[[32, 48], [16, 16]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "internvl of qwen3 with experts": of(
        "InternVL",
        vision_config={**TWICE, "attention_bias": True},
        text_config={**QWEN3_EXPERTS, "model_type": "qwen3_moe", "head_dim": 8},
        image_token_id=98,
        tie_word_embeddings=False,
    ),
    "llava of mixtral": of(
        "Llava",
        vision_config=CLIP,
        text_config={**LLAMA, **EXPERTS, "model_type": "mixtral"},
        image_token_index=98,
    ),
    "paligemma": of(
        "PaliGemma",
        vision_config=SIGLIP,
        text_config={**LLAMA, "model_type": "gemma", "head_dim": 8, "pad_token_id": 0},
        image_token_index=98,
        projection_dim=32,
        hidden_size=32,
    ),
    "paligemma 2": of(
        "PaliGemma",
        vision_config=SIGLIP,
        text_config={**LLAMA, "model_type": "gemma2", "head_dim": 8, "pad_token_id": 0, "sliding_window": 64},
        image_token_index=98,
        projection_dim=32,
        hidden_size=32,
    ),
    "gemma3": of(
        "Gemma3",
        vision_config=SIGLIP,
        text_config={
            **LLAMA,
            "model_type": "gemma3_text",
            "head_dim": 8,
            "pad_token_id": 98,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        image_token_index=98,
        mm_tokens_per_image=4,
    ),
    "llava with a gemma": of(
        "Llava",
        vision_config=CLIP,
        text_config={**LLAMA, "model_type": "gemma", "head_dim": 8, "pad_token_id": 0},
        image_token_index=98,
        tie_word_embeddings=True,
    ),
}


def random_model(name: str) -> Any:
    """A model of transformers, of which every parameter is random."""
    torch.manual_seed(3)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.config.text_config._experts_implementation = "eager"  # the other kernels refuse fp64
    return model.eval()


@pytest.mark.parametrize("name", tiers(MODELS, first=["internvl"]))
def test_model_goes_there_and_back(name: str, tmp_path: Path) -> None:
    """Each conversion proves logits of a text with an image and of one without; all tensors come back."""
    random_model(name).save_pretrained(tmp_path / "first")
    say = list[str]().append
    convert(Conversion("hf", tmp_path / "first", "megatron", tmp_path / "ours"), say)
    convert(Conversion("megatron", tmp_path / "ours", "hf", tmp_path / "theirs"), say)
    before, after = (read_huggingface(tmp_path / each) for each in ("first", "theirs"))
    assert before.groups == after.groups and before.model == after.model
    assert all(torch.equal(tensor.make(), after.tensors[each].make()) for each, tensor in before.tensors.items())
    assert not [note for note in (*before.notes, *after.notes) if "not read" in note]


@pytest.mark.parametrize("name", tiers(MODELS, first=["internvl 300M, untied", "llava of siglip"]))
def test_texts_with_images_have_the_logits_and_gradients_of_transformers(name: str) -> None:
    """Features of another layer, joined in another order or without a norm are another model."""
    with in_fp64():
        theirs = random_model(name).double()
    check_logits_and_gradients(theirs)


SHAPES = [(16, 16), (40, 13), (20, 50)]


@pytest.mark.parametrize(
    "name", tiers(["internvl", "llava next", "llava of siglip", "gemma3"], first=["llava next", "gemma3"])
)
def test_several_images_are_those_of_transformers(name: str) -> None:
    """Pictures have different grids, and each its own tiles."""
    with in_fp64():
        theirs = random_model(name).double()
    assert check_several_images(theirs, SHAPES) >= len(SHAPES)


LISTED = {**TWICE, "image_size": [16, 16], "patch_size": [4, 4]}
INTERNVL: dict[str, Any] = {"model_type": "internvl", "text_config": QWEN2, "vision_config": LISTED}
LLAVA: dict[str, Any] = {"model_type": "llava", "text_config": LLAMA, "vision_config": SIGLIP}
GEMMA = {**LLAMA, "model_type": "gemma", "head_dim": 8}
PALIGEMMA: dict[str, Any] = {"model_type": "paligemma", "text_config": GEMMA, "vision_config": SIGLIP}
PALIGEMMA["projection_dim"] = 32
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another ratio": ({**INTERNVL, "downsample_ratio": 0.25}, ("downsample_ratio", "0.5")),
    "an encoder of another type": ({**INTERNVL, "vision_config": CLIP}, ("internvl_vision",)),
    "an odd number of patches": (
        {**INTERNVL, "vision_config": {**TWICE, "image_size": [12, 12], "patch_size": [4, 4], "attention_bias": True}},
        ("odd number",),
    ),
    "a norm behind the encoder": (
        {**INTERNVL, "vision_config": {**LISTED, "attention_bias": True, "use_mean_pooling": False}},
        ("use_mean_pooling",),
    ),
    "grids that tiles don't fill": (
        {
            **LLAVA,
            "model_type": "llava_next",
            "image_grid_pinpoints": [[16, 24]],
            "vision_feature_select_strategy": "full",
        },
        ("image_grid_pinpoints", "16"),
    ),
    "a width that isn't the language model's": ({**PALIGEMMA, "projection_dim": 48}, ("projection_dim", "32 wide")),
    "a prompt that doesn't see itself": (
        {**PALIGEMMA, "text_config": {**GEMMA, "use_bidirectional_attention": False}},
        ("use_bidirectional_attention",),
    ),
    "means of no squares": (
        {"model_type": "gemma3", "text_config": {}, "vision_config": SIGLIP, "mm_tokens_per_image": 6},
        ("mm_tokens_per_image", "4 x 4"),
    ),
    "a Gemma 3 of another language model": (
        {"model_type": "gemma3", "text_config": QWEN2, "vision_config": SIGLIP},
        ("gemma3_text",),
    ),
    "a class token in grids": (
        {**LLAVA, "model_type": "llava_next", "vision_config": CLIP, "vision_feature_select_strategy": "full"},
        ("vision_feature_select_strategy",),
    ),
    "a class token that isn't there": (LLAVA, ("vision_feature_select_strategy", "no class token")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_does_not_convert_is_refused(case: str) -> None:
    """A setting that is skipped would be seen in the logits alone, or not at all."""
    config, words = REFUSED[case]
    with expect_error(CheckpointError, *words):
        reader = FORMAT.reader(config, where="config.json")
        FORMAT.model_from_config(reader, config["model_type"])
        FORMAT.groups_from_config(reader, [], where="config.json")
