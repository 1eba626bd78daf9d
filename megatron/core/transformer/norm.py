"""The norm layers: LayerNorm or RMSNorm of hidden states, and those of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.sharding import Sharding, SharedRows
from megatron.core.tensor_parallel.initialize import Constant
from megatron.core.tensor_parallel.layers import make_parameter, partial_under_sequence_parallel


class Norm(nn.Module):
    """Normalize ``[..., size]``; the result has the rank's type even when the residual stream is fp32.

    ``sharding``: of its parameters, where they are not applied to hidden states.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        context: ParallelContext,
        *,
        sharding: Sharding | None = None,
        has_weight: bool = True,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        sharding = sharding or Sharding((size,), partial_grad=partial_under_sequence_parallel(context))
        self._size, self._eps, self._dtype = size, config.norm_epsilon, context.dtype
        self._offset = 1.0 if config.apply_layernorm_1p else 0.0
        self._is_layer_norm = config.normalization == "LayerNorm"
        has_weight = has_weight and config.norm_parameters != "none"
        has_bias = has_bias and self._is_layer_norm and config.norm_parameters == "weight_and_bias"
        self.weight = make_parameter(sharding, Constant(1.0 - self._offset), context) if has_weight else None
        self.bias = make_parameter(sharding, Constant(0.0), context) if has_bias else None

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[..., size] -> [..., size]``."""
        if self._is_layer_norm:
            return layer_norm(x, self._scale(), self.bias, eps=self._eps).to(self._dtype)
        return rms_norm(x, self.weight, eps=self._eps, offset=self._offset).to(self._dtype)

    @torch.no_grad()
    def divide(self, factors: Tensor) -> None:
        """Divide its results by ``factors`` [size] from now on; it must have a weight."""
        assert self.weight is not None, "a norm without parameters"
        self.weight.copy_((self.weight + self._offset) / factors - self._offset)
        if self.bias is not None:
            self.bias.div_(factors)

    def costs(self, workload: Workload) -> Costs:
        """Costs of a norm on the residual stream, which keeps its input."""
        return Costs(kept=workload.rows * self._size * workload.stream_itemsize)

    def _scale(self) -> Tensor | None:
        if self.weight is None or not self._offset:
            return self.weight
        return self.weight + self._offset


class LayerScale(nn.Module):
    """Multiply what a branch adds to the residual stream by a learned vector, small at first (arXiv:2103.17239)."""

    def __init__(self, size: int, context: ParallelContext, *, initial: float = 0.1) -> None:
        super().__init__()
        sharding = Sharding((size,), partial_grad=partial_under_sequence_parallel(context))
        self.weight = make_parameter(sharding, Constant(initial), context)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[..., size] -> [..., size]``."""
        return x * self.weight

    def costs(self, workload: Workload) -> Costs:
        """Keeps what it multiplies, for the vector's gradient."""
        return Costs(kept=workload.rows * self.weight.numel() * workload.itemsize)


class HeadNorm(Norm):
    """Normalize this rank's heads ``[S, b, n, d]``, of ``heads`` in all: of queries or of keys; see
    ``--qk-layernorm-kind`` and ``--qk-l2-norm``.

    With fewer heads of keys than ranks, the ranks that share a head each hold its weights.
    """

    def __init__(self, heads: int, config: ModelConfig, context: ParallelContext) -> None:
        width, kind = config.kv_channels, "l2" if config.qk_l2_norm else config.qk_layernorm_kind
        if kind == "shared":  # applied to a rank's own heads, with or without sequence parallelism
            sharding = Sharding((width,), partial_grad=("tp",))
        else:
            sharding = Sharding((heads * width,), {0: "tp"}, shared=SharedRows(groups=heads, rows=width))
        has_weight, has_bias = kind != "l2", kind == "shared"
        super().__init__(width, config, context, sharding=sharding, has_weight=has_weight, has_bias=has_bias)
        self._kind, self._mesh = kind, context.mesh

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[S, b, n, d] -> [S, b, n, d]``."""
        if self._kind == "shared":
            return super().forward(x)
        if self._kind == "per_head" and self._is_layer_norm:
            scale = self._scale()
            return layer_norm(x, scale if scale is None else scale.view(x.shape[-2:]), None, eps=self._eps)
        weight = self.weight if self.weight is None else self.weight.view(x.shape[-2:])
        together = self._kind == "all_heads"
        average = self._average if together and self._mesh.size("tp") > 1 else None
        return rms_norm(x, weight, eps=self._eps, offset=self._offset, dims=2 if together else 1, average=average)

    def _average(self, mean: Tensor) -> Tensor:
        """Every rank holds equally many heads, and every shared head is held by equally many ranks."""
        return all_reduce(mean, self._mesh, "tp").div_(self._mesh.size("tp"))
