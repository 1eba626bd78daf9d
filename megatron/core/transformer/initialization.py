"""Standard deviations of a transformer's initial weights (Megatron-LM's rule, after GPT-2)."""

from __future__ import annotations

import math

from megatron.config.model import ModelConfig
from megatron.core.tensor_parallel.initialize import Normal
from megatron.core.transformer.place import StackSettings


def input_init(config: ModelConfig) -> Normal:
    """Initialization of embeddings, heads and every matrix that does not write to the residual stream."""
    return Normal(config.init_method_std)


def output_init(stack: StackSettings) -> Normal:
    """Initialization of matrices that write to the residual stream: narrower, so that its variance doesn't grow with
    depth.
    """
    return Normal(stack.model.init_method_std / math.sqrt(stack.residual_writers))
