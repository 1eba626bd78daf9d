"""Parameters of recurrent heads, and the type in which heads compute."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding
from megatron.core.tensor_parallel.initialize import Initialization
from megatron.core.tensor_parallel.layers import make_parameter


def wide_type(context: ModelContext) -> torch.dtype:
    """The type of states, decays and their parameters: fp32, or fp64 for models in fp64."""
    return torch.promote_types(context.dtype, torch.float32)


def head_parameter(heads: int, init: Initialization, context: ModelContext) -> nn.Parameter:
    """A number for each head, which tensor-parallel ranks divide, in the wide type."""
    wide = dataclasses.replace(context, dtype=wide_type(context))
    return make_parameter(Sharding((heads,), {0: "tp"}), init, wide)
