"""Gemmas that read images: PaliGemma 1 and 2, and Gemma 3. A SigLIP, one matrix, and places that see later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.config_reader import Json
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform
from megatron.core.models.vlm.huggingface.nested import (
    AHEAD,
    AVERAGED,
    NESTED_KINDS,
    PROJECTOR,
    NestedReader,
    NestedType,
    unusual_places,
)
from megatron.errors import CheckpointError

_TURNED = Transform(lambda parts, model: parts[0].t(), lambda tensor, model: [tensor.t().contiguous()])
_BOTH_WAYS = "use_bidirectional_attention"


def _unusual(vision: VisionConfig, projector: str, attention: str) -> dict[str, bool]:
    reasons = {
        **unusual_places(vision),
        f"the projector is not of the type {projector}": vision.vision_projection_type != projector,
        "the projector has a LayerNorm": vision.vision_projection_norm,
        "patches are joined (--pixel-shuffle)": vision.pixel_shuffle,
        "no norm is behind the encoder's last layer (--disable-vision-final-norm)": not vision.vision_final_norm,
        f"attention to places of images is not of the type {attention}": vision.image_attention != attention,
    }
    del reasons[AHEAD]
    return reasons


class PaliGemmaType(NestedType):
    """A matrix with a bias; images and prompt see each other, answers what is before them."""

    @override
    def text_settings(self, text: Json, where: str) -> dict[str, Any]:
        """Without the setting that says that a prompt sees itself both ways, as all of these models do."""
        if text.get(_BOTH_WAYS) is False:
            raise CheckpointError(f"{where} says {_BOTH_WAYS} = false: prompts of a paligemma see themselves both ways")
        return {name: value for name, value in text.items() if name != _BOTH_WAYS}

    @override
    def read_features(self, reader: NestedReader, vision: dict[str, Any]) -> dict[str, Any]:
        """One matrix, as wide as the language model."""
        if (width := reader("projection_dim")) != reader.text("hidden_size"):
            advice = f"the language model is {reader.text('hidden_size')} wide"
            raise reader.refuse("projection_dim", advice) if width else reader.error(advice)
        return {"vision_projection_type": "affine", "image_attention": "prefix"}

    @override
    def write_features(self, vision: VisionConfig, source: Json) -> dict[str, Any]:
        """Nothing more: all of these models compute features in one way."""
        return {}

    @override
    def write_sizes(self, model: ModelConfig) -> dict[str, Any]:
        """The width of the projector's result."""
        return {**dict.fromkeys(("projection_dim", "hidden_size"), model.hidden_size), "vocab_size": model.vocab_size}

    @override
    def projector_rows(self, vision: VisionConfig) -> Sequence[Row]:
        """The matrix and its bias."""
        return (Row("vision_projection.linear", f"{PROJECTOR}linear"),)

    @override
    def not_of_type(self, vision: VisionConfig) -> dict[str, bool]:
        """Reasons why a model is no PaliGemma, and whether they hold."""
        return _unusual(vision, "affine", "prefix")


class Gemma3Type(NestedType):
    """Means of squares of patches, an RMSNorm and a matrix; places of an image see each other."""

    @override
    def read_features(self, reader: NestedReader, vision: dict[str, Any]) -> dict[str, Any]:
        """The squares whose features are averaged."""
        count, side = reader("mm_tokens_per_image"), vision["img_h"] // vision["patch_dim"]
        root = int(count**0.5)
        if root**2 != count or side % root:
            raise reader.refuse("mm_tokens_per_image", f"squares of the encoder's {side} x {side} patches are averaged")
        return {
            "vision_pool_size": side // root,
            "vision_projection_type": "rms-affine",
            "image_attention": "bidirectional",
            "image_tag_type": "gemma3",
            "image_resample": "bilinear",
        }

    @override
    def write_features(self, vision: VisionConfig, source: Json) -> dict[str, Any]:
        """Features of an image, and ids of the tokens around them."""
        around = {name: source.get(name, usual) for name, usual in _AROUND.items()}
        return {"mm_tokens_per_image": vision.features_per_tile, **around}

    @override
    def projector_rows(self, vision: VisionConfig) -> Sequence[Row]:
        """The norm and the matrix, whose rows are inputs."""
        theirs = f"{PROJECTOR}mm_input_projection_weight"
        return (
            Row("vision_projection.norm", f"{PROJECTOR}mm_soft_emb_norm"),
            Row("vision_projection.linear.weight", theirs, _TURNED, is_parameter=True),
        )

    @override
    def not_of_type(self, vision: VisionConfig) -> dict[str, bool]:
        """Reasons why a model is no Gemma 3, and whether they hold."""
        reasons = _unusual(vision, "rms-affine", "bidirectional")
        del reasons[AVERAGED]
        return reasons


_AROUND = {"boi_token_index": 255999, "eoi_token_index": 256000}
PALIGEMMA = PaliGemmaType(
    architecture="PaliGemmaForConditionalGeneration",
    table=(),
    settings={},
    encoders=("siglip_vision_model",),
    texts=("gemma", "gemma2"),
    is_tied=True,
    defaults={"image_token_index": 256000, "projection_dim": 2048},
    kinds={**NESTED_KINDS, "projection_dim": Count},
    idle=("hidden_size", "num_image_tokens", "projection_dim", "vision_use_head", "vocab_size", "ignore_index"),
    about="PaliGemma 1 and 2; with the window of a Gemma 2, prompts that are longer than it see its length alone",
    example="google/paligemma-3b-pt-224",
)
GEMMA3 = Gemma3Type(
    architecture="Gemma3ForConditionalGeneration",
    table=(),
    settings={},
    encoders=("siglip_vision_model",),
    texts=("gemma3_text",),
    is_tied=True,
    defaults={"image_token_index": 262144, "mm_tokens_per_image": 256},
    kinds={**NESTED_KINDS, "mm_tokens_per_image": Count},
    idle=(*_AROUND, "vision_use_head", "initializer_range"),
    about="Gemma 3 with images; pictures are read whole (no pan and scan)",
    example="google/gemma-3-4b-it",
)
