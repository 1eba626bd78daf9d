"""A vision encoder as a part of a model: its kind and sizes, and how its features become a text's hidden states."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from megatron.config.activation import Activation
from megatron.config.family import PartConfig, Rule
from megatron.config.flags import architecture_flag, architecture_switch, flag, flag_of, switch
from megatron.config.model import ModelConfig
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import indivisible, multiples_near
from megatron.config.run import RunConfig
from megatron.config.vision_kinds import VISION_KINDS, VisionKind, VisionModelType
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

_GRID, _MOST_TILES = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})"), 1024


TILE_FIELDS = (
    *("img_h", "img_w", "use_tiling", "max_num_tiles", "use_thumbnail", "use_tile_tags"),
    *("image_tag_type", "image_fit", "image_grids", "image_resample"),
)
"""Fields of ``VisionConfig`` that say how an image is cut into tiles."""


def _by_kind(help: str, **options: Any) -> Any:
    """Declare a field whose default is the usual one of the encoder's kind."""
    return architecture_flag(help, derived="by --vision-model-type", follows=("vision_model_type",), **options)


class VisionConfig(PartConfig):
    """A vision encoder (ViT, arXiv:2010.11929), and the projector between it and the language model."""

    vision_model_type: VisionModelType | None = architecture_flag(
        "Kind of the vision encoder: which norms, biases and scales it has, and its usual sizes.", default=None
    )
    vision_num_layers: int = _by_kind(
        "Layers of the vision encoder.", aliases=("--encoder-num-layers",), at_least=1, at_most=10_000
    )
    vision_hidden_size: int = _by_kind("Width of the vision encoder's hidden states.", at_least=1)
    vision_num_attention_heads: int = _by_kind("Attention heads of each layer of the vision encoder.", at_least=1)
    vision_ffn_hidden_size: int = _by_kind("Inner width of the vision encoder's MLP.", at_least=1)
    vision_activation: Activation = _by_kind("Activation of the vision encoder's MLP.")
    vision_norm_epsilon: float = _by_kind("Epsilon of the vision encoder's norms.", above=0)
    patch_dim: int = architecture_flag("Pixels of a side of a patch.", default=14, at_least=1, at_most=65536)
    img_h: int = flag(
        "Height of an image, or of a tile of it, in pixels.",
        derived="by --vision-model-type",
        follows=("vision_model_type",),
        at_least=1,
        at_most=65536,
        from_checkpoint=True,
    )
    img_w: int = flag(
        "Width of an image, or of a tile of it, in pixels.",
        derived="by --vision-model-type",
        follows=("vision_model_type",),
        at_least=1,
        at_most=65536,
        from_checkpoint=True,
    )
    vision_position_size: int = architecture_flag(
        "Pixels of a side of the square images whose positions the vision encoder has learned; for others they are "
        "interpolated.",
        derived="the larger of --img-h and --img-w",
        follows=("img_h", "img_w"),
        at_least=1,
        at_most=65536,
    )
    vision_class_token: bool = architecture_switch(
        "Leave the class token out of the features.", off="--disable-vision-class-token"
    )
    vision_final_norm: bool = architecture_switch(
        "Leave out the norm behind the vision encoder's last layer, as LLaVA does of SigLIP.",
        off="--disable-vision-final-norm",
    )
    pixel_shuffle: bool = architecture_switch(
        "Join the features of each square of 2 x 2 patches, without the class token (InternVL)."
    )
    vision_pool_size: int = architecture_flag(
        "Side, in patches, of the average pooling behind the encoder (Gemma 3).", default=1, at_least=1
    )
    vision_projection_type: Literal["mlp", "affine", "rms-affine"] = architecture_flag(
        "Projector of features to the language model's width: an MLP, a linear layer with a bias (affine), or an "
        "RMSNorm and a linear layer without one (rms-affine, Gemma 3).",
        default="mlp",
    )
    vision_projection_activation: Activation = architecture_flag(
        "Activation of the projector of type mlp.", default="gelu"
    )
    vision_projection_norm: bool = architecture_switch("Apply a LayerNorm to what the projector reads (InternVL).")
    use_tiling: bool = switch("Cut each image into the grid of tiles that fits its shape.", from_checkpoint=True)
    max_num_tiles: int = flag(
        "Most tiles of an image, without its thumbnail.", default=1, at_least=1, at_most=1024, from_checkpoint=True
    )
    use_thumbnail: bool = switch("Add the whole image as a tile to an image of several.", from_checkpoint=True)
    use_tile_tags: bool = switch(
        "Put a word such as <tile_1> before each tile, <tile_global_thumbnail> before a whole image.",
        from_checkpoint=True,
    )
    image_tag_type: Literal["nvlm", "internvl", "gemma3"] | None = flag(
        "Words around each image: <Image> and </Image> (nvlm), <img> and </img> (internvl), or <start_of_image> and "
        "<end_of_image> between empty lines (gemma3).",
        default=None,
        from_checkpoint=True,
    )
    image_fit: Literal["stretch", "crop", "pad"] = flag(
        "How an image of another shape becomes a tile without --use-tiling: stretched, its middle, or between bars of "
        "the encoder's mean color.",
        default="stretch",
        from_checkpoint=True,
    )
    image_resample: Literal["bicubic", "bilinear"] = flag(
        "Interpolation by which images are resized.", default="bicubic", from_checkpoint=True
    )
    image_grids: tuple[str, ...] = architecture_flag(
        "Grids of tiles, rows x columns as in 2x1, that an image may be cut into without changing its aspect "
        "ratio (LLaVA-NeXT): the whole image is the first tile, patches of padding are left out, and rows of patches "
        "end with a learned vector.",
        default=(),
    )
    image_attention: Literal["causal", "bidirectional", "prefix"] = architecture_flag(
        "Attention of image tokens: causal, in both directions within a tile (Gemma 3), or prefix: in both directions "
        "within the whole prompt, up to the first answer (PaliGemma).",
        default="causal",
    )
    freeze_lm: bool = switch("Do not train the language model.", aliases=("--freeze-LM",))
    freeze_vit: bool = switch("Do not train the vision encoder.", aliases=("--freeze-ViT",))
    freeze_vision_projection: bool = switch("Do not train the projector.")

    @property
    def has_vision(self) -> bool:
        """Whether the model has a vision encoder."""
        return self.vision_model_type is not None

    @property
    def kind(self) -> VisionKind:
        """Facts about encoders of its type, of which there must be one."""
        assert self.vision_model_type is not None, "a model without a vision encoder"
        return VISION_KINDS[self.vision_model_type]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of a tile."""
        return self.img_h // self.patch_dim, self.img_w // self.patch_dim

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Rows and columns of tiles of each of ``--image-grids``; raises ConfigError for one that isn't such a pair."""
        found = [_GRID.fullmatch(each) for each in self.image_grids]
        for each, match in zip(self.image_grids, found):
            if match is None or not 1 <= int(match[1]) * int(match[2]) <= _MOST_TILES:
                raise ConfigError(
                    f"--image-grids {each}: give rows and columns of up to {_MOST_TILES} tiles, as in 2x1"
                )
        return [(int(match[1]), int(match[2])) for match in found if match is not None]

    @property
    def images_first(self) -> bool:
        """Whether images at a text's beginning stand before the token that begins it, as in PaliGemma."""
        return self.image_attention == "prefix"

    @property
    def learned_grid(self) -> int:
        """Rows, and columns, of patches with a learned position."""
        return self.vision_position_size // self.patch_dim

    @property
    def encoded_per_tile(self) -> int:
        """Hidden states of the encoder for a tile: of its patches and, with one, of the class token."""
        return self.grid[0] * self.grid[1] + self.kind.class_token

    @property
    def keeps_class_token(self) -> bool:
        """Whether the class token's hidden state is one of a tile's features."""
        return self.kind.class_token and self.vision_class_token and not self.pixel_shuffle

    @property
    def features_per_tile(self) -> int:
        """Places of a text that a tile takes."""
        patches = self.grid[0] * self.grid[1]
        return patches // 4 if self.pixel_shuffle else patches // self.vision_pool_size**2 + self.keeps_class_token

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Height and width of a tile, and its features."""
        return self.img_h, self.img_w, self.features_per_tile

    @property
    def feature_width(self) -> int:
        """Width of what the projector reads."""
        return self.vision_hidden_size * (4 if self.pixel_shuffle else 1)

    def tiles_within(self, length: int) -> int:
        """Tiles of a sample of ``length`` places that costs are stated for: those of one image, as many as fit."""
        most = self.max_num_tiles + (self.use_thumbnail and self.max_num_tiles > 1)
        if self.image_grids:
            most = 1 + max(rows * columns for rows, columns in self.grids)
        return max(1, min(most, length // self.features_per_tile))

    @property
    def tile_settings(self) -> dict[str, Any]:
        """What tiles and their places depend on, by flag: the same for data that are made and read."""
        found = {flag_of(name): getattr(self, name) for name in TILE_FIELDS}
        found["--image-grids"] = " ".join(self.image_grids)
        for name, usual in {"--image-grids": "", "--image-resample": "bicubic"}.items():
            if found[name] == usual:  # as in data that were made before there were these flags
                del found[name]
        if self.image_fit == "pad":
            found["--vision-model-type"] = self.vision_model_type
        return found | {"features a tile": self.features_per_tile}

    def encoder(self, decoder: ModelConfig) -> ModelConfig:
        """Sizes and choices of the encoder's stack. Of the language model's it has those that are no architecture: how
        attention is computed, and the deviation of initial weights.
        """
        return ModelConfig(
            num_layers=self.vision_num_layers,
            hidden_size=self.vision_hidden_size,
            ffn_hidden_size=self.vision_ffn_hidden_size,
            num_attention_heads=self.vision_num_attention_heads,
            max_position_embeddings=self.encoded_per_tile,
            norm_epsilon=self.vision_norm_epsilon,
            activation=self.vision_activation,
            position_embedding_type="none",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            init_method_std=decoder.init_method_std,
            attention_backend=decoder.attention_backend,
            attention_softmax_in_fp32=decoder.attention_softmax_in_fp32,
            **self.kind.choices,
        )

    @override
    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The group with the sizes that its type has unless they are given."""
        return self.with_usual_sizes()

    def with_usual_sizes(self) -> Self:
        """The group with the sizes that its type has unless they are given."""
        if not self.has_vision:
            return self
        usual = self.kind.usual
        found = {name: value for name, value in usual.items() if getattr(self, name) is None}
        if self.vision_position_size is None:
            found["vision_position_size"] = max(self.img_h or usual["img_h"], self.img_w or usual["img_w"])
        return dataclasses.replace(self, **found) if found else self

    @property
    @override
    def own_layers(self) -> int:
        """The encoder's."""
        return self.vision_num_layers if self.has_vision else 0

    @property
    @override
    def frozen(self) -> tuple[str, ...]:
        """What ``--freeze-…`` names: parameters of the encoder, of the projector, and all others."""
        chosen = (
            (self.freeze_vit, "vision_model.*"),
            (self.freeze_vision_projection, "vision_projection.*"),
            (self.freeze_lm, "[!v]*"),  # whatever modules a decoder has, tied and named by others' names or not
        )
        return tuple(pattern for is_frozen, pattern in chosen if is_frozen)

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """The encoder's kind and sizes, and what it makes of a tile."""
        if not self.has_vision:
            return ()
        size = f"{self.vision_num_layers} layers of width {self.vision_hidden_size}"
        return (f"{self.vision_model_type} encoder of {size}, {self.features_per_tile} features a tile",)

    @override
    def shrunk(self, stacks: Sequence[int], small: Sequence[int]) -> Self:
        """Two narrow layers with all heads, which ranks divide, and images of 2 x 2 patches of 2 x 2 pixels, several of
        which fit into the shortest texts.
        """
        if not self.has_vision:
            return self
        width = 4 * self.vision_num_attention_heads
        return dataclasses.replace(
            self,
            vision_num_layers=min(self.vision_num_layers, 2),
            vision_hidden_size=width,
            vision_ffn_hidden_size=2 * width,
            patch_dim=2,
            img_h=4,
            img_w=4,
            vision_position_size=4,
        )

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about sizes that patches and ranks divide."""
        return RULES

    @override
    def remarks(self) -> Sequence[Rule]:
        """Remarks about what the encoder doesn't take part in."""
        return (
            rule(
                "--fp8-format {run.fp8.fp8_format}: the vision encoder and its projector compute in the model's type",
                lambda run: self.has_vision and run.fp8.is_on,
            ),
        )


def patches_fill_the_image(vision: VisionConfig) -> str | None:
    """Height, width and the size of learned positions are whole patches, and even numbers of them are joined."""
    if not vision.has_vision:
        return None
    sizes = (
        ("--img-h", vision.img_h),
        ("--img-w", vision.img_w),
        ("--vision-position-size", vision.vision_position_size),
    )
    for name, size in sizes:
        if size % vision.patch_dim:
            fits = multiples_near(size, vision.patch_dim)
            return f"{name} {size} is not divisible by --patch-dim {vision.patch_dim}; use {fits}"
        if vision.pixel_shuffle and name != "--vision-position-size" and size // vision.patch_dim % 2:
            fits = multiples_near(size, 2 * vision.patch_dim)
            return (
                f"--pixel-shuffle joins squares of 2 x 2 patches, and {name} {size} has "
                f"{size // vision.patch_dim} of --patch-dim {vision.patch_dim}; use {fits}"
            )
    return None


def squares_fill_the_grid(vision: VisionConfig) -> str | None:
    """Averaged squares are whole, and hold patches alone."""
    size = vision.vision_pool_size
    if not vision.has_vision or size == 1:
        return None
    for name, side in (("--img-h", vision.grid[0]), ("--img-w", vision.grid[1])):
        if side % size:
            return (
                f"--vision-pool-size {size} does not divide the {side} patches of {name}; use "
                f"{multiples_near(side, size)} patches, or another size"
            )
    if vision.pixel_shuffle or vision.keeps_class_token:
        other = "--pixel-shuffle out" if vision.pixel_shuffle else "the class token out (--disable-vision-class-token)"
        return f"--vision-pool-size {size} averages patches alone: leave {other}"
    return None


def tiles_are_cut(vision: VisionConfig) -> str | None:
    """Settings of tiles need tiles."""
    if vision.image_grids:
        try:
            _ = vision.grids
        except ConfigError as error:
            return str(error)
        return _grids_alone(vision)
    if vision.use_tiling:
        if vision.image_fit != "stretch":
            return f"--image-fit {vision.image_fit} is for images of one tile: leave it or --use-tiling out"
        return None
    if vision.max_num_tiles > 1:
        return f"--max-num-tiles {vision.max_num_tiles} needs --use-tiling: without it, each image is one tile"
    if vision.use_thumbnail:
        return "--use-thumbnail needs --use-tiling: without it, each image is one tile"
    return None


def _grids_alone(vision: VisionConfig) -> str | None:
    """Grids of ``--image-grids`` say all about tiles, and have places for patches alone."""
    others = {
        "--use-tiling": vision.use_tiling,
        "--image-tag-type": vision.image_tag_type is not None,
        "--use-tile-tags": vision.use_tile_tags,
        "--pixel-shuffle": vision.pixel_shuffle,
        "--vision-pool-size": vision.vision_pool_size > 1,
        "--image-attention bidirectional": vision.image_attention == "bidirectional",
        f"--image-fit {vision.image_fit}": vision.image_fit != "stretch",
    }
    for name, is_given in others.items():
        if is_given:
            return f"--image-grids cuts images in a way of its own: leave {name} out"
    if vision.has_vision and vision.keeps_class_token:
        return "--image-grids has places for patches alone: give --disable-vision-class-token"
    return None


def encoder_divides(run: RunConfig) -> str | None:
    """Heads divide the encoder's width, and tensor-parallel ranks its heads and the MLP."""
    vision, ranks = run.part(VisionConfig), run.parallel.tensor_model_parallel_size
    if not vision.has_vision:
        return None
    heads = vision.vision_num_attention_heads
    split = ("--vision-num-attention-heads", heads), ("--vision-ffn-hidden-size", vision.vision_ffn_hidden_size)
    return indivisible(
        "--vision-hidden-size", vision.vision_hidden_size, "--vision-num-attention-heads", heads
    ) or next(
        filter(None, (indivisible(name, size, "--tensor-model-parallel-size", ranks) for name, size in split)), None
    )


RULES: tuple[Rule, ...] = (
    lambda run: patches_fill_the_image(run.part(VisionConfig)),
    lambda run: squares_fill_the_grid(run.part(VisionConfig)),
    lambda run: tiles_are_cut(run.part(VisionConfig)),
    encoder_divides,
    rule(
        "--freeze-LM, --freeze-ViT and --freeze-vision-projection leave nothing to train: leave one of them out",
        lambda run: (
            (vision := run.part(VisionConfig)).freeze_lm and vision.freeze_vit and vision.freeze_vision_projection
        ),
    ),
)
