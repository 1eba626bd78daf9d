"""Published models whose config.json has those of an encoder and of a language model inside, and how they convert.

A type says which encoders it may have, what stands between encoder and language model, and which settings say so. The
language model's settings and tensors are those of its own type, behind a prefix.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from megatron.config.activation import Activation
from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.conversion.huggingface.config_reader import UNGATED, ConfigReader, Json
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.huggingface import FORMAT as DECODERS
from megatron.core.models.vlm.config import VLMConfig
from megatron.core.models.vlm.huggingface.processing import (
    replaced_vision,
    usual_processing,
    with_processing,
    write_processing,
)
from megatron.core.models.vlm.huggingface.vision import DEFAULTS, KINDS, ROWS, TOWERS, read_vision, write_vision
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError, enumeration
from megatron.small_files import as_kind

TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
PROJECTIONS: dict[str, Activation] = {"quick_gelu": "quick_gelu", **UNGATED}
"""Transformers' names of a projector's activation -> ours."""
_LAYER = re.compile(r"vision_tower\.(?:vision_model\.)?encoder\.layers?\.(\d+)\.")
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
_UNUSED = (".rotary_emb.inv_freq", ".embeddings.position_ids")
TEXTS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "glm", "glm4", "nemotron", "olmo", "olmo2"),
    *("olmo3", "smollm3", "stablelm", "starcoder2"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"),
)
"""Types of language models whose tensors lie behind a prefix as in files of their own, and whose logits nothing scales
or caps: transformers' models that hold others would leave that out.
"""
SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
    "gemma": {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "vocab_size": 256000,
    },
    **{
        name: {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "vocab_size": vocabulary,
        }
        for name, vocabulary in (("gemma2", 256000), ("gemma3_text", 262208))
    },
}
"""What transformers takes for sizes that settings of a language model don't say: published ones say few."""


@dataclass(frozen=True, kw_only=True)
class NestedType(ModelType, ABC):
    """Models with one ``model_type`` that hold others.

    ``encoders``: types of encoders that such a model may have; the first is meant where settings name none. ``texts``:
    types of its language model, of which the first is meant. ``is_tied``: whether output and embedding share weights
    where settings don't say. ``sizes``: of a type's language model, where settings don't say them.
    """

    encoders: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    tied_copies: tuple[str, ...] = ("lm_head.weight", f"{TEXT}lm_head.weight")
    is_tied: bool = False
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: SIZES)

    @override
    def current_names(self, names: Iterable[str]) -> dict[str, str]:
        """Each name with the one that the models' first files had: in memory and in newer files it lacks a level, or
        has one before it.
        """
        names = list(names)
        inside = any("vision_tower.encoder.layer." in name for name in names)  # InternVL's encoder never had a level
        return {name: _first_name(name, tower=TOWER if inside else f"{TOWER}vision_model.") for name in names}

    def text_settings(self, text: Json, where: str) -> dict[str, Any]:
        """Settings of the language model as its own type has them; CheckpointError for others. ``where``: the file."""
        return dict(text)

    def write_sizes(self, model: ModelConfig) -> dict[str, Any]:
        """Settings that say sizes of the language model a second time."""
        return {}

    @abstractmethod
    def read_features(self, reader: NestedReader, vision: dict[str, Any]) -> dict[str, Any]:
        """Fields of ``VisionConfig`` about what is behind the encoder, which has the fields ``vision``."""

    @abstractmethod
    def write_features(self, vision: VisionConfig, source: Json) -> dict[str, Any]:
        """The settings that ``read_features`` reads."""

    @abstractmethod
    def projector_rows(self, vision: VisionConfig) -> Sequence[Row]:
        """Rows of what is between encoder and language model."""

    @abstractmethod
    def not_of_type(self, vision: VisionConfig) -> dict[str, bool]:
        """Reasons why a model isn't of this type, and whether they hold."""


def _first_name(name: str, *, tower: str) -> str:
    if name.startswith("lm_head."):
        return TEXT + name
    in_memory = name.startswith("model.")
    name = name.removeprefix("model.")
    if name.startswith(TOWER) and not name.startswith(tower):
        return tower + name.removeprefix(TOWER)
    if in_memory and name.startswith(TEXT):
        return f"{TEXT}model.{name.removeprefix(TEXT)}"
    return name


class NestedReader(ConfigReader):
    """Settings of a model that holds others. ``text``, ``vision``: those of the language model and of the encoder."""

    def __init__(self, config: Json, described: NestedType, where: str, *, kinds: Mapping[str, Any]) -> None:
        super().__init__(config, described.merged("defaults"), where, kinds=kinds)
        found = as_kind(self("text_config"), dict[str, Any], where=f"{where}: text_config", error=CheckpointError)
        text = {"model_type": described.texts[0], **found}
        text["tie_word_embeddings"] = bool(self.get("tie_word_embeddings", described.is_tied))
        text = {**described.sizes.get(text["model_type"], {}), **text}
        if text["model_type"] not in described.texts:
            named = enumeration(sorted(described.texts))
            raise self.refuse("text_config", f"the language model is one of the types {named} here")
        self.described = described
        self.text = DECODERS.reader(
            described.text_settings(text, f"{where}: text_config"), where=f"{where}: text_config"
        )
        vision = as_kind(self("vision_config"), dict[str, Any], where=f"{where}: vision_config", error=CheckpointError)
        vision = {"model_type": described.encoders[0], **vision}
        if vision["model_type"] not in described.encoders:
            named = " or a ".join(described.encoders)
            raise self.refuse("vision_config", f"the encoder is a {named} here")
        self.vision = ConfigReader(vision, DEFAULTS[vision["model_type"]], f"{where}: vision_config", kinds=KINDS)
        self.text.asked = self.vision.asked = self.asked  # names of settings that are read, whoever's they are
        self.asked.update(DECODERS.types[text["model_type"]].older_settings)


NESTED_KINDS: dict[str, Any] = {
    **dict.fromkeys(("text_config", "vision_config"), dict),
    "vision_feature_layer": Any,
    **dict.fromkeys(("vision_feature_select_strategy", "projector_hidden_act"), str),
    **dict.fromkeys(("image_token_index", "image_token_id"), int),
}


class NestedFormat(HuggingFaceFormat):
    """The published formats of vision-language models."""

    def __init__(self, types: Mapping[str, NestedType]) -> None:
        self.nested = types
        self.types: Mapping[str, ModelType] = types

    @override
    def reader(self, config: Json, *, where: str) -> NestedReader:
        """The settings of a config.json, and of those inside."""
        model_type = config["model_type"]
        return NestedReader(config, self.nested[model_type], where, kinds=self.kinds_of(model_type))

    @override
    def model_from_config(self, reader: ConfigReader, model_type: str) -> ModelConfig:
        """The language model that a config.json describes."""
        assert isinstance(reader, NestedReader), "a reader of this format"
        reader.expect(**reader.described.expected)
        return DECODERS.model_from_config(reader.text, reader.text("model_type"))

    @override
    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """The output has weights of its own where files hold them, whatever settings say: transformers and its older
        versions look at different ones.
        """
        head, words = (tensors.get(f"{TEXT}{name}.weight") for name in ("lm_head", "model.embed_tokens"))
        is_own = head is not None and not (words is not None and torch.equal(head.make(), words.make()))
        says_tied = not model.untie_embeddings_and_output_weights
        return replace(model, untie_embeddings_and_output_weights=is_own) if says_tied or head is None else model

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """The encoder's settings, as far as features come, and the language model's parts."""
        assert isinstance(reader, NestedReader), "a reader of this format"
        vision = read_vision(reader.vision)
        found = VisionConfig(**{**vision, **usual_processing(vision), **reader.described.read_features(reader, vision)})
        marked = reader.get("image_token_id") or reader("image_token_index")
        groups = DECODERS.groups_from_config(reader.text, tensors, where=where)
        others = (each for each in groups if not isinstance(each, GPTConfig))
        return (VLMConfig(image_token_id=marked), found, *others)

    @override
    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """Settings of the model with those of its encoder and its language model inside."""
        family, vision = VLMConfig.among(groups), VisionConfig.among(groups)
        before = source.get("text_config") or {}
        text = DECODERS.config_from_model(model, decoder_groups(groups), before)
        wrong = {name: _differences(each, family, vision, text) for name, each in self.nested.items()}
        fitting = [name for name, reasons in wrong.items() if not reasons]
        if not fitting:
            nearest = min(wrong, key=lambda name: (not _has_encoder(self.nested[name], vision), len(wrong[name])))
            raise CheckpointError(
                f"Hugging Face has no VLM of this architecture. For {nearest}, the nearest type, "
                + "; ".join(wrong[nearest])
            )
        model_type = source["model_type"] if source.get("model_type") in fitting else fitting[0]
        described, named = self.nested[model_type], _id_setting(self.nested[model_type])
        return {
            "architectures": [described.architecture],
            "model_type": model_type,
            named: family.image_token_id,
            **described.write_features(vision, source),
            **described.write_sizes(model),
            "text_config": {
                **{name: before[name] for name in _KEPT if name in before},
                **text,
                "vocab_size": model.vocab_size,
                "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            },
            "vision_config": write_vision(vision, source.get("vision_config") or {}),
        }

    @override
    def table(self, model_type: str, model: ModelConfig, groups: Sequence[object] = ()) -> Sequence[Row]:
        """Rows of encoder and projector, and the language model's behind another prefix."""
        vision, others = VisionConfig.among(groups), decoder_groups(groups)
        of_text = DECODERS.config_from_model(model, others, {})["model_type"]
        prefix = TOWER if TOWERS[str(vision.vision_model_type)] == "internvl_vision" else f"{TOWER}vision_model."
        return (
            *ROWS[str(vision.vision_model_type)](vision, prefix=prefix),
            *self.nested[model_type].projector_rows(vision),
            *(replace(row, theirs=_prefixed(row.theirs)) for row in DECODERS.table(of_text, model, others)),
        )

    @override
    def groups_of_files(
        self, groups: Sequence[object], files: Mapping[str, AnyPath]
    ) -> tuple[tuple[object, ...], list[str]]:
        """How pictures are cut, as files of transformers' processors say."""
        vision, notes = with_processing(VisionConfig.among(groups), files)
        return replaced_vision(groups, vision), notes

    @override
    def write_files(
        self, groups: Sequence[object], model_type: str, folder: Path, *, tokenizer: Tokenizer | None
    ) -> None:
        """Files of transformers' processors."""
        marked = VLMConfig.among(groups).image_token_id
        has_mark = tokenizer is not None and marked is not None and marked < tokenizer.vocab_size
        mark = tokenizer.detokenize([marked]) if has_mark and tokenizer is not None and marked is not None else None
        write_processing(VisionConfig.among(groups), model_type, folder, mark=mark)

    @override
    def is_unused(self, name: str, model_type: str, groups: Sequence[object] = ()) -> bool:
        """Whether a tensor isn't read: also those of the encoder's layers behind the features, and of a head that
        pools features.
        """
        layer, vision = _LAYER.match(name), VisionConfig.among(groups)
        is_behind = layer is not None and vision.has_vision and int(layer[1]) >= vision.vision_num_layers
        return is_behind or name.endswith(_UNUSED) or name.startswith(f"{TOWER}vision_model.head.")


def _id_setting(described: NestedType) -> str:
    """The setting that says which id marks the places of images."""
    return "image_token_index" if "image_token_index" in described.defaults else "image_token_id"


def _has_encoder(described: NestedType, vision: VisionConfig) -> bool:
    return TOWERS[str(vision.vision_model_type)] in described.encoders


def _prefixed(theirs: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return f"{TEXT}{theirs}" if isinstance(theirs, str) else tuple(f"{TEXT}{each}" for each in theirs)


def decoder_groups(groups: Sequence[object]) -> tuple[object, ...]:
    """Settings of the language model alone."""
    return (GPTConfig(), *(each for each in groups if not isinstance(each, VLMConfig | VisionConfig)))


def passed_layers(reader: NestedReader, layers: int) -> int:
    """Layers of the encoder that features pass, of ``layers``."""
    number = reader("vision_feature_layer")
    if not isinstance(number, int) or isinstance(number, bool) or not -layers <= number <= layers:
        raise reader.refuse(
            "vision_feature_layer", f"features are the hidden states behind one of the encoder's {layers} layers here"
        )
    passed = number if number >= 0 else layers + 1 + number
    if passed < 1:
        raise reader.refuse("vision_feature_layer", "features pass one layer at least here")
    return passed


def _differences(described: NestedType, family: VLMConfig, vision: VisionConfig, text: Json) -> list[str]:
    """What the model has that none of this type has."""
    sizes, kind = {vision.img_h, vision.img_w, vision.vision_position_size}, str(vision.vision_model_type)
    found = {
        f"the encoder is of type {kind}": not _has_encoder(described, vision),
        f"the language model is a {text['model_type']}": text["model_type"] not in described.texts,
        **described.not_of_type(vision),
        "positions are interpolated between those of another image size": len(sizes) > 1,
        "it is unknown which id marks the places of images (--image-token-id is not given)": (
            family.image_token_id is None
        ),
    }
    return [reason for reason, holds in found.items() if holds]


def activation_name(vision: VisionConfig, source: Json) -> str:
    """Transformers' name of the projector's activation, the source's where it has that meaning."""
    names = [theirs for theirs, ours in PROJECTIONS.items() if ours == vision.vision_projection_activation]
    written = source.get("projector_hidden_act")
    return str(written) if written in names else names[0]


def unusual_places(vision: VisionConfig) -> dict[str, bool]:
    """Reasons why features don't stand one by one, each seeing those before it."""
    return {
        GRIDS: bool(vision.image_grids),
        AVERAGED: vision.vision_pool_size > 1,
        AHEAD: vision.image_attention != "causal",
    }


GRIDS = "images are cut into grids of tiles, whose rows end with a learned vector (--image-grids)"
AVERAGED = "features are means of several patches (--vision-pool-size)"
AHEAD = "places of images see later ones (--image-attention)"
MLP_ROWS = (
    Row("vision_projection.linear_fc1", f"{PROJECTOR}linear_1"),
    Row("vision_projection.linear_fc2", f"{PROJECTOR}linear_2"),
)


def not_plain_mlp(vision: VisionConfig) -> dict[str, bool]:
    """Reasons why a projector isn't of two matrices around an activation that transformers has."""
    return {
        "the projector is not of two matrices": vision.vision_projection_type != "mlp",
        "the projector's activation has a gate": vision.vision_projection_activation not in PROJECTIONS.values(),
    }
