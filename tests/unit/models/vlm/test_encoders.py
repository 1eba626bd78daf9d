"""Encoders of images compute what transformers' do, forward and backward, from the same tensors, which go both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Match, matches_of, to_ours, to_theirs
from megatron.core.models.vlm.huggingface.vision import DEFAULTS, KINDS, ROWS, read_vision
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.vision.encoder import VisionEncoder, pixel_shuffled
from tests.harness.published import in_fp64

transformers = pytest.importorskip("transformers", reason="encoders are compared with the dev extra's transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SQUARES = {**SIZES, "image_size": 16, "patch_size": 4}
TWICE = {**SIZES, "image_size": (16, 16), "patch_size": (4, 4)}
ENCODERS: dict[str, Callable[[], Any]] = {
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SQUARES)),
    "clip with another GELU": lambda: transformers.CLIPVisionModel(
        transformers.CLIPVisionConfig(**SQUARES, hidden_act="gelu")
    ),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SQUARES)),
    "internvit": lambda: transformers.InternVLVisionModel(
        transformers.InternVLVisionConfig(**TWICE, use_qk_norm=True, norm_type="rms_norm", use_mean_pooling=True)
    ),
    "internvit 300M": lambda: transformers.InternVLVisionModel(
        transformers.InternVLVisionConfig(**TWICE, attention_bias=True, norm_type="layer_norm", use_mean_pooling=True)
    ),
}
DECODER = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


def random_encoder(name: str) -> Any:
    """Transformers' encoder in fp64, of which every parameter is random."""
    torch.manual_seed(1)
    theirs = ENCODERS[name]().double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    return theirs


def settings_of(theirs: Any) -> VisionConfig:
    """Our settings, read from the config of transformers' encoder."""
    config = theirs.config.to_dict()
    found = VisionConfig(**read_vision(ConfigReader(config, DEFAULTS[config["model_type"]], "it", kinds=KINDS)))
    return found.resolved(DECODER, (1,))


def encoder_from(theirs: Any, settings: VisionConfig) -> tuple[VisionEncoder, list[Match]]:
    """Our encoder with their weights, and the rows of its parameters."""
    ours = VisionEncoder(settings, settings.encoder(DECODER), ModelContext.single(dtype=torch.float64))
    shardings = {f"vision_model.{name}": sharding for name, _, sharding in sharded_parameters(ours)}
    table = ROWS[str(settings.vision_model_type)](settings, prefix="")
    found = matches_of(shardings, table, DECODER, where="it")
    made = to_ours(found, lazy(theirs.state_dict()), DECODER, where="it", ignored=lambda name: name.startswith("head."))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(made[f"vision_model.{name}"].make())
    return ours, found


def lazy(tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
    return {name: LazyTensor(tuple(each.shape), each.dtype, each.detach) for name, each in tensors.items()}


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_computes_what_transformers_does(name: str) -> None:
    """A norm, a bias or a scale in another place would give features that no projector has learned to read."""
    theirs = random_encoder(name)
    settings = settings_of(theirs)
    ours, found = encoder_from(theirs, settings)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    hidden = ours(images).transpose(0, 1)
    with in_fp64():
        wanted = theirs(pixel_values=images).last_hidden_state
    torch.testing.assert_close(hidden, wanted, rtol=0, atol=1e-9)

    direction = torch.randn_like(wanted)
    (wanted * direction).sum().backward()
    (hidden * direction).sum().backward()
    gradients = {f"vision_model.{each}": parameter.grad for each, parameter in ours.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    back = to_theirs(
        found, lazy({each: gradient for each, gradient in gradients.items() if gradient is not None}), DECODER
    )
    parameters = dict(theirs.named_parameters())
    compared = 0
    for each, tensor in back.items():
        if (gradient := parameters[each].grad) is not None:
            torch.testing.assert_close(tensor.make(), gradient, rtol=0, atol=1e-9)
            compared += 1
    assert compared >= len(found)


@pytest.mark.parametrize("name", ENCODERS)
def test_tensors_go_back_as_they_came(name: str) -> None:
    """A model that is trained here is used elsewhere."""
    theirs = random_encoder(name)
    ours, found = encoder_from(theirs, settings_of(theirs))
    back = to_theirs(found, lazy({f"vision_model.{each}": tensor for each, tensor in ours.named_parameters()}), DECODER)
    unused = ("head.", "post_layernorm.") if name.startswith("clip") else ("head.",)
    wanted = {each: tensor for each, tensor in theirs.state_dict().items() if not each.startswith(unused)}
    assert back.keys() - wanted.keys() <= {"post_layernorm.weight", "post_layernorm.bias"}
    for each, tensor in wanted.items():
        assert torch.equal(back[each].make(), tensor), each


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_images_of_another_size_have_interpolated_positions(name: str) -> None:
    """A model of 16 pixels that is trained on with 24 x 32 would begin with positions of other places."""
    theirs = random_encoder(name)
    settings = replace(settings_of(theirs), img_h=24, img_w=32)
    ours, _ = encoder_from(theirs, settings)
    images = torch.randn(2, 3, 24, 32, dtype=torch.float64)
    wanted = theirs(pixel_values=images, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(ours(images).transpose(0, 1), wanted, rtol=0, atol=1e-9)


def test_bytes_are_normalized_by_the_kind_of_the_encoder() -> None:
    """Pixels with another mean are another picture to a trained encoder."""
    theirs = random_encoder("clip")
    settings = settings_of(theirs)
    ours, _ = encoder_from(theirs, settings)
    pixels = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    processor = transformers.CLIPImageProcessor(do_resize=False, do_center_crop=False)
    given = processor(list(pixels), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ours(pixels), ours(given), rtol=0, atol=1e-5)


def test_squares_of_patches_are_joined_as_in_internvl() -> None:
    """Features in another order would be read by the wrong columns of the projector."""
    model = transformers.InternVLModel.__new__(transformers.InternVLModel)
    hidden = torch.randn(3, 8, 8, 5)  # tiles, rows, columns, width
    wanted = transformers.InternVLModel.pixel_shuffle(model, hidden, 0.5)
    ours = pixel_shuffled(hidden.flatten(1, 2).transpose(0, 1), (8, 8))
    assert torch.equal(ours.transpose(0, 1), wanted.flatten(1, 2))
