"""Experts as a part of a model: its rules, and what it is in another model or in a report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from megatron.config.expert_settings import LOSS_NAMES, Z_LOSS, ExpertSettings
from megatron.config.family import PartConfig, Rule
from megatron.config.layer_patterns import every_or_listed, shortest_pattern
from megatron.config.model import ModelConfig
from megatron.config.rules.moe import REMARKS, RULES
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from megatron.config.run import RunConfig


class MoEConfig(ExpertSettings, PartConfig):
    """Mixture of experts: feed-forward networks of which each token uses a few."""

    may_divide_over_expert_ranks: ClassVar[bool] = True

    @property
    def leaves_padding_out(self) -> bool:
        """Whether layers must be told which rows are text."""
        return self.has_experts and not self.moe_count_padding

    @property
    @override
    def divides_over_expert_ranks(self) -> bool:
        """Whether any layer may have experts."""
        return self.has_experts

    @property
    @override
    def loss_names(self) -> tuple[str, ...]:
        """What the routers report beside the main loss."""
        if not self.has_experts:
            return ()
        return (*(LOSS_NAMES[kind] for kind in self.balancing_losses), *((Z_LOSS,) if self.moe_z_loss_coeff else ()))

    @property
    @override
    def columns(self) -> Mapping[str, int]:
        """Width of what tensor-parallel ranks split, by name."""
        if not self.has_experts:
            return {}
        return {"experts": self.moe_ffn_hidden_size, "shared experts": self.moe_shared_expert_intermediate_size or 0}

    @override
    def recompute_modules(self) -> Mapping[str, str]:
        """Modules of layers with experts, each with the flag that adds it where the model lacks it."""
        experts = "" if self.has_experts else "--num-experts"
        shared = "" if self.has_shared_experts else "--moe-shared-expert-intermediate-size"
        return {"moe": experts, "moe_act": experts, "shared_experts": shared}

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """Words about the experts for the line about the model in reports."""
        if not self.has_experts:
            return ()
        layers = sum(self.expert_layers(*run.stacks))
        shared = self.moe_shared_expert_intermediate_size
        also = f" and shared ones of {shared}" if shared else ""
        return (
            f"{self.num_experts} experts of {self.moe_ffn_hidden_size}{also} in {layers} layers, "
            f"{self.moe_router_topk} for each token",
        )

    @override
    def shrunk(self, stacks: Sequence[int], small: Sequence[int]) -> Self:
        """Keep the number of experts, but narrow them; of each stack, keep the kinds of the first and last layers, or
        give the last one experts where only others have some.
        """
        if not self.has_experts:
            return self
        marked, shared = self.expert_layers(*stacks), self.moe_shared_expert_intermediate_size
        kept, start = tuple[bool, ...](), 0
        for layers, fewer in zip(stacks, small, strict=True):
            stack = marked[start : start + layers]
            ends = stack if fewer == layers else stack[:1] * (fewer > 1) + stack[-(fewer - 1) or -1 :]
            kept += ends if any(ends) or not any(stack) else (*ends[:-1], True)
            start += layers
        return dataclasses.replace(
            self,
            moe_layer_freq=shortest_pattern(kept, *small),
            moe_ffn_hidden_size=_narrow(self.moe_ffn_hidden_size),
            moe_shared_expert_intermediate_size=None if shared is None else _narrow(shared),
        )

    @override
    def with_layers(self, num_layers: int, kept: Sequence[int]) -> Self:
        """Experts in those of the layers that have them."""
        if not self.has_experts:
            return self
        marked = self.expert_layers(num_layers)
        return dataclasses.replace(self, moe_layer_freq=shortest_pattern(tuple(marked[layer] for layer in kept)))

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about experts."""
        return RULES

    @override
    def remarks(self) -> Sequence[Rule]:
        """Settings of experts that have no effect."""
        return REMARKS

    @override
    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The group with defaults filled in: experts are as wide as the dense network. Spellings with one meaning
        become equal.
        """
        changes: dict[str, Any] = {"num_experts": self.num_experts or None}
        if self.moe_expert_capacity_factor is not None and self.moe_expert_capacity_factor < 0:
            changes["moe_expert_capacity_factor"] = None
        if self.moe_ffn_hidden_size is None and self.has_experts:
            changes["moe_ffn_hidden_size"] = model.ffn_hidden_size
        if self.has_experts and self.uses_sinkhorn and self.moe_router_score_function == "softmax":
            changes |= sinkhorn_weights(self.moe_router_topk)  # evaluation and generation need to know them, too
        dense = self.first_k_dense_replace
        if dense is not None and self.moe_layer_freq == "1" and dense < max(stacks):  # else a rule reports it
            layers = tuple(number >= dense for stack in stacks for number in range(stack))
            changes |= {"first_k_dense_replace": None, "moe_layer_freq": shortest_pattern(layers, *stacks)}
            return dataclasses.replace(self, **changes)
        with suppress(ConfigError):  # a rule reports it
            marked = every_or_listed(self.moe_layer_freq, *stacks, flag="--moe-layer-freq")
            changes["moe_layer_freq"] = shortest_pattern(marked, *stacks)
        return dataclasses.replace(self, **changes)


def sinkhorn_weights(topk: int) -> dict[str, Any]:
    """Settings that give chosen experts the weights of Megatron-LM's sinkhorn routing."""
    if topk == 1:
        return {"moe_router_score_function": "sigmoid"}
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True}


def _narrow(width: int) -> int:
    """A small width that ranks can divide as they can the given one."""
    small = math.gcd(width, 64)
    return small if small >= 8 else width
