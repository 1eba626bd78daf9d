"""Gates on the output of attention in Megatron-LM's checkpoints, which are projected together with the queries."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.model import ModelConfig

GATED = ".linear_qkv."
"""A part of the names of the tensors that hold them."""


def gates_behind_queries(model: ModelConfig) -> Tensor:
    """Our rows of a matrix of queries, gates, keys and values in Megatron-LM's order.

    For each key head it has all queries, then all their gates, then key and value; here each query has its gate behind
    it.
    """
    groups, width = model.num_query_groups, model.kv_channels
    queries = model.num_attention_heads // groups
    rows = torch.arange(groups * (2 * queries + 2) * width).view(groups, -1, width)
    pairs = rows[:, :-2].view(groups, queries, 2, width).transpose(1, 2).reshape(groups, -1, width)
    return torch.cat((pairs, rows[:, -2:]), dim=1).flatten()
