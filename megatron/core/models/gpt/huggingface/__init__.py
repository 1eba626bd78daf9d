"""Published decoder models: a module for each kind, whose ``TYPES`` are its ``model_type``s."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from megatron.config.hybrid import HybridConfig
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.huggingface import (
    bamba,
    bloom,
    cohere,
    deepseek,
    delta_nets,
    falcon,
    gemma,
    glm,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    llama,
    mamba2,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    olmo_hybrid,
    opt,
    phi,
    phi3,
    smollm3,
    stablelm,
    starcoder2,
)

_KINDS = (
    gpt2,
    llama,
    olmo,
    granite,
    gemma,
    starcoder2,
    falcon,
    gpt_neox,
    gptj,
    nemotron,
    stablelm,
    phi,
    opt,
    bloom,
    cohere,
    smollm3,
    phi3,
    glm,
    mixtral,
    deepseek,
    gpt_oss,
    glm4_moe,
    delta_nets,
    olmo_hybrid,
    mamba2,
    nemotron_h,
    bamba,
    granite_hybrid,
)


class DecoderFormat(HuggingFaceFormat):
    """Decoders of all published types; of two types that fit a model, the first is written."""

    unknown_tokens: Mapping[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    types: Mapping[str, ModelType] = {name: each for kind in _KINDS for name, each in kind.TYPES.items()}

    @override
    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """Files that transformers saved lack the layers of multi-token prediction."""
        return model if _has_later(tensors) or not model.mtp_num_layers else replace(model, mtp_num_layers=0)

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """GPT's facts, and the parts of types that have some."""
        described = self.types[reader("model_type")]
        found = [part.of(reader) for part in described.groups]
        hybrid = HybridConfig.among(found)
        if hybrid.depth_letters and not _has_later(tensors):
            bare = replace(hybrid, hybrid_layer_pattern=hybrid.letters)
            found = [bare if isinstance(each, HybridConfig) else each for each in found]
        return (GPTConfig(), *found)

    @override
    def settings_of_groups(self, groups: Sequence[object], model_type: str, model: ModelConfig) -> dict[str, Any]:
        """Settings of the parts."""
        parts = self.types[model_type].groups
        return {name: value for part in parts for name, value in part.write(part.among(groups), model).items()}

    @override
    def lacks(self, model_type: str, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """Parts that one of model and type has, and the other not."""
        parts = self.types[model_type].groups
        found = [reason for part in parts for reason in part.missing(part.among(groups), model)]
        known = {part.group for part in parts}
        if MoEConfig not in known and MoEConfig.among(groups).has_experts:
            found.append("it has experts")
        if HybridConfig.among(groups).is_hybrid:  # whose pattern says which layers it has
            found += [] if HybridConfig in known else ["its layers are those of a hybrid's pattern"]
        elif GatedDeltaNetConfig not in known and GatedDeltaNetConfig.among(groups).has_delta_nets:
            found.append("it has gated delta nets")
        return found

    @override
    def differences(self, model_type: str, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """What a type can't express about the model's parts that both have; a type without its pattern has no other."""
        described = self.types[model_type]
        parts = [part for part in described.groups if not part.missing(part.among(groups), model)]
        if any(part.group is HybridConfig and part not in parts for part in described.groups):
            return []
        sizes = {"num_hidden_layers": model.num_layers, "intermediate_size": model.ffn_hidden_size}
        settings: dict[str, Any] = {**sizes, "hidden_size": model.hidden_size}
        for part in parts:
            settings |= part.write(part.among(groups), model)
        defaults, kinds = described.merged("defaults"), self.kinds_of(model_type)
        return [
            difference
            for part in parts
            for difference in part.differences(part.among(groups), settings, defaults=defaults, kinds=kinds)
        ]

    @override
    def table(self, model_type: str, model: ModelConfig, groups: Sequence[object] = ()) -> Sequence[Row]:
        """Rows of the model's modules, those of its parts included."""
        parts = self.types[model_type].groups
        of_parts = (row for part in parts for row in part.rows(part.among(groups)))
        rows = (*super().table(model_type, model, groups), *of_parts)
        return (*rows, *self.types[model_type].later_rows(rows, model, groups))


def _has_later(tensors: Collection[str]) -> bool:
    return any(name.endswith(".eh_proj.weight") for name in tensors)


FORMAT = DecoderFormat()
