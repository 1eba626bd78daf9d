"""Standard deviations of a transformer's initial weights (Megatron-LM's rule, after GPT-2)."""

from __future__ import annotations

import math

from megatron.config.model import ModelConfig
from megatron.core.tensor_parallel.initialize import Normal
from megatron.core.transformer.place import StackSettings


def table_init(config: ModelConfig) -> Normal:
    """Initialization of embeddings and of the output layer, whatever the model's width."""
    return Normal(config.init_method_std)


def input_init(config: ModelConfig) -> Normal:
    """Initialization of every matrix that does not write to the residual stream; narrower in a model that muP makes
    wider, so that its products don't grow with the width.
    """
    return Normal(config.init_method_std / math.sqrt(config.width_multiplier))


def output_init(stack: StackSettings) -> Normal:
    """Initialization of matrices that write to the residual stream: narrower, so that its variance doesn't grow with
    depth.
    """
    return Normal(input_init(stack.model).std / math.sqrt(stack.residual_writers))
