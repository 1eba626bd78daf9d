"""Published decoder models: a module for each kind, whose ``TYPES`` are its ``model_type``s."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import HuggingFaceFormat, ModelType
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Row
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.huggingface import (
    bloom,
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    llama,
    mixtral,
    nemotron,
    olmo,
    opt,
    phi,
    phi3,
    smollm3,
    stablelm,
    starcoder2,
)
from megatron.core.models.gpt.huggingface.experts import ExpertType

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
)


class DecoderFormat(HuggingFaceFormat):
    """Decoders of all published types; of two types that fit a model, the first is written."""

    unknown_tokens: Mapping[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    types: Mapping[str, ModelType] = {name: each for kind in _KINDS for name, each in kind.TYPES.items()}

    @override
    def complete(self, model: ModelConfig, tensors: dict[str, LazyTensor]) -> ModelConfig:
        """Files that transformers saved lack the layers of multi-token prediction."""
        has_later = any(name.endswith(".eh_proj.weight") for name in tensors)
        return model if has_later or not model.mtp_num_layers else replace(model, mtp_num_layers=0)

    @override
    def groups_from_config(self, reader: ConfigReader, tensors: Collection[str], *, where: str) -> tuple[object, ...]:
        """GPT's facts, and the experts of types that have some."""
        described = self.types[reader("model_type")]
        return (GPTConfig(), *([described.experts(reader)] if isinstance(described, ExpertType) else []))

    @override
    def settings_of_groups(self, groups: Sequence[object], model_type: str, model: ModelConfig) -> dict[str, Any]:
        """Settings of the experts."""
        described = self.types[model_type]
        if not isinstance(described, ExpertType):
            return {}
        return described.write_experts(MoEConfig.among(groups), model)

    @override
    def differences(self, model_type: str, model: ModelConfig, groups: Sequence[object]) -> list[str]:
        """What a type can't express about the model's experts."""
        described, moe = self.types[model_type], MoEConfig.among(groups)
        if isinstance(described, ExpertType):
            return described.expert_differences(moe, model)
        return ["it has experts"] if moe.has_experts else []

    @override
    def table(self, model_type: str, model: ModelConfig, groups: Sequence[object] = ()) -> Sequence[Row]:
        """Rows of the model's modules, those of experts included."""
        described, moe = self.types[model_type], MoEConfig.among(groups)
        of_experts = described.expert_rows(moe) if isinstance(described, ExpertType) and moe.has_experts else ()
        return (*super().table(model_type, model, groups), *of_experts)


FORMAT = DecoderFormat()
