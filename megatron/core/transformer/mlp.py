"""The feed-forward network of a layer."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn
from typing_extensions import override

from megatron.core.ops.activation import gated_activation, plain_activation
from megatron.core.parallel.costs import Costs, Workload, costs_of
from megatron.core.parallel.sharding import StackedPart
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.initialization import input_init, output_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace


class MLP(nn.Module):
    """Two matmuls around an activation, optionally gated (SwiGLU, GEGLU: arXiv:2002.05202). ``width``: between them, if
    not ``--ffn-hidden-size``.
    """

    text_state = None

    def __init__(self, place: BranchPlace, *, width: int | None = None) -> None:
        super().__init__()
        config, context = place.stack.model, place.context
        self._kind, self._context = config.nonlinearity, context
        self._gated = config.gated
        self._limit, self._offset = config.activation_func_clamp_value, config.glu_linear_offset
        hidden, inner, bias = config.hidden_size, width or config.ffn_hidden_size, config.add_mlp_bias
        matrices = (StackedPart(inner),) * (2 if config.gated else 1)
        self.linear_fc1 = ColumnParallelLinear(
            hidden, len(matrices) * inner, context, init=input_init(config), bias=bias, parts=matrices
        )
        self.linear_fc2 = RowParallelLinear(inner, hidden, context, init=output_init(place.stack), bias=bias)

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """``[s, b, h] -> [s, b, h]``, through ``[S, b, f/tp]``."""
        inner = self.linear_fc1(x)
        if self._gated:
            inner = gated_activation(inner, self._kind, limit=self._limit, offset=self._offset)
        else:
            inner = plain_activation(inner, self._kind)
        out: Tensor = self.linear_fc2(inner)
        return out

    def costs(self, workload: Workload) -> Costs:
        """Keeps the activation's input; a plain ReLU keeps its output instead, which is the second matmul's input,
        unless that is a copy in 8 bits. To quantize the gradient of the widest tensor, its input's, needs most, when
        the rest has been freed.
        """
        given, given_on = (linear.weight.shape[dim] for linear, dim in ((self.linear_fc1, 0), (self.linear_fc2, 1)))
        shares = self._kind == "relu" and not self._gated and not self._context.keeps_bytes
        kept = 0 if shares else workload.tokens * given * workload.itemsize
        first, second = (costs_of(each, workload) for each in (self.linear_fc1, self.linear_fc2))
        matmuls, fp8 = first + second, self.linear_fc1.fp8
        gradients = workload.tokens * (given + given_on) * workload.itemsize
        wide = 0 if fp8 is None else workload.itemsize + fp8.quantizer.bytes_to_quantize(workload.itemsize)
        working = max(matmuls.working + gradients, workload.tokens * given * wide - kept - second.kept)
        return dataclasses.replace(matmuls, kept=matmuls.kept + kept, working=working)
