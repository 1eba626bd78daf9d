"""GPT in checkpoints of Megatron-LM."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron.config.model import ModelConfig
from megatron.config.moe import experts_of
from megatron.core.conversion.megatron_lm.arguments import Arguments
from megatron.core.conversion.megatron_lm.format import MegatronLMFormat
from megatron.core.conversion.megatron_lm.names import (
    OUTPUT,
    POSITIONS,
    WORDS,
    Names,
    latents_and_experts,
    later_layers,
    stack,
)
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.models.gpt import expert_arguments


class GPTFormat(MegatronLMFormat):
    """Checkpoints without marker tensors of another family."""

    names = Names(
        WORDS,
        POSITIONS,
        *stack("decoder", "encoder"),
        *latents_and_experts("decoder.layers.{n}"),
        *later_layers(),
        OUTPUT,
    )
    layer_count_arguments: Mapping[str, str] = {"mtp": "mtp_num_layers"}
    kinds: Mapping[str, Any] = expert_arguments.KINDS

    def groups_from_arguments(
        self, args: Arguments, model: ModelConfig, stored: Collection[str], *, legacy: bool
    ) -> tuple[object, ...]:
        """Its experts."""
        return expert_arguments.read_experts(args, model, stored)

    def default_tensors(self, stored: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Zeros for the biases of routers whose experts have some."""
        found = {}
        for name in expert_arguments.routers_without_bias(stored):
            like = stored[name.replace(".bias", ".weight")]
            zeros = partial(torch.zeros, like.shape[:1], dtype=like.dtype)
            found[name] = LazyTensor(like.shape[:1], like.dtype, zeros)
        return found

    def unsupported(self, portable: PortableModel) -> dict[str, bool]:
        """Choices of experts."""
        return expert_arguments.unsupported_experts(experts_of(portable.groups), portable.model)

    def arguments(self, portable: PortableModel) -> dict[str, Any]:
        """Those of experts."""
        return expert_arguments.written_experts(experts_of(portable.groups), portable.model)

    def flags(self, groups: Sequence[object]) -> dict[str, Any]:
        """Those of routers and shared experts."""
        return expert_arguments.expert_flags(groups)

    def notes(self, args: Arguments) -> tuple[str, ...]:
        """Choices that were dropped."""
        return expert_arguments.notes_on_experts(args)


FORMAT = GPTFormat()
