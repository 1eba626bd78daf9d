"""How published models cut pictures: files of transformers' processors, read as our settings and written from them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.vision import VisionConfig
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.vlm.huggingface.vision import TOWERS
from megatron.errors import CheckpointError
from megatron.small_files import read_json, shown

PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"
_BICUBIC, _BILINEAR = 3, 2
_MOST_TILES = 1024
_TYPES = {"crop": "CLIPImageProcessor", "stretch": "SiglipImageProcessor", "pad": "LlavaImageProcessor"}
_CLASSES = {
    "llava": "LlavaProcessor",
    "llava_next": "LlavaNextProcessor",
    "internvl": "InternVLProcessor",
    "gemma3": "Gemma3Processor",
    "paligemma": "PaliGemmaProcessor",
}


def usual_processing(vision: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers does to pictures where no file says it, as fields of ``VisionConfig``."""
    if TOWERS[vision["vision_model_type"]] == "internvl_vision":
        tags = {"image_tag_type": "internvl"}
        return {"use_tiling": True, "max_num_tiles": 12, "use_thumbnail": True, "image_fit": "stretch", **tags}
    return {"image_fit": "crop" if vision["vision_model_type"] == "clip" else "stretch"}


def with_processing(vision: VisionConfig, files: Mapping[str, AnyPath]) -> tuple[VisionConfig, list[str]]:
    """The settings with what a model's ``files`` say about pictures, and notes about what differs here.

    Raises CheckpointError for pictures of another size, mean or deviation than the encoder's.
    """
    found, name = _stated(files)
    if not found:
        return vision, []
    kind, size = vision.kind, (vision.img_h, vision.img_w)
    for key, own in (("image_mean", kind.mean), ("image_std", kind.deviation)):
        stated = found.get(key)
        if stated is not None and _rounded(stated) != _rounded(own):
            raise CheckpointError(
                f"{name} says {key} = {str(stated)[:80]}: a {vision.vision_model_type} encoder has {list(own)}"
            )
    stated = found.get("crop_size") if found.get("do_center_crop") else found.get("size")
    if stated is not None and (sides := _sides(stated)) != size:
        raise CheckpointError(f"{name} has pictures of {sides or shown(stated)} pixels, and the encoder has {size}")
    notes = []
    if (resample := found.get("resample", _BICUBIC)) not in (_BICUBIC, _BILINEAR):
        notes.append(f"note: {name} says resample = {resample}: pictures are resized by bicubic interpolation here")
    if found.get("do_pan_and_scan"):
        notes.append(f"note: {name} says do_pan_and_scan = true: no crops of pictures are added here")
    vision = dataclasses.replace(vision, image_resample="bilinear" if resample == _BILINEAR else "bicubic")
    if vision.image_grids:
        if (sizes := found.get("image_grid_pinpoints", wanted := pinpoints(vision))) != wanted:
            raise CheckpointError(f"{name} has image_grid_pinpoints {sizes}, and config.json has {wanted}")
        return vision, notes
    if "max_patches" in found or "crop_to_patches" in found:
        most = found.get("max_patches", 12)
        if type(most) is not int or not 0 < most <= _MOST_TILES:
            raise CheckpointError(
                f"{name} says max_patches = {shown(most)}: a picture has from 1 to {_MOST_TILES} tiles"
            )
        return dataclasses.replace(vision, use_tiling=most > 1, max_num_tiles=most, use_thumbnail=most > 1), notes
    is_padded = found.get("do_pad") and str(found.get("image_processor_type", "")).startswith("Llava")
    if is_padded:
        return dataclasses.replace(vision, image_fit="pad"), notes
    return dataclasses.replace(vision, image_fit="crop" if found.get("do_center_crop") else "stretch"), notes


def pinpoints(vision: VisionConfig) -> list[list[int]]:
    """Heights and widths in pixels of the grids into which images are cut."""
    return [[rows * vision.img_h, columns * vision.img_w] for rows, columns in vision.grids]


def _stated(files: Mapping[str, AnyPath]) -> tuple[dict[str, Any], str]:
    """Settings of the image processor, and the file that has them."""
    for name in (PROCESSOR, PREPROCESSOR):
        if (path := files.get(name)) is not None:
            content: dict[str, Any] = read_json(path, dict[str, Any], error=CheckpointError)
            inside = content.get("image_processor") if name == PROCESSOR else content
            if isinstance(inside, dict) and inside:
                return inside, str(path)
    return {}, ""


def _sides(size: Any) -> tuple[Any, ...] | None:
    """Height and width of a size in any of its forms: a number, the shortest edge, or both. None for another form."""
    names = ("shortest_edge",) * 2 if isinstance(size, dict) and "shortest_edge" in size else ("height", "width")
    sides = tuple(size.get(name) for name in names) if isinstance(size, dict) else (size, size)
    return sides if all(type(side) is int for side in sides) else None


def _rounded(numbers: Any) -> Any:
    """Numbers to six digits; what is no list of numbers stays as it is."""
    is_list = isinstance(numbers, (list, tuple)) and all(isinstance(each, (int, float)) for each in numbers)
    return [round(each, 6) for each in numbers] if is_list else numbers


def write_processing(vision: VisionConfig, model_type: str, folder: Path, *, mark: str | None) -> None:
    """Write what transformers' AutoProcessor reads: how pictures are cut, and what stands for one in texts.

    ``mark``: the text of the id at places of images, where the tokenizer has one.
    """
    settings: dict[str, Any] = {
        **dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"), True),
        "image_mean": list(vision.kind.mean),
        "image_std": list(vision.kind.deviation),
        "resample": _BICUBIC if vision.image_resample == "bicubic" else _BILINEAR,
        "rescale_factor": 1 / 255,
    }
    sides = {"height": vision.img_h, "width": vision.img_w}
    if model_type == "internvl":
        most = vision.max_num_tiles if vision.use_tiling else 1
        tiles = {"crop_to_patches": most > 1, "min_patches": 1, "max_patches": most}
        settings |= {"image_processor_type": "GotOcr2ImageProcessor", "size": sides, **tiles}
        more: dict[str, Any] = {"image_seq_length": vision.features_per_tile}
    elif model_type in ("gemma3", "paligemma"):
        kind = "Gemma3ImageProcessor" if model_type == "gemma3" else "SiglipImageProcessor"
        settings |= {"image_processor_type": kind, "size": sides, "image_seq_length": vision.features_per_tile}
        more = {"image_seq_length": vision.features_per_tile} if model_type == "gemma3" else {}
    else:
        settings["image_processor_type"] = _TYPES[vision.image_fit]
        if vision.image_grids:
            settings |= {"image_processor_type": "LlavaNextImageProcessor", "do_center_crop": True, "do_pad": True}
            settings |= {"size": {"shortest_edge": vision.img_h}, "crop_size": sides}
            settings |= {"image_grid_pinpoints": pinpoints(vision)}
        elif vision.image_fit == "stretch":
            settings |= {"size": sides}
        else:
            is_padded = vision.image_fit == "pad"
            settings |= {"size": {"shortest_edge": min(sides.values())}, "crop_size": sides, "do_center_crop": True}
            settings |= {"do_pad": True} if is_padded else {}
        is_whole = vision.keeps_class_token or not vision.kind.class_token
        more = {
            "patch_size": vision.patch_dim,
            "num_additional_image_tokens": int(vision.kind.class_token),
            "vision_feature_select_strategy": "full" if is_whole else "default",
            **({} if mark is None else {"image_token": mark}),
        }
    _write(folder / PREPROCESSOR, {**settings, "processor_class": _CLASSES[model_type]})
    _write(folder / PROCESSOR, {"processor_class": _CLASSES[model_type], "image_processor": settings, **more})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def replaced_vision(groups: Sequence[object], vision: VisionConfig) -> tuple[object, ...]:
    """The groups with another vision encoder's settings."""
    return tuple(vision if isinstance(each, VisionConfig) else each for each in groups)
