"""How tensors of other formats become ours and back: what a mapping table's rows do besides renaming.

Each transform only moves numbers, so that there and back gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

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


def _split_query_key_value(
    tensor: Tensor, model: ModelConfig, *, order: Callable[[Tensor, ModelConfig], Tensor] | None = None
) -> list[Tensor]:
    """Split a fused matrix into queries, keys and values. ``order``: of rotary pairs; halves unless given."""
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.kv_channels
    queries = heads * (2 if model.attention_output_gate else 1) // groups * width
    grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
    query, key, value = (part.flatten(0, 1) for part in torch.split(grouped, [queries, width, width], dim=1))
    order = order or halves
    if not model.attention_output_gate:
        return [order(query, model), order(key, model), value.contiguous()]
    # Each head's query has its gate behind it, which has no positions.
    numbers = torch.arange(2 * heads * width).view(heads, 2, -1)
    moved = torch.stack((order(numbers[:, 0].flatten(), model).view(heads, -1), numbers[:, 1]), dim=1).flatten()
    return [query[moved], order(key, model), value.contiguous()]


def _split_key_value(tensor: Tensor, model: ModelConfig) -> list[Tensor]:
    grouped = tensor.reshape(model.num_query_groups, -1, *tensor.shape[1:])
    return [part.flatten(0, 1).contiguous() for part in grouped.chunk(2, dim=1)]


def halves(rows: Tensor, model: ModelConfig) -> Tensor:
    """``[heads·d, …]`` with the rotary pairs of each head as two halves, whatever the model's order is."""
    if not (model.is_rotary and model.rotary_interleaved):
        return rows.contiguous()
    width = model.kv_channels
    turned = model.rotary_width
    heads = rows.reshape(-1, width, *rows.shape[1:])
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
    return heads[:, order].reshape(rows.shape).contiguous()


def neighbours(rows: Tensor, model: ModelConfig) -> Tensor:
    """``[heads·d, …]`` with the rotary pairs of each head as neighbours, whatever the model's order is."""
    if not model.is_rotary or model.rotary_interleaved:
        return rows.contiguous()
    width, turned = model.kv_channels, model.rotary_width
    heads = rows.reshape(-1, width, *rows.shape[1:])
    order = [each for pair in range(turned // 2) for each in (pair, pair + turned // 2)]
    return heads[:, [*order, *range(turned, width)]].reshape(rows.shape).contiguous()


SAME = Transform(lambda parts, model: parts[0], lambda tensor, model: [tensor])
"""One tensor, unchanged."""

TRANSPOSED = Transform(lambda parts, model: parts[0].t().contiguous(), lambda tensor, model: [tensor.t().contiguous()])
"""GPT-2's Conv1D keeps ``[in, out]`` where a linear layer keeps ``[out, in]``; a bias stays as it is."""

QUERY_KEY_VALUE = Transform(_join_query_key_value, _split_query_key_value)
"""Separate query, key and value, ``[heads·d, …]``, in one tensor grouped by key/value head: ``[q … q, k, v]`` each.

Rows of queries and keys whose rotary pairs are neighbours, ``(2i, 2i+1)``, become ``(i, i + d/2)``, which is what all
families here rotate.
"""

NEIGHBOURING_QUERY_KEY_VALUE = Transform(_join_query_key_value, partial(_split_query_key_value, order=neighbours))
"""Joins queries, keys and values as ``QUERY_KEY_VALUE`` does, for types that rotate the pairs ``(2i, 2i+1)``."""


def _query_key_value_below_each_other(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.kv_channels
    return _join_query_key_value(torch.split(parts[0], [heads * width, groups * width, groups * width]), model)


def _rearranged(tensor: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor with its rows where ``order`` puts their numbers: each row is copied once, or none if all stay.

    Nothing else is done to ``tensor``, which may have no numbers: torch.cat of such tensors imports torch's compiler,
    a second of work.
    """
    rows = torch.arange(len(tensor))
    ordered = order(rows)
    return tensor if torch.equal(ordered, rows) else tensor[ordered]


FUSED_QUERY_KEY_VALUE = Transform(
    _query_key_value_below_each_other,
    lambda tensor, model: [_rearranged(tensor, lambda rows: torch.cat(_split_query_key_value(rows, model)))],
)
"""One tensor of all queries, below them all keys, below them all values."""

GROUPED = Transform(
    lambda parts, model: parts[0],
    lambda tensor, model: [
        _rearranged(tensor, lambda rows: _join_query_key_value(_split_query_key_value(rows, model), model))
    ],
)
"""One tensor of query, key and value that is grouped as ours: follows the order of rotary pairs."""

KEY_VALUE = Transform(_join_query_key_value, _split_key_value)
"""Separate key and value, ``[heads·d, …]``, in one tensor of ``[k, v]`` for each head, for cross-attention.

Neither has positions, so their order within a head is the same everywhere.
"""

PER_HEAD = Transform(lambda parts, model: parts[0], lambda tensor, model: [halves(tensor, model)])
"""A vector for the channels of a head: follows the order of a head's rotary pairs."""

TRANSPOSED_THIRDS = Transform(
    lambda parts, model: FUSED_QUERY_KEY_VALUE.join([TRANSPOSED.join(parts, model)], model),
    lambda tensor, model: TRANSPOSED.split(FUSED_QUERY_KEY_VALUE.split(tensor, model)[0], model),
)
"""One tensor of a Conv1D whose thirds are query, key and value: GPT-2's ``c_attn``."""
