"""LLaVA-1.5: CLIP or SigLIP, a projector of two matrices, and a language model.

LLaVA reads the hidden states before the encoder's last layer. Layers behind them compute nothing that is read, so they
are not part of our model, and what is written is an encoder without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from megatron.config.vision import VisionConfig
from megatron.core.conversion.huggingface.config_reader import Json
from megatron.core.conversion.tables import Row
from megatron.core.models.vlm.huggingface.nested import (
    MLP_ROWS,
    NESTED_KINDS,
    PROJECTIONS,
    TEXTS,
    NestedReader,
    NestedType,
    activation_name,
    not_plain_mlp,
    passed_layers,
    unusual_places,
)


class LlavaType(NestedType):
    """Features of a layer of the encoder, through two matrices."""

    @override
    def read_features(self, reader: NestedReader, vision: dict[str, Any]) -> dict[str, Any]:
        """The layer of features, and whether the class token is one of them."""
        is_whole = reader.one_of("vision_feature_select_strategy", {"default": False, "full": True})
        if not is_whole and vision["vision_model_type"] == "siglip":
            raise reader.refuse("vision_feature_select_strategy", "a SigLIP encoder has no class token to leave out")
        return {
            "vision_num_layers": passed_layers(reader, vision["vision_num_layers"]),
            "vision_final_norm": vision["vision_model_type"] != "siglip",  # which only pooled features pass
            "vision_class_token": is_whole,
            "vision_projection_activation": reader.one_of("projector_hidden_act", PROJECTIONS),
        }

    @override
    def write_features(self, vision: VisionConfig, source: Json) -> dict[str, Any]:
        """Features of the last layer that there is."""
        is_whole = vision.keeps_class_token or not vision.kind.class_token
        return {
            "image_seq_length": vision.features_per_tile,
            "projector_hidden_act": activation_name(vision, source),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full" if is_whole else "default",
            "multimodal_projector_bias": True,
        }

    @override
    def projector_rows(self, vision: VisionConfig) -> Sequence[Row]:
        """Both matrices."""
        return MLP_ROWS

    @override
    def not_of_type(self, vision: VisionConfig) -> dict[str, bool]:
        """Reasons why a model is no LLaVA-1.5, and whether they hold."""
        return {
            **not_plain_mlp(vision),
            "the projector has a norm": vision.vision_projection_norm,
            "patches are joined (--pixel-shuffle)": vision.pixel_shuffle,
            **unusual_places(vision),
            "a norm is behind the encoder's last layer (--disable-vision-final-norm is not given)": (
                vision.kind.post_norm and vision.vision_final_norm
            ),
        }


LLAVA = LlavaType(
    architecture="LlavaForConditionalGeneration",
    table=(),
    settings={},
    encoders=("clip_vision_model", "siglip_vision_model"),
    texts=TEXTS,
    expected={"multimodal_projector_bias": True},
    defaults={
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_index": 32000,
    },
    kinds={**NESTED_KINDS, "multimodal_projector_bias": bool},
    idle=("image_seq_length", "ignore_index", "projection_dim", "vision_use_head"),
    about=(
        "LLaVA 1.5, with a CLIP or SigLIP encoder and a decoder, dense or with experts, such as a Llama, Mistral, "
        "Mixtral, Qwen or Gemma; the "
        "encoder's layers behind the features are left out"
    ),
    example="llava-hf/llava-1.5-7b-hf",
)
