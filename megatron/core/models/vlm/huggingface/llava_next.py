"""LLaVA-NeXT (1.6): a LLaVA whose images are cut into grids of tiles, with a learned vector at ends of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from megatron.config.vision import VisionConfig
from megatron.core.conversion.huggingface.config_reader import Json
from megatron.core.conversion.tables import Row
from megatron.core.models.vlm.huggingface.llava import LLAVA, LlavaType
from megatron.core.models.vlm.huggingface.nested import GRIDS, NestedReader
from megatron.core.models.vlm.huggingface.processing import pinpoints

_USUAL = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


class LlavaNextType(LlavaType):
    """A LLaVA with grids."""

    @override
    def read_features(self, reader: NestedReader, vision: dict[str, Any]) -> dict[str, Any]:
        """A LLaVA's, and the grids."""
        found = super().read_features(reader, vision)
        if found["vision_class_token"] and vision["vision_model_type"] == "clip":
            raise reader.refuse("vision_feature_select_strategy", "grids of tiles have no place for class tokens")
        return {**found, "image_fit": "stretch", "image_grids": _grids(reader, vision["img_h"])}

    @override
    def write_features(self, vision: VisionConfig, source: Json) -> dict[str, Any]:
        """A LLaVA's, and sizes of grids in pixels."""
        return {**super().write_features(vision, source), "image_grid_pinpoints": pinpoints(vision)}

    @override
    def projector_rows(self, vision: VisionConfig) -> Sequence[Row]:
        """Both matrices, and the vector at ends of rows."""
        rows = super().projector_rows(vision)
        return (*rows, Row("vision_projection.image_newline", "image_newline", is_parameter=True))

    @override
    def not_of_type(self, vision: VisionConfig) -> dict[str, bool]:
        """Reasons why a model is no LLaVA-NeXT, and whether they hold."""
        reasons = super().not_of_type(vision)
        del reasons[GRIDS]
        return {**reasons, "images are not cut into grids (--image-grids)": not vision.image_grids}


def _grids(reader: NestedReader, side: int) -> tuple[str, ...]:
    """Grids of tiles of ``side`` pixels, from their heights and widths in pixels."""
    found = reader("image_grid_pinpoints")
    is_list = (
        isinstance(found, list) and bool(found) and all(isinstance(each, list) and len(each) == 2 for each in found)
    )
    sizes = [size for each in found for size in each] if is_list else [None]
    if not all(isinstance(size, int) and size > 0 and size % side == 0 for size in sizes):
        raise reader.refuse("image_grid_pinpoints", f"grids have heights and widths that tiles of {side} pixels fill")
    return tuple(f"{height // side}x{width // side}" for height, width in found)


LLAVA_NEXT = LlavaNextType(
    **{
        **{each.name: getattr(LLAVA, each.name) for each in dataclasses.fields(LLAVA)},
        "architecture": "LlavaNextForConditionalGeneration",
        "defaults": {**LLAVA.defaults, "image_grid_pinpoints": _USUAL},
        "kinds": {**LLAVA.kinds, "image_grid_pinpoints": list},
        "idle": (*LLAVA.idle, "use_image_newline_parameter"),
        "about": (
            "LLaVA-NeXT (1.6), with a CLIP or SigLIP encoder and the decoders of llava; images are cut into grids of "
            "tiles, without bars"
        ),
        "example": "llava-hf/llava-v1.6-mistral-7b-hf",
    }
)
