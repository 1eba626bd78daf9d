"""How tensors of other formats become ours and back: what a mapping table's rows do besides renaming.

Each transform only moves numbers, so that there and back gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class Transform:
    """A bijection: ``join`` makes our tensor of theirs, ``split`` theirs of ours.

    Shapes follow from running ``split`` on tensors without numbers.
    """

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], list[Tensor]]


def stacked(count: int) -> Transform:
    """Several matrices of equal shape one above the other: gate and up of a gated MLP."""
    return Transform(
        lambda parts, model: torch.cat(list(parts)),
        lambda tensor, model: [part.contiguous() for part in tensor.chunk(count)],
    )


def _join_query_key_value(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    grouped = [part.reshape(model.num_query_groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _split_query_key_value(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.kv_channels
    grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
    parts = torch.split(grouped, [heads // groups * width, width, width], dim=1)
    query, key, value = (part.flatten(0, 1) for part in parts)
    return [halves(query, model), halves(key, model), value.contiguous()]


def _split_key_value(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    grouped = tensor.reshape(model.num_query_groups, -1, *tensor.shape[1:])
    return [part.flatten(0, 1).contiguous() for part in grouped.chunk(2, dim=1)]


def halves(rows: Tensor, model: ModelConfig) -> Tensor:
    """``[heads·d, …]`` with the rotary pairs of each head as two halves, whatever the model's order is."""
    if not (model.position_embedding_type == "rope" and model.rotary_interleaved):
        return rows.contiguous()
    width = model.kv_channels
    turned = int(width * model.rotary_percent)
    heads = rows.reshape(-1, width, *rows.shape[1:])
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
    return heads[:, order].reshape(rows.shape).contiguous()


SAME = Transform(lambda parts, model: parts[0], lambda tensor, model: [tensor])
"""One tensor, unchanged."""

TRANSPOSED = Transform(lambda parts, model: parts[0].t().contiguous(), lambda tensor, model: [tensor.t().contiguous()])
"""GPT-2's Conv1D keeps ``[in, out]`` where a linear layer keeps ``[out, in]``; a bias stays as it is."""

QUERY_KEY_VALUE = Transform(_join_query_key_value, _split_query_key_value)
"""Separate query, key and value, ``[heads·d, …]``, in one tensor grouped by key/value head: ``[q … q, k, v]`` each.

Rows of queries and keys whose rotary pairs are neighbours, ``(2i, 2i+1)``, become ``(i, i + d/2)``, which is what all
families here rotate.
"""

KEY_VALUE = Transform(_join_query_key_value, _split_key_value)
"""Separate key and value, ``[heads·d, …]``, in one tensor of ``[k, v]`` for each head, for cross-attention.

Neither has positions, so their order within a head is the same everywhere.
"""

PER_HEAD = Transform(lambda parts, model: parts[0], lambda tensor, model: [halves(tensor, model)])
"""A vector for the channels of a head: follows the order of a head's rotary pairs."""

TRANSPOSED_THIRDS = Transform(
    lambda parts, model: _join_query_key_value(TRANSPOSED.join(parts, model).chunk(3), model),
    lambda tensor, model: TRANSPOSED.split(torch.cat(_split_query_key_value(tensor, model)), model),
)
"""One tensor of a Conv1D whose thirds are query, key and value: GPT-2's ``c_attn``."""
