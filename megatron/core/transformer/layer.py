"""One transformer layer: attention and MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.ops.dropout import dropout
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm


class TransformerLayer(nn.Module):
    """Pre-norm layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, dropout on both branches."""

    def __init__(
        self, config: ModelConfig, context: ParallelContext, *, number: int, causal: bool, recompute_core: bool = False
    ) -> None:
        super().__init__()
        self._context = context
        self._number = number
        self._dropout = config.hidden_dropout
        self.input_layernorm = Norm(config.hidden_size, config, context)
        self.self_attention = SelfAttention(
            config, context, number=number, causal=causal, recompute_core=recompute_core
        )
        self.pre_mlp_layernorm = Norm(config.hidden_size, config, context)
        self.mlp = MLP(config, context)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``."""
        x = x + self._drop(self.self_attention(self.input_layernorm(x), inputs), inputs, "attention")
        return x + self._drop(self.mlp(self.pre_mlp_layernorm(x)), inputs, "mlp")

    def _drop(self, branch: Tensor, inputs: LayerInputs, name: str) -> Tensor:
        if not self.training or self._dropout == 0.0:
            return branch
        self._context.rng.enter(inputs.key, f"layer {self._number} {name}")
        return dropout(branch, self._dropout, self._context.hidden_generator)
