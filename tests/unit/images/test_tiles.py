"""Pictures as tiles: which grid, which pixels, and what stands around them in a text."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from megatron.config.vision import VisionConfig
from megatron.core.images.expansion import expansion, feature_runs
from megatron.core.images.prompts import PromptImages
from megatron.core.images.tiles import Grid, grid_of, tiles_of
from megatron.errors import ConfigError
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error
from tests.unit.models.vlm.test_samples import CLIP, VLM


def _vision(**settings: object) -> VisionConfig:
    return VisionConfig(vision_model_type="clip", img_h=20, img_w=20, patch_dim=10, **settings).with_usual_sizes()  # type: ignore[arg-type]


TILED = _vision(use_tiling=True, max_num_tiles=6, use_thumbnail=True)
GRIDS = {
    (20, 20): Grid(1, 1),
    (400, 400): Grid(2, 2, thumbnail=True),  # of all squares the largest that is half full
    (25, 25): Grid(1, 1),
    (600, 400): Grid(3, 2, thumbnail=True),
    (200, 400): Grid(1, 2, thumbnail=True),
    (1000, 10): Grid(6, 1, thumbnail=True),
    (10, 1000): Grid(1, 6, thumbnail=True),
}


@pytest.mark.parametrize("size", GRIDS)
def test_grid_has_the_shape_of_the_picture(size: tuple[int, int]) -> None:
    """A model that was trained on InternVL's grids reads other ones wrongly."""
    assert grid_of(*size, TILED) == GRIDS[size]
    assert grid_of(*size, _vision()) == Grid(1, 1)


def test_tiles_are_cut_row_by_row() -> None:
    """Tiles in another order would be read as another picture."""
    colors = [(r, g, 0) for g in (0, 200) for r in (0, 100, 250)]
    image = Image.new("RGB", (300, 200))
    for place, color in enumerate(colors):
        left, top = 100 * (place % 3), 100 * (place // 3)
        image.paste(color, (left, top, left + 100, top + 100))
    tiles = tiles_of(image, TILED)
    assert tiles.shape == (7, 3, 20, 20) and tiles.dtype == np.uint8
    assert [tuple(tile[:, 10, 10].tolist()) for tile in tiles[:6]] == colors
    assert tuple(tiles[6][:, 2, 2].tolist()) == colors[0] and tuple(tiles[6][:, 17, 17].tolist()) == colors[5]
    assert np.array_equal(tiles, tiles_of(image.copy(), TILED))


def test_one_tile_is_stretched_cropped_or_padded() -> None:
    """Each encoder was trained with one of them."""
    image = Image.new("RGB", (60, 20), (10, 10, 10))
    image.paste((200, 200, 200), (20, 0, 40, 20))
    red = {fit: tiles_of(image, _vision(image_fit=fit))[0, 0] for fit in ("stretch", "crop", "pad")}
    assert (red["stretch"][5, 1], red["stretch"][5, 10]) == (10, 200)
    assert (red["crop"] == 200).all()
    assert red["pad"][0, 0] == int(255 * TILED.kind.mean[0]) and (red["pad"][10, 1], red["pad"][10, 10]) == (10, 200)


@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
def test_thin_pictures_take_no_memory(fit: str) -> None:
    """A picture of one column that is resized as a whole before it is cropped would have billions of pixels."""
    for size in ((1, 60_000), (60_000, 1)):
        assert tiles_of(Image.new("RGB", size), _vision(image_fit=fit)).shape == (1, 3, 20, 20)


def test_parts_of_prompts_have_the_features_of_the_whole() -> None:
    """A prompt that is read in parts takes each tile that a part needs, and ends of rows stay what they are."""
    vision = _vision(vision_class_token=False, image_grids=("1x2",))
    grid = grid_of(40, 15, vision)
    (run,) = feature_runs(grid, vision)
    places = np.concatenate([[-1], run, [-1]])
    whole = PromptImages(np.arange(3, dtype=np.uint8).repeat(3 * 400).reshape(3, 3, 20, 20), places, 4)
    for start in range(len(places)):
        for end in range(start + 1, len(places) + 1):
            part = whole.within(start, end)
            shown = [] if part is None else part.places.tolist()
            named = [(int(part.tiles[n // 4, 0, 0, 0]), n % 4) if n >= 0 else n for n in shown] if part else []
            wanted = [(n // 4, n % 4) if n >= 0 else n for n in places[start:end].tolist()]
            assert named == (wanted if any(n != -1 for n in wanted) else [])
    keys = whole.keyed([5] * len(places))
    assert keys[0] == keys[-1] == 5 and all(key < 0 for key in keys[1:-1])


def _words(grid: Grid, vision: VisionConfig) -> list[str | None]:
    """Words, and None for features."""
    return [each if isinstance(each, str) else None for each in expansion(grid, vision)]


def test_words_stand_around_tiles() -> None:
    """They are NVLM's and InternVL's."""
    assert _words(Grid(2, 1), _vision()) == [None, None]
    nvlm = _vision(use_tile_tags=True, image_tag_type="nvlm")
    assert _words(Grid(2, 1, thumbnail=True), nvlm) == [
        *("<Image>", "<tile_1>", None, "<tile_2>", None, "<tile_global_thumbnail>", None, "</Image>"),
    ]
    assert _words(Grid(1, 1), nvlm)[1] == "<tile_global_thumbnail>"
    internvl = _vision(image_tag_type="internvl")
    assert _words(Grid(1, 2), internvl) == ["<img>", None, None, "</img>"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-num-tiles 4", "--use-tiling"),
        ("--use-thumbnail", "--use-tiling"),
        ("--use-tiling --max-num-tiles 4 --image-fit pad", "--image-fit pad"),
        ("--image-grids 1x2 2x1 --disable-vision-class-token --use-tiling", "--use-tiling"),
        ("--image-grids 1x2", "--disable-vision-class-token"),
        ("--image-grids 1x2 0x1", "0x1"),
    ],
)
def test_settings_without_tiles_are_refused(flags: str, words: str) -> None:
    """They would have no effect."""
    with expect_error(ConfigError, words):
        tiny_config(f"{CLIP} {flags}", family=VLM)
