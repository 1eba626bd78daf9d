"""Self-attention with heads split over tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.context_parallel.attention import attention
from megatron.core.ops.rotary import apply_rotary
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.recompute import recomputed
from megatron.core.parallel.sharding import SharedRows
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.initialization import input_init, output_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.norm import Norm


class SelfAttention(nn.Module):
    """Query, key and value from one column-split matmul, attention over this rank's heads, one row-split matmul.

    The fused weight is grouped by key/value head, ``[q … q, k, v]`` for each, so that a rank's part is contiguous
    (grouped-query attention: arXiv:2305.13245). With fewer key/value heads than ranks, those that share one divide its
    query heads, and each computes its key and value.
    """

    def __init__(
        self, config: ModelConfig, context: ParallelContext, *, number: int, causal: bool, recompute_core: bool = False
    ) -> None:
        super().__init__()
        self._config, self._context = config, context
        self._number, self._causal, self._recompute_core = number, causal, recompute_core
        ranks = context.mesh.size("tp")
        self._groups = max(1, config.num_query_groups // ranks)
        self._queries_per_group = config.num_attention_heads // ranks // self._groups
        self._head_dim = config.kv_channels
        width = config.num_attention_heads * config.kv_channels
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            width + 2 * config.num_query_groups * config.kv_channels,
            context,
            init=input_init(config),
            bias=config.add_bias_linear or config.add_qkv_bias,
            shared=SharedRows(groups=config.num_query_groups, rows=2 * config.kv_channels),
        )
        # Each rank normalizes its own heads only, with or without sequence parallelism.
        self.q_layernorm = Norm(self._head_dim, config, context, partial_grad=("tp",)) if config.qk_layernorm else None
        self.k_layernorm = Norm(self._head_dim, config, context, partial_grad=("tp",)) if config.qk_layernorm else None
        self.linear_proj = RowParallelLinear(
            width, config.hidden_size, context, init=output_init(config), bias=config.add_bias_linear
        )

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        query, key, value = self._project(x)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if inputs.rotary is not None:
            interleaved = self._config.rotary_interleaved
            query = apply_rotary(query, inputs.rotary, interleaved=interleaved)
            key = apply_rotary(key, inputs.rotary, interleaved=interleaved)
        if self._recompute_core and self.training:
            mixed = recomputed(self._attend, query, key, value, inputs)
        else:
            mixed = self._attend(query, key, value, inputs)
        out: Tensor = self.linear_proj(mixed)
        return out

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[s, b, h]`` to query ``[S, b, n, d]`` and key, value ``[S, b, g, d]``."""
        fused = self.linear_qkv(x)
        length, batch, _ = fused.shape
        per_group = self._queries_per_group
        fused = fused.view(length, batch, self._groups, per_group + 2, self._head_dim)
        query = fused[..., :per_group, :].reshape(length, batch, self._groups * per_group, self._head_dim)
        return query, fused[..., per_group, :], fused[..., per_group + 1, :]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: LayerInputs) -> Tensor:
        config = self._config
        drop = config.attention_dropout if self.training else 0.0
        if drop:  # seeded here, so that recomputing the scores alone draws the same mask
            self._context.rng.enter(inputs.key, f"layer {self._number} scores")
        return attention(
            query,
            key,
            value,
            context=self._context,
            comm_type=self._context.cp_comm_type(self._number),
            causal=self._causal,
            scale=None,
            dropout=drop,
            generator=self._context.rng.split,
            segments=inputs.segments,
            documents=inputs.documents if self._context.mesh.size("cp") > 1 else None,
            padding_mask=inputs.padding_mask,
            softmax_in_fp32=config.attention_softmax_in_fp32,
            backend=config.attention_backend,
        )
