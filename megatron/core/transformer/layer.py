"""One transformer layer: attention, of a decoder also to its encoder, and MLP, each behind a norm and added to the
residual stream.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.ops.dropout import dropout
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Work, total_of
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm


class TransformerLayer(nn.Module):
    """Pre-norm layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, dropout on both branches. With ``cross``
    attention to what an encoder made comes between them.

    With ``--apply-residual-connection-post-layernorm`` each branch is added to ``norm(x)``. The norm at the start of
    such a layer is as well the norm at the end of the one before, so a stack of them and a final norm are the original
    post-norm transformer (arXiv:1706.03762, arXiv:1810.04805), weight for weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ParallelContext,
        *,
        number: int,
        causal: bool,
        cross: bool = False,
        recompute_core: bool = False,
    ) -> None:
        super().__init__()
        self._context = context
        self._number = number
        self._dropout = config.hidden_dropout
        self._residual_behind_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = Norm(config.hidden_size, config, context)
        self.self_attention = SelfAttention(
            config, context, number=number, causal=causal, recompute_core=recompute_core
        )
        self.pre_cross_attn_layernorm = Norm(config.hidden_size, config, context) if cross else None
        self.cross_attention = (
            CrossAttention(config, context, number=number, recompute_core=recompute_core) if cross else None
        )
        self.pre_mlp_layernorm = Norm(config.hidden_size, config, context)
        self.mlp = MLP(config, context)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        normed = self.input_layernorm(x)
        x = self._residual(x, normed) + self._drop(self.self_attention(normed, inputs), inputs, "attention")
        if self.cross_attention is not None and self.pre_cross_attn_layernorm is not None:
            normed = self.pre_cross_attn_layernorm(x)
            x = self._residual(x, normed) + self._drop(self.cross_attention(normed, inputs), inputs, "cross attention")
        normed = self.pre_mlp_layernorm(x)
        return self._residual(x, normed) + self._drop(self.mlp(normed), inputs, "mlp")

    def costs(self, work: Work) -> Costs:
        """Its branches, and a mask of dropout for each of them, one byte an element."""
        branches = total_of(self.children(), work)
        elements = work.rows * self.input_layernorm.weight.shape[0]
        masks = (2 if self.cross_attention is None else 3) * elements * (self._dropout > 0)
        gradients = 2 * elements * work.stream_width
        return dataclasses.replace(branches, kept=branches.kept + masks, working=branches.working + gradients)

    def _residual(self, x: Tensor, normed: Tensor) -> Tensor:
        """What a branch is added to, in the type of the residual stream."""
        return normed.to(x.dtype) if self._residual_behind_norm else x

    def _drop(self, branch: Tensor, inputs: LayerInputs, name: str) -> Tensor:
        if not self.training or self._dropout == 0.0:
            return branch
        self._context.rng.enter(inputs.rng_key, f"layer {self._number} {name}")
        return dropout(branch, self._dropout, self._context.hidden_generator)
