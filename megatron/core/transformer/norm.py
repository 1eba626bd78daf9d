"""The norm layers: LayerNorm or RMSNorm over the last dimension."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.initialize import Constant
from megatron.core.tensor_parallel.layers import make_parameter, partial_under_sequence_parallel


class Norm(nn.Module):
    """Normalize ``[..., size]``; the result has the parameters' type even when the residual stream is fp32.

    ``partial_grad``: axes on which a rank normalizes only part of the data (heads for query and key norms).
    """

    def __init__(
        self, size: int, config: ModelConfig, context: ParallelContext, *, partial_grad: tuple[Axis, ...] | None = None
    ) -> None:
        super().__init__()
        if partial_grad is None:
            partial_grad = partial_under_sequence_parallel(context)
        sharding = Sharding((size,), partial_grad=partial_grad)
        self._eps = config.norm_epsilon
        self._offset = 1.0 if config.apply_layernorm_1p else 0.0
        self.weight = make_parameter(sharding, Constant(1.0 - self._offset), context)
        self.bias = make_parameter(sharding, Constant(0.0), context) if config.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., size] -> [..., size]``."""
        weight = self.weight + self._offset if self._offset else self.weight
        if self.bias is not None:
            return layer_norm(x, weight, self.bias, eps=self._eps).to(self.weight.dtype)
        return rms_norm(x, weight, eps=self._eps).to(self.weight.dtype)

    def costs(self, workload: Workload) -> Costs:
        """On the residual stream: keeps its input."""
        return Costs(kept=workload.rows * self.weight.shape[0] * workload.stream_itemsize)
