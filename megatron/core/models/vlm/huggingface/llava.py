"""LLaVA-1.5: CLIP, a projector of two matrices, and a language model with Llama's names of tensors.

LLaVA reads the hidden states before the encoder's last layer. Layers behind them compute nothing that is read, so they
are not part of our model, and what is written is an encoder without them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from megatron.config.activation import Activation
from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.conversion.huggingface.config_reader import UNGATED, ConfigReader, Json
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.huggingface import FORMAT as DECODERS
from megatron.core.models.gpt.huggingface import llama
from megatron.core.models.vlm.config import VLMConfig
from megatron.core.models.vlm.huggingface.vision import (
    ACTIVATIONS,
    DEFAULTS,
    KINDS,
    clip_rows,
    read_vision,
)
from megatron.errors import CheckpointError
from megatron.small_files import as_kind

_TEXT, _TOWER, _PROJECTOR = "language_model.", "vision_tower.vision_model.", "multi_modal_projector."
_PROJECTIONS: dict[str, Activation] = {"quick_gelu": "quick_gelu", **UNGATED}
_LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
"""What transformers takes for sizes that a Llama's settings don't say: those of LLaVA-1.5 say few."""
_LAYER = re.compile(r"vision_tower\.vision_model\.encoder\.layers\.(\d+)\.")
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True)
class NestedType(ModelType):
    """Models with one ``model_type`` that hold others."""

    @override
    def current_names(self, names: Iterable[str]) -> dict[str, str]:
        """Each name with the one that the models' first files had: in memory and in newer files it lacks a level, or
        has one before it.
        """
        return {name: _first_name(name) for name in names}


def _first_name(name: str) -> str:
    if name.startswith("lm_head."):
        return _TEXT + name
    in_memory = name.startswith("model.")
    name = name.removeprefix("model.")
    if name.startswith("vision_tower.") and not name.startswith(_TOWER):
        return _TOWER + name.removeprefix("vision_tower.")
    if in_memory and name.startswith(_TEXT):
        return f"{_TEXT}model.{name.removeprefix(_TEXT)}"
    return name


class NestedReader(ConfigReader):
    """Settings of a model that holds others. ``text``, ``vision``: those of the language model and of the encoder."""

    def __init__(self, config: Json, described: ModelType, where: str, *, kinds: Mapping[str, Any]) -> None:
        super().__init__(config, described.merged("defaults"), where, kinds=kinds)
        inside = as_kind(self("text_config"), dict[str, Any], where=f"{where}: text_config", error=CheckpointError)
        tied = bool(self.get("tie_word_embeddings", False))
        text = {"model_type": "llama", "tie_word_embeddings": tied, **inside}
        if text["model_type"] == "llama":
            text = {**_LLAMA_7B, **text}
        if text["model_type"] not in llama.TYPES:
            names = ", ".join(llama.TYPES)
            raise self.refuse("text_config", f"the language model is one of the types {names} here")
        self.text = DECODERS.reader(text, where=f"{where}: text_config")
        vision = as_kind(self("vision_config"), dict[str, Any], where=f"{where}: vision_config", error=CheckpointError)
        vision = {"model_type": "clip_vision_model", **vision}
        if vision["model_type"] != "clip_vision_model":
            raise self.refuse("vision_config", "the encoder is a clip_vision_model here")
        self.vision = ConfigReader(vision, DEFAULTS["clip_vision_model"], f"{where}: vision_config", kinds=KINDS)
        self.text.asked = self.vision.asked = self.asked  # names of settings that are read, whoever's they are


LLAVA = NestedType(
    architecture="LlavaForConditionalGeneration",
    table=(),
    settings={},
    expected={"multimodal_projector_bias": True},
    defaults={
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "image_token_index": 32000,
    },
    kinds={
        **dict.fromkeys(("text_config", "vision_config"), dict),
        "vision_feature_layer": Any,
        **dict.fromkeys(("vision_feature_select_strategy", "projector_hidden_act"), str),
        "multimodal_projector_bias": bool,
        **dict.fromkeys(("image_token_index", "image_token_id"), int),
    },
    idle=("image_seq_length", "ignore_index", "projection_dim"),
    about=(
        "LLaVA 1.5, with a CLIP encoder and a Llama, Mistral, Qwen 2 or Qwen 3; the encoder's layers behind the "
        "features are left out"
    ),
    example="llava-hf/llava-1.5-7b-hf",
)


class LlavaFormat(HuggingFaceFormat):
    """The published format of LLaVA-1.5."""

    types: Mapping[str, ModelType] = {"llava": LLAVA}

    @override
    def reader(self, config: Json, *, where: str) -> NestedReader:
        """The settings of a config.json, and of those inside."""
        return NestedReader(config, LLAVA, where, kinds=self.kinds_of("llava"))

    @override
    def model_from_config(self, reader: ConfigReader, model_type: str) -> ModelConfig:
        """The language model that a config.json describes."""
        assert isinstance(reader, NestedReader), "a reader of this format"
        reader.expect(**LLAVA.expected)
        return DECODERS.model_from_config(reader.text, reader.text("model_type"))

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """The encoder's settings, as far as features come, and the language model's parts."""
        assert isinstance(reader, NestedReader), "a reader of this format"
        vision = VisionConfig(
            **read_vision(reader.vision),
            vision_class_token=reader.one_of("vision_feature_select_strategy", {"default": False, "full": True}),
            vision_projection_activation=reader.one_of("projector_hidden_act", _PROJECTIONS),
        )
        vision = replace(vision, vision_num_layers=_layers_of_features(reader, vision.vision_num_layers))
        marked = reader.get("image_token_id") or reader("image_token_index")
        groups = DECODERS.groups_from_config(reader.text, tensors, where=where)
        others = (each for each in groups if not isinstance(each, GPTConfig))
        return (VLMConfig(image_token_id=marked), vision, *others)

    @override
    def config_from_model(self, model: ModelConfig, groups: Sequence[object], source: Json) -> dict[str, Any]:
        """Settings of the model with those of its encoder and its language model inside."""
        family, vision = VLMConfig.among(groups), VisionConfig.among(groups)
        if wrong := _differences(family, vision):
            raise CheckpointError(f"Hugging Face has no VLM of this architecture. For llava, {'; '.join(wrong)}")
        before = source.get("text_config") or {}
        text = DECODERS.config_from_model(model, _decoder_groups(groups), before)
        if text["model_type"] not in llama.TYPES:
            raise CheckpointError(
                f"Hugging Face has no VLM of this architecture. For llava, the language model is a {text['model_type']}"
            )
        names = [theirs for theirs, ours in _PROJECTIONS.items() if ours == vision.vision_projection_activation]
        written = source.get("projector_hidden_act")
        return {
            "architectures": [LLAVA.architecture],
            "model_type": "llava",
            "image_token_index": family.image_token_id,
            "image_seq_length": vision.features_per_tile,
            "projector_hidden_act": written if written in names else names[0],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full" if vision.vision_class_token else "default",
            "multimodal_projector_bias": True,
            "text_config": {
                **{name: before[name] for name in _KEPT if name in before},
                **text,
                "vocab_size": model.vocab_size,
                "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            },
            "vision_config": _vision_config(vision, source.get("vision_config") or {}),
        }

    @override
    def table(self, model_type: str, model: ModelConfig, groups: Sequence[object] = ()) -> Sequence[Row]:
        """Rows of encoder and projector, and the language model's behind another prefix."""
        vision = VisionConfig.among(groups)
        rows = DECODERS.table("llama", model, _decoder_groups(groups))
        return (
            *clip_rows(vision, prefix=_TOWER),
            Row("vision_projection.linear_fc1", f"{_PROJECTOR}linear_1"),
            Row("vision_projection.linear_fc2", f"{_PROJECTOR}linear_2"),
            *(replace(row, theirs=_prefixed(row.theirs)) for row in rows),
        )

    @override
    def is_unused(self, name: str, model_type: str, groups: Sequence[object] = ()) -> bool:
        """Whether a tensor isn't read: also those of the encoder's layers behind the features."""
        layer, vision = _LAYER.match(name), VisionConfig.among(groups)
        is_behind = layer is not None and vision.has_vision and int(layer[1]) >= vision.vision_num_layers
        return is_behind or name.endswith((".rotary_emb.inv_freq", ".embeddings.position_ids"))


def _prefixed(theirs: str | tuple[str, ...]) -> str | tuple[str, ...]:
    return f"{_TEXT}{theirs}" if isinstance(theirs, str) else tuple(f"{_TEXT}{each}" for each in theirs)


def _decoder_groups(groups: Sequence[object]) -> tuple[object, ...]:
    return (GPTConfig(), *(each for each in groups if not isinstance(each, VLMConfig | VisionConfig)))


def _layers_of_features(reader: NestedReader, layers: int) -> int:
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


def _vision_config(vision: VisionConfig, source: Json) -> dict[str, Any]:
    names = [theirs for theirs, ours in ACTIVATIONS.items() if ours == vision.vision_activation]
    written = source.get("hidden_act")
    return {
        "model_type": "clip_vision_model",
        "num_hidden_layers": vision.vision_num_layers,
        "hidden_size": vision.vision_hidden_size,
        "intermediate_size": vision.vision_ffn_hidden_size,
        "num_attention_heads": vision.vision_num_attention_heads,
        "hidden_act": written if written in names else names[0],
        "layer_norm_eps": vision.vision_norm_epsilon,
        "image_size": vision.vision_position_size,
        "patch_size": vision.patch_dim,
        "num_channels": 3,
        "projection_dim": source.get("projection_dim", 768),
    }


def _differences(family: VLMConfig, vision: VisionConfig) -> list[str]:
    """What the model has that no LLaVA-1.5 has."""
    sizes = {vision.img_h, vision.img_w, vision.vision_position_size}
    found = {
        f"the encoder is of type {vision.vision_model_type} and not clip": vision.vision_model_type != "clip",
        "the encoder's activation is none of CLIP's": vision.vision_activation not in ACTIVATIONS.values(),
        "the projector is not of two matrices": vision.vision_projection_type != "mlp",
        "the projector's activation has a gate": vision.vision_projection_activation not in _PROJECTIONS.values(),
        "the projector has a norm": vision.vision_projection_norm,
        "patches are joined (--pixel-shuffle)": vision.pixel_shuffle,
        "positions are interpolated between those of another image size": len(sizes) > 1,
        "it is unknown which id marks the places of images (--image-token-id is not given)": (
            family.image_token_id is None
        ),
    }
    return [reason for reason, holds in found.items() if holds]
