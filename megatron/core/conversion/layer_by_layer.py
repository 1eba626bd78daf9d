"""A model on texts with one layer in memory at a time, whole, whatever the layout of training was."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config.pipeline import Stage
from megatron.core.conversion.portable import PortableModel, fill, layers_of
from megatron.core.models.registry import family_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.operands import Operands
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.sharding import ShardedState, sharded_parameters


def stage_of_layer(portable: PortableModel, number: int, *, device: torch.device, operands: Operands) -> nn.Module:
    """Layer ``number`` as a stage of its own, in fp32, frozen, with the embedding in the first and the output layer in
    the last. ``operands``: what its products ask.
    """
    mesh, count = Mesh.single(), layers_of(portable.model, portable.groups)
    context = ModelContext(
        mesh=mesh, rng=RngStreams(1, mesh, device), device=device, dtype=torch.float32, operands=operands
    )
    part = Stage(range(number, number + 1), is_first=number == 0, is_last=number == count - 1)
    build = family_of(portable.groups).train_spec.build_model
    stage = build(portable.model, portable.groups, context, stage=part).eval().requires_grad_(False)
    state = [
        ShardedState(f"model.{sharding.tied or name}", parameter.detach(), sharding)
        for name, parameter, sharding in sharded_parameters(stage)
    ]
    fill(state, portable, mesh)
    return stage
