"""Tensors of ours as the parts that tensor-parallel ranks of TensorRT-LLM hold.

A cut moves rows, or divides columns; scales of a weight are cut as it is. Linear weights stay ``[out, in]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.errors import ConfigError

Parts = Mapping[str, list[Tensor]]
"""Each rank's part, by the names of modules that one tensor of ours makes there."""
Cut = Callable[[Tensor], Parts]


@dataclass(frozen=True)
class Layout:
    """Ranks of the target. ``tensor``: that divide each layer; ``pipeline``: stages. Rank = stage x tensor + part."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline


def whole(name: str, ranks: int) -> Cut:
    """Every rank holds all of it."""
    return lambda tensor: {name: [tensor] * ranks}


def by_rows(name: str, ranks: int) -> Cut:
    """Ranks divide the outputs; in experts those of each expert."""
    return lambda tensor: {name: _divided(tensor, ranks, 0)}


def by_columns(name: str, ranks: int) -> Cut:
    """Ranks divide the inputs. What is one column for all inputs, as scales of outputs are, isn't divided."""
    return lambda tensor: {name: [tensor] * ranks if tensor.shape[-1] == 1 else _divided(tensor, ranks, -1)}


def words(name: str, ranks: int) -> Cut:
    """Ranks divide the vocabulary, with rows of zeros behind it where it doesn't divide."""

    def cut(tensor: Tensor) -> Parts:
        return {name: _divided(F.pad(tensor, (0, 0, 0, -len(tensor) % ranks)), ranks, 0)}

    return cut


def attention(name: str, model: ModelConfig, ranks: int) -> Cut:
    """Groups of queries with their key and value become all queries, all keys and all values of each rank.

    Where there are fewer heads of keys than ranks, several ranks hold the same one.
    """
    groups, width = model.num_query_groups, model.kv_channels

    def cut(tensor: Tensor) -> Parts:
        grouped = tensor.view(groups, -1, width, *tensor.shape[1:])
        queries, keys, values = grouped[:, :-2].flatten(0, 2), grouped[:, -2], grouped[:, -1]
        if groups < ranks:
            keys, values = (each.repeat_interleave(ranks // groups, 0) for each in (keys, values))
        parts = [_divided(each, ranks, 0) for each in (queries, keys.flatten(0, 1), values.flatten(0, 1))]
        return {name: [torch.cat(part) for part in zip(*parts)]}

    return cut


def gated(activated: str, linear: str, ranks: int) -> Cut:
    """The half of a gated MLP that is ``activated`` and the ``linear`` one: TensorRT-LLM's ``fc`` and ``gate``."""

    def cut(tensor: Tensor) -> Parts:
        first, second = tensor.chunk(2)
        return {activated: _divided(first, ranks, 0), linear: _divided(second, ranks, 0)}

    return cut


def experts_gated(name: str, ranks: int) -> Cut:
    """Experts ``[E, 2, width, in]``, the activated half first, as ``[E, 2 width / ranks, in]`` with the linear half
    first: the other order than that of one MLP.
    """

    def cut(tensor: Tensor) -> Parts:
        activated, linear = (_divided(half, ranks, 1) for half in tensor.unbind(1))
        return {name: [torch.cat(pair, 1) for pair in zip(linear, activated)]}

    return cut


def _divided(tensor: Tensor, ranks: int, dim: int) -> list[Tensor]:
    if tensor.shape[dim] % ranks:
        raise ConfigError(
            f"--target-tensor-parallel-size {ranks} doesn't divide the {tensor.shape[dim]} rows or columns of a matrix "
            f"{list(tensor.shape)}"
        )
    return list(tensor.tensor_split(ranks, dim))
