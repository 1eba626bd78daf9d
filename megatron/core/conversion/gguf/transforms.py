"""How tensors of published models become those of GGUF files and back: what a file's tensors are besides renamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.transforms import FUSED_QUERY_KEY_VALUE, SAME, TRANSPOSED, Transform, halves, neighbours


@dataclass(frozen=True)
class Rule:
    """Tensors whose name in a published model ends with one of ``ends`` are made by ``transform``: ``join`` makes the
    file's of theirs.
    """

    ends: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True)
class Division:
    """A published tensor whose name ends with ``end``, of which a file has ``parts``, under the same name with these
    ends. ``transform``: ``split`` makes the parts.
    """

    end: str
    parts: tuple[str, ...]
    transform: Transform = SAME


def _one(forward: Callable[[Tensor, ModelConfig], Tensor], back: Callable[[Tensor, ModelConfig], Tensor]) -> Transform:
    return Transform(lambda parts, model: forward(parts[0], model), lambda tensor, model: [back(tensor, model)])


def _turned(rows: Tensor, model: ModelConfig) -> Tensor:
    """Neighbours as halves, in a model whose pairs the published type keeps as halves."""
    from dataclasses import replace

    return halves(rows, replace(model, rotary_interleaved=True))


NEIGHBOURS = _one(neighbours, _turned)
"""Rows of queries or keys whose rotary pairs are halves of a head there and neighbours in a file."""

UNGROUPED = _one(
    lambda tensor, model: FUSED_QUERY_KEY_VALUE.split(tensor, model)[0],
    lambda tensor, model: FUSED_QUERY_KEY_VALUE.join([tensor], model),
)
"""Queries, keys and values by group, ``[q … q, k, v]`` each, there; all queries, all keys, all values in a file."""

PLUS_ONE = _one(lambda tensor, model: tensor.float() + 1, lambda tensor, model: tensor - 1)
"""Weights of norms, stored with one subtracted there."""

TURNED = _one(
    lambda tensor, model: TRANSPOSED.join([tensor], model), lambda tensor, model: TRANSPOSED.split(tensor, model)[0]
)
"""Matrices ``[in, out]`` of a Conv1D."""

MINUS_EXP = _one(
    lambda tensor, model: -torch.exp(tensor.float())[:, None], lambda tensor, model: torch.log(-tensor.squeeze(-1))
)
"""Decay rates of Mamba-2: their logarithms there, ``[heads, 1]`` in a file."""

MINUS_EXP_OF_HEADS = _one(lambda tensor, model: -torch.exp(tensor.float()), lambda tensor, model: torch.log(-tensor))
"""Decay rates of gated delta nets: their logarithms there."""

COLUMN = _one(lambda tensor, model: tensor[:, None], lambda tensor, model: tensor.squeeze(-1))
"""A number for each head: ``[heads]`` there, ``[heads, 1]`` in a file."""

CONVOLUTION = _one(lambda tensor, model: tensor.squeeze(1), lambda tensor, model: tensor[:, None])
"""Kernels of a depthwise convolution: ``[channels, 1, width]`` there, ``[channels, width]`` in a file."""


def _stack(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return torch.stack(list(parts))


STACKED = Transform(_stack, lambda tensor, model: list(tensor.unbind()))
"""A matrix for each expert there, ``[experts, …]`` in a file."""


def stacked_parts(transform: Transform) -> Transform:
    """``STACKED``, of matrices that are changed each by ``transform``."""
    return Transform(
        partial(_stacked_join, transform),
        lambda tensor, model: [transform.split(each, model)[0] for each in tensor.unbind()],
    )


def _stacked_join(transform: Transform, parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return torch.stack([transform.join([part], model) for part in parts])
