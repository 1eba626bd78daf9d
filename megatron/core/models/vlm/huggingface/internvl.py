"""InternVL: an InternViT, squares of patches joined, a norm and two matrices, and a language model."""

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
    PROJECTOR,
    TEXTS,
    NestedReader,
    NestedType,
    activation_name,
    not_plain_mlp,
    passed_layers,
    unusual_places,
)


class InternVLType(NestedType):
    """Squares of 2 x 2 patches, normalized and through two matrices."""

    @override
    def read_features(self, reader: NestedReader, vision: dict[str, Any]) -> dict[str, Any]:
        """Joined patches without the class token."""
        if vision["img_h"] // vision["patch_dim"] % 2:
            raise reader.error("the encoder's images have an odd number of patches a side, of which two are joined")
        return {
            "vision_num_layers": passed_layers(reader, vision["vision_num_layers"]),
            "vision_class_token": False,
            "pixel_shuffle": True,
            "vision_projection_norm": True,
            "vision_projection_activation": reader.one_of("projector_hidden_act", PROJECTIONS),
        }

    @override
    def write_features(self, vision: VisionConfig, source: Json) -> dict[str, Any]:
        """Features of the last layer that there is."""
        return {
            "image_seq_length": vision.features_per_tile,
            "downsample_ratio": 0.5,
            "projector_hidden_act": activation_name(vision, source),
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        }

    @override
    def projector_rows(self, vision: VisionConfig) -> Sequence[Row]:
        """The norm and both matrices."""
        return (Row("vision_projection.norm", f"{PROJECTOR}layer_norm"), *MLP_ROWS)

    @override
    def not_of_type(self, vision: VisionConfig) -> dict[str, bool]:
        """Reasons why a model is no InternVL, and whether they hold."""
        return {
            **not_plain_mlp(vision),
            "the projector has no norm": not vision.vision_projection_norm,
            **unusual_places(vision),
            "patches are not joined (--pixel-shuffle)": not vision.pixel_shuffle,
        }


INTERNVL = InternVLType(
    architecture="InternVLForConditionalGeneration",
    table=(),
    settings={},
    encoders=("internvl_vision",),
    texts=("qwen2", *(each for each in TEXTS if each != "qwen2")),
    is_tied=True,
    expected={"downsample_ratio": 0.5, "vision_feature_select_strategy": "default"},
    defaults={
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_id": 151667,
    },
    kinds={**NESTED_KINDS, "downsample_ratio": float},
    idle=(
        *("image_seq_length", "layer_scale_init_value", "hidden_dropout_prob", "projection_dropout"),
        *("use_mean_pooling", "vision_feature_layer"),
    ),
    about=(
        "InternVL 2.5, 3 and 3.5 as transformers has them (repositories that end with -hf), with a decoder, dense or "
        "with experts; the encoder has RMSNorm, norms of queries and keys and no bias of them, or none of these"
    ),
    example="OpenGVLab/InternVL3-1B-hf",
)
