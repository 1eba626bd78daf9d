"""Published types with experts: their settings and tensors beside those of a dense model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from typing_extensions import override

from megatron.config.layer_patterns import shortest_pattern
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Layers, Width
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.format import ModelType
from megatron.core.conversion.huggingface.parts import PublishedPart
from megatron.core.conversion.tables import Row
from megatron.core.conversion.transforms import Transform, stacked
from megatron.small_files import Between

Experts = Annotated[int, Between(1, 4096)]

KINDS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), Experts),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), Experts),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), Width),
    "first_k_dense_replace": Annotated[int, Between(0, 100_000)],
    "decoder_sparse_step": Layers,
    "mlp_only_layers": list[int],
    "norm_topk_prob": bool,
}
"""Types of the settings of experts."""

STACKED = Transform(
    lambda parts, model: torch.stack(list(parts)),
    lambda tensor, model: [part.contiguous() for part in tensor.unbind()],
)
"""A matrix of each expert in one tensor of all experts."""

STACKED_PAIRS = Transform(
    lambda parts, model: torch.stack(list(parts)).view(-1, 2, *parts[0].shape),
    lambda tensor, model: [part.contiguous() for part in tensor.flatten(0, 1).unbind()],
)
"""Gate and up of each expert in one tensor of all experts."""


@dataclass(frozen=True, kw_only=True)
class PublishedExperts(PublishedPart[MoEConfig]):
    """The experts of a type's models. ``optional``: whether a model may have none."""

    optional: bool = False

    @override
    def missing(self, part: MoEConfig, model: ModelConfig) -> Sequence[str]:
        """A model without experts isn't of a type that always has some."""
        return () if self.optional or part.has_experts else ("it has no experts",)

    @override
    def as_in(self, part: MoEConfig, usual: MoEConfig) -> MoEConfig:
        """Whatever the scores of groups are called."""
        if usual.scores_of_group != part.scores_of_group:
            return usual
        return replace(usual, moe_router_group_score=part.moe_router_group_score)


def _check(found: MoEConfig, reader: ConfigReader) -> None:
    """Raise CheckpointError for choices and groups that don't fit together."""
    if not found.has_experts:
        return
    count, choices = found.num_experts or 0, found.moe_router_topk
    groups, kept = found.moe_router_num_groups or 1, found.moe_router_group_topk or 1
    if choices > count:
        raise reader.refuse("num_experts_per_tok", f"there are {count} experts")
    is_uneven = found.moe_router_group_score == "sum" and choices % kept > 0
    if count % groups or kept > groups or choices > count // groups * kept or is_uneven:
        advice = f"{count} experts of which a token chooses {choices} have no such groups, of which it keeps {kept}"
        raise reader.refuse("n_group", advice)
    if found.moe_router_num_groups is not None and found.scores_of_group > count // groups:
        advice = f"a group's score is the sum of its best two experts, and of {count} experts each group has one"
        raise reader.refuse("n_group", advice)


def with_experts(
    base: ModelType,
    *,
    read: Callable[[ConfigReader], dict[str, Any]],
    write: Callable[[MoEConfig, ModelConfig], dict[str, Any]],
    rows: Callable[[MoEConfig], Sequence[Row]],
    optional: bool = False,
) -> ModelType:
    """The type ``base`` with experts. ``optional``: its models may have none."""

    def rows_of(moe: MoEConfig) -> Sequence[Row]:
        return rows(moe) if moe.has_experts else ()

    experts = PublishedExperts(group=MoEConfig, read=read, write=write, rows=rows_of, check=_check, optional=optional)
    return replace(base, groups=(*base.groups, experts))


def expert_layers(layers: Sequence[bool]) -> str:
    """The pattern of the layers that have experts."""
    return shortest_pattern(tuple(layers))


def expert_rows(
    moe: MoEConfig, ours: str, theirs: str, *, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Row, ...]:
    """Router and experts in ``theirs``, where each expert has three matrices of these ``names``."""
    each = [f"{theirs}.experts.{number}" for number in range(moe.num_experts or 0)]
    *pair, down = names
    return (
        Row(f"{ours}.mlp.router", f"{theirs}.gate"),
        Row(f"{ours}.mlp.experts.linear_fc1", tuple(f"{one}.{name}" for one in each for name in pair), STACKED_PAIRS),
        Row(f"{ours}.mlp.experts.linear_fc2", tuple(f"{one}.{down}" for one in each), STACKED),
    )


def shared_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Rows of the two matrices of shared experts."""
    pair = (f"{theirs}.gate_proj", f"{theirs}.up_proj")
    return (
        Row(f"{ours}.mlp.shared_experts.linear_fc1", pair, stacked(2)),
        Row(f"{ours}.mlp.shared_experts.linear_fc2", f"{theirs}.down_proj"),
    )
