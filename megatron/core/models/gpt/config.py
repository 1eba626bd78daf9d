"""Facts about GPT, which stands for every decoder alone, and the parts that it may have."""

from __future__ import annotations

from typing import ClassVar

from megatron.config.distillation import DistillationConfig
from megatron.config.family import FamilyConfig
from megatron.config.grpo import GRPOConfig
from megatron.config.hybrid import HybridConfig
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.lora import LoraConfig
from megatron.config.mamba import MambaConfig
from megatron.config.moe import MoEConfig
from megatron.config.positions import ROTARY_TYPES
from megatron.config.preference import PreferenceConfig
from megatron.config.quantization_training import QuantizationTrainingConfig


class GPTConfig(FamilyConfig):
    """Nothing beside the settings of every model."""

    name: ClassVar[str] = "gpt"
    title: ClassVar[str] = "GPT"
    position_embedding_types: ClassVar[tuple[str, ...]] = ("learned_absolute", *ROTARY_TYPES, "alibi", "none")
    window_sides: ClassVar[int] = 1
    usual_tokenizer: ClassVar[str | None] = "GPT2BPETokenizer"


GROUPS: tuple[type, ...] = (
    GPTConfig,
    HybridConfig,
    GatedDeltaNetConfig,
    MambaConfig,
    MoEConfig,
    LoraConfig,
    QuantizationTrainingConfig,
    DistillationConfig,
    PreferenceConfig,
    GRPOConfig,
)
