"""Facts about vision-language models, and the parts that they may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from megatron.config.family import FamilyConfig, Rule
from megatron.config.flags import architecture_flag
from megatron.config.hybrid import HybridConfig
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.lora import LoraConfig
from megatron.config.mamba import MambaConfig
from megatron.config.moe import MoEConfig
from megatron.config.positions import ROTARY_TYPES
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig
from megatron.config.vision import VisionConfig


class VLMConfig(FamilyConfig):
    """What is neither the language model's nor the vision encoder's."""

    name: ClassVar[str] = "vlm"
    title: ClassVar[str] = "VLM"
    position_embedding_types: ClassVar[tuple[str, ...]] = ("learned_absolute", *ROTARY_TYPES, "alibi", "none")
    window_sides: ClassVar[int] = 1
    usual_tokenizer: ClassVar[str | None] = "GPT2BPETokenizer"
    # A depth would have to read features of images, too.
    fields_of_others: ClassVar[tuple[str, ...]] = ("mtp_num_layers",)
    varying_counts: ClassVar[str | None] = "images, whose places have no loss"

    image_token_id: int | None = architecture_flag(
        "Id that stands at the places of images, by which other programs know them.", default=None, at_least=0
    )

    @property
    @override
    def image_id(self) -> int | None:
        """The id at places of images."""
        return self.image_token_id

    @override
    def sees_ahead(self, run: RunConfig) -> bool:
        """Whether places of images see later ones."""
        return run.part(VisionConfig).image_attention != "causal"

    @override
    def rules(self) -> Sequence[Rule]:
        """There is a vision encoder, and room for an image and a text."""
        return RULES


GROUPS: tuple[type, ...] = (
    VLMConfig,
    VisionConfig,
    HybridConfig,
    GatedDeltaNetConfig,
    MambaConfig,
    MoEConfig,
    LoraConfig,
)


def image_fits(run: RunConfig) -> str | None:
    """A sequence has room for the features of a tile and for a token."""
    vision, length = run.part(VisionConfig), run.data.seq_length
    if not vision.has_vision or vision.features_per_tile < length:
        return None
    return (
        f"--seq-length {length} has no room for an image, which takes {vision.features_per_tile} places, and a text; "
        f"use {vision.features_per_tile + 1} at least"
    )


def heads_travel_where_keys_are_ahead(run: RunConfig) -> str | None:
    """Context-parallel ranks that exchange keys compute causal parts of attention alone."""
    vision, kinds = run.part(VisionConfig), {*run.parallel.cp_comm_types}
    ahead = f"--image-attention {vision.image_attention}"
    if vision.image_attention == "causal":
        return None
    if run.parallel.context_parallel_size > 1 and kinds != {"a2a"}:
        named = " ".join(sorted(kinds))
        return (
            f"{ahead} with --cp-comm-type {named}: ranks that send keys compute causal parts of attention alone; use "
            "--cp-comm-type a2a"
        )
    if any(isinstance(each, HybridConfig) and each.is_hybrid for each in run.extra):
        return f"{ahead} needs attention in each layer, and a state-space layer sees no later places"
    return None


RULES: tuple[Rule, ...] = (
    rule(
        "a vision-language model needs a vision encoder: give --vision-model-type, such as clip",
        lambda run: not run.part(VisionConfig).has_vision,
    ),
    image_fits,
    heads_travel_where_keys_are_ahead,
)
