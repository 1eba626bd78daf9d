"""How tensors of other formats become ours and back: what a mapping table's rows do besides renaming.

Each transform only moves numbers, so that there and back gives the same bytes. ``join`` makes our tensor of theirs,
``split`` theirs of ours; shapes follow from running ``split`` on tensors without numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.model import ModelConfig


class Transform(Protocol):
    """A bijection between our tensor and one or several of theirs."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Our tensor, of theirs."""

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """Their tensors, of ours."""


@dataclass(frozen=True)
class Same:
    """One tensor, unchanged."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """The tensor itself."""
        return parts[0]

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """The tensor itself."""
        return [tensor]


@dataclass(frozen=True)
class Transposed:
    """GPT-2's Conv1D keeps ``[in, out]`` where a linear layer keeps ``[out, in]``."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """``[in, out]`` to ``[out, in]``."""
        return parts[0].t().contiguous()

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """``[out, in]`` to ``[in, out]``."""
        return [tensor.t().contiguous()]


@dataclass(frozen=True)
class Stacked:
    """Several matrices of equal shape one above the other: gate and up of a gated MLP."""

    count: int

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """One above the other."""
        return torch.cat(list(parts))

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """Each by itself."""
        return [part.contiguous() for part in tensor.chunk(self.count)]


@dataclass(frozen=True)
class QueryKeyValue:
    """Separate query, key and value, ``[heads·d, …]``, in one tensor grouped by key/value head: ``[q … q, k, v]`` each.

    Rows of queries and keys whose rotary pairs are neighbours, ``(2i, 2i+1)``, become ``(i, i + d/2)``, which is what
    all families here rotate.
    """

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Query, key and value to the grouped tensor."""
        query, key, value = parts
        rest = query.shape[1:]
        grouped = [part.reshape(model.num_query_groups, -1, *rest) for part in (query, key, value)]
        return torch.cat(grouped, dim=1).flatten(0, 1)

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """The grouped tensor to query, key and value."""
        heads, groups, width = model.num_attention_heads, model.num_query_groups, model.kv_channels
        grouped = tensor.reshape(groups, -1, *tensor.shape[1:])
        parts = torch.split(grouped, [heads // groups * width, width, width], dim=1)
        query, key, value = (part.flatten(0, 1) for part in parts)
        return [halves(query, model), halves(key, model), value.contiguous()]


@dataclass(frozen=True)
class KeyValue:
    """Separate key and value, ``[heads·d, …]``, in one tensor of ``[k, v]`` for each head: cross-attention's.

    Neither has positions, so their order within a head is the same everywhere.
    """

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Key and value to the grouped tensor."""
        rest = parts[0].shape[1:]
        return torch.cat([part.reshape(model.num_query_groups, -1, *rest) for part in parts], dim=1).flatten(0, 1)

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """The grouped tensor to key and value."""
        grouped = tensor.reshape(model.num_query_groups, -1, *tensor.shape[1:])
        return [part.flatten(0, 1).contiguous() for part in grouped.chunk(2, dim=1)]


@dataclass(frozen=True)
class PerHead:
    """A vector for the channels of a head: follows the order of a head's rotary pairs."""

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """The vector itself."""
        return parts[0]

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """In the order of halves."""
        return [halves(tensor, model)]


@dataclass(frozen=True)
class ThirdsOf:
    """One tensor whose thirds are query, key and value, behind ``inner``: GPT-2's ``c_attn``."""

    inner: Transform

    def join(self, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """Thirds to the grouped tensor."""
        return QueryKeyValue().join(self.inner.join(parts, model).chunk(3), model)

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """The grouped tensor to thirds."""
        return self.inner.split(torch.cat(QueryKeyValue().split(tensor, model)), model)


def halves(rows: Tensor, model: ModelConfig) -> Tensor:
    """``[heads·d, …]`` with each head's rotary pairs as two halves, whatever the model's order is."""
    if not (model.position_embedding_type == "rope" and model.rotary_interleaved):
        return rows.contiguous()
    width = model.kv_channels
    turned = int(width * model.rotary_percent)
    heads = rows.reshape(-1, width, *rows.shape[1:])
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
    return heads[:, order].reshape(rows.shape).contiguous()
