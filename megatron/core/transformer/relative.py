"""Relative positions (arXiv:1910.10683): a bias on attention scores, learned for each head and bucket of distances."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.context_parallel.slicing import positions
from megatron.core.ops.relative_positions import relative_buckets
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.layers import make_parameter
from megatron.core.transformer.initialization import table_init


class RelativeBias(nn.Module):
    """One table ``[buckets, heads]`` for all layers of a stack; each tensor-parallel rank holds those of its heads.

    ``tied``: name of the table, of which every stage with layers of the stack holds a copy.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ParallelContext,
        *,
        buckets: int,
        max_distance: int,
        bidirectional: bool,
        tied: str,
    ) -> None:
        super().__init__()
        self._context = context
        self._buckets, self._max_distance, self._bidirectional = buckets, max_distance, bidirectional
        sharding = Sharding((buckets, config.num_attention_heads), {1: "tp"}, tied=tied, kind="table")
        self.weight = make_parameter(sharding, table_init(config), context)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """``[n/tp, s, S]``, for the queries of this context-parallel rank and the keys of the whole sequence.

        ``hidden`` ``[s, b, h]``: what the stack's first layer here is given. Gradients are added up in fp32 or fp64.
        """
        context, device = self._context, hidden.device
        ranks = context.mesh.size("cp")
        length = hidden.shape[0] * ranks * context.sequence_parts
        queries = positions(length, context.mesh.rank("cp"), ranks, device=device)
        return self.between(queries, torch.arange(length, device=device))

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """``[n/tp, queries, keys]`` for positions ``[queries]`` and ``[keys]``."""
        buckets = relative_buckets(
            queries,
            keys,
            buckets=self._buckets,
            max_distance=self._max_distance,
            bidirectional=self._bidirectional,
        )
        wide = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return F.embedding(buckets, wide).permute(2, 0, 1).to(self.weight.dtype).contiguous()

    def costs(self, workload: Workload) -> Costs:
        """Keeps the bias of every pair and head, and the bucket of every pair, eight bytes each."""
        pairs = workload.length**2 // self._context.mesh.size("cp")
        return Costs(kept=pairs * (8 + self.weight.shape[1] * workload.itemsize))
