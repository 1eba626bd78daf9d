"""Pictures are cut as transformers' processors cut them, from their files, and files of ours are read by them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing

pytest.importorskip("transformers", reason="pictures are compared with the dev extra's transformers")

from transformers import AutoImageProcessor, AutoProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.images.expansion import feature_runs
from megatron.core.images.prompts import CutImage
from megatron.core.inference.image_prompts import ImagePrompts
from megatron.core.models.vlm.huggingface.processing import with_processing, write_processing
from megatron.core.tokenizers.huggingface import load as load_tokenizer
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error
from tests.harness.serving import END, byte_tokenizer

SQUARE: dict[str, Any] = {"height": 16, "width": 16}
CROP: dict[str, Any] = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
MEAN: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PROCESSORS: dict[str, tuple[str, Any]] = {
    "clip": ("clip", lambda: CLIPImageProcessorPil(**CROP)),
    "siglip": ("siglip", lambda: SiglipImageProcessorPil(size=SQUARE)),
    "bars of mean color": ("clip", lambda: LlavaImageProcessorPil(do_pad=True, **CROP)),
    "tiles": (
        "internvit300M",
        lambda: GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=6, **MEAN),
    ),
}
SHAPES = [(16, 16), (33, 20), (20, 61), (7, 5), (100, 31), (48, 33)]


def settings(kind: str) -> VisionConfig:
    """Of an encoder of 16 x 16 pixels."""
    found = VisionConfig(vision_model_type=kind, img_h=16, img_w=16, patch_dim=4)  # type: ignore[arg-type]
    return found.resolved(ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1), (1,))


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def normalized(cut: CutImage, vision: VisionConfig) -> np.ndarray[Any, Any]:
    mean, deviation = (np.array(each).reshape(3, 1, 1) for each in (vision.kind.mean, vision.kind.deviation))
    found: np.ndarray[Any, Any] = (cut.tiles / 255 - mean) / deviation
    return found


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A pixel to the side, or a side of 17 instead of 16, is another picture to an encoder, and no error."""
    kind, make = PROCESSORS[name]
    theirs = make()
    theirs.save_pretrained(tmp_path)
    vision, notes = with_processing(settings(kind), {"preprocessor_config.json": tmp_path / "preprocessor_config.json"})
    assert not notes
    write_processing(vision, "internvl" if name == "tiles" else "llava", tmp_path, mark="<image>")
    load: Any = AutoImageProcessor.from_pretrained
    written = load(tmp_path)
    for shape in SHAPES:
        ours = normalized(CutImage.of(picture(*shape), vision), vision)
        for each in (theirs, written):
            wanted = each(picture(*shape), return_tensors="np")["pixel_values"]
            np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "said",
    [
        {"size": "big"},
        {"size": {"height": None, "width": 16}},
        {"size": {}},
        {"size": [16, 16]},
        {"image_mean": 0.5},
        {"image_mean": ["x"]},
        {"max_patches": "many"},
        {"max_patches": -1},
        {"max_patches": 10**9},
    ],
    ids=str,
)
def test_damaged_settings_of_pictures_are_one_sentence(said: dict[str, Any], tmp_path: Path) -> None:
    """They ended with a traceback, or were taken for a billion tiles."""
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(said))
    with expect_error(CheckpointError, file):
        with_processing(settings("clip"), {file.name: file})


def tokenizer_with(mark: str, folder: Path, *more: str, bos: str | None = None) -> Any:
    """A fast tokenizer with a mark of images, saved in the folder; ``bos`` begins its texts."""
    pipeline: Any = next(each for each in vars(byte_tokenizer()).values() if type(each).__name__ == "Tokenizer")
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=pipeline, eos_token=END, **({} if bos is None else {"bos_token": bos}))
    fast.add_special_tokens({"additional_special_tokens": [mark, *more]})
    if bos is not None:
        begun = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, fast.convert_tokens_to_ids(bos))])
        fast.backend_tokenizer.post_processor = begun
    fast.save_pretrained(folder)
    return fast


def test_our_files_make_their_prompts(tmp_path: Path) -> None:
    """transformers' processor puts as many places into a text as this project does."""
    fast = tokenizer_with("<image>", tmp_path)
    vision = dataclasses.replace(settings("clip"), vision_class_token=False, image_fit="crop")
    write_processing(vision, "llava", tmp_path, mark="<image>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    load: Any = AutoProcessor.from_pretrained
    processor = load(tmp_path)
    found = processor(text="a <image> b", images=picture(30, 20), return_tensors="np")
    mark = fast.convert_tokens_to_ids("<image>")
    assert (found["input_ids"] == mark).sum() == vision.features_per_tile == 16
    np.testing.assert_allclose(
        normalized(CutImage.of(picture(30, 20), vision), vision), found["pixel_values"], rtol=0, atol=1e-6
    )


def test_grids_are_those_of_llava_next(tmp_path: Path) -> None:
    """Another grid, bars that take places, or a tile elsewhere: pixels and the number of places are transformers'."""
    fast = tokenizer_with("<image>", tmp_path)
    grids = ("1x2", "2x1", "2x2", "1x3", "3x1")
    vision = dataclasses.replace(settings("clip"), vision_class_token=False, image_grids=grids)
    write_processing(vision, "llava_next", tmp_path, mark="<image>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava_next"}))
    load: Any = AutoProcessor.from_pretrained
    processor, mark = load(tmp_path, backend="pil"), fast.convert_tokens_to_ids("<image>")
    for shape in SHAPES:
        found = processor(text="a <image> b", images=picture(*shape), return_tensors="np")
        cut = CutImage.of(picture(*shape), vision)
        wanted = found["pixel_values"][0]
        np.testing.assert_allclose(normalized(cut, vision), wanted, rtol=0, atol=1e-6)
        assert (found["input_ids"] == mark).sum() == len(np.concatenate(feature_runs(cut.grid, vision)))
    read, notes = with_processing(vision, {"processor_config.json": tmp_path / "processor_config.json"})
    assert read == vision and not notes


def test_gemma_3_is_prompted_as_by_transformers(tmp_path: Path) -> None:
    """Words around pictures grow together with the text's own lines, and resizing is bilinear."""
    fast = tokenizer_with("<image_soft_token>", tmp_path, "<start_of_image>", "<end_of_image>")
    more = {"image_tag_type": "gemma3", "image_resample": "bilinear", "vision_pool_size": 2}
    vision = dataclasses.replace(settings("siglip"), image_attention="bidirectional", **more)  # type: ignore[arg-type]
    write_processing(vision, "gemma3", tmp_path, mark="<image_soft_token>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    settings_of = tmp_path / "tokenizer_config.json"
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    settings_of.write_text(json.dumps({**json.loads(settings_of.read_text()), "extra_special_tokens": named}))
    load: Any = AutoProcessor.from_pretrained
    processor = load(tmp_path, backend="pil")
    shown = [picture(30, 20), picture(9, 40)]
    found = processor(text="a\n<start_of_image>\nb <start_of_image>", images=[shown], return_tensors="np")
    cut = [CutImage.of(each, vision) for each in shown]
    tokenizer = load_tokenizer(str(tmp_path), extra_ids=0)
    prompts = ImagePrompts(vision, tokenizer, fast.convert_tokens_to_ids("<image_soft_token>"))
    ids, images = prompts.encoded("a\n<image>\nb <image>", cut, whole=True)
    assert ids == found["input_ids"][0].tolist() and images is not None
    assert ((images.places >= 0) == (found["token_type_ids"][0] == 1)).all()
    wanted = np.concatenate([normalized(each, vision) for each in cut])
    np.testing.assert_allclose(wanted, found["pixel_values"], rtol=0, atol=1e-6)
    read, notes = with_processing(vision, {"preprocessor_config.json": tmp_path / "preprocessor_config.json"})
    assert read == vision and not notes


def test_paligemma_is_prompted_as_by_transformers(tmp_path: Path) -> None:
    """Images stand before the token that begins a text."""
    fast = tokenizer_with("<image>", tmp_path, bos="<bos>")
    vision = dataclasses.replace(settings("siglip"), image_attention="prefix")
    write_processing(vision, "paligemma", tmp_path, mark="<image>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "paligemma"}))
    load: Any = AutoProcessor.from_pretrained
    processor = load(tmp_path, backend="pil")
    found = processor(text="<image>caption", images=picture(30, 20), return_tensors="np")
    cut = CutImage.of(picture(30, 20), vision)
    prompts = ImagePrompts(vision, load_tokenizer(str(tmp_path), extra_ids=0), fast.convert_tokens_to_ids("<image>"))
    ids, images = prompts.encoded("<image>caption\n", [cut], whole=True)
    assert ids == found["input_ids"][0].tolist() and images is not None and (images.places[:16] >= 0).all()
    np.testing.assert_allclose(normalized(cut, vision), found["pixel_values"], rtol=0, atol=1e-6)


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another mean": ({"image_mean": [0.5, 0.5, 0.5]}, ("image_mean", "0.48145466")),
    "another size": ({"size": {"height": 24, "width": 24}}, ("(24, 24)", "(16, 16)")),
}


@pytest.mark.parametrize("case", WRONG)
def test_pictures_of_another_encoder_are_refused(case: str, tmp_path: Path) -> None:
    """They would be read with other colors, or at other places."""
    content, words = WRONG[case]
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(content))
    with expect_error(CheckpointError, *words):
        with_processing(settings("clip"), {path.name: path})
    path.write_text(json.dumps({"resample": 1}))
    _, [note] = with_processing(settings("clip"), {path.name: path})
    assert "resample = 1" in note
