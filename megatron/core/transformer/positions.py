"""Rotary tables for the positions of a rank's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.context_parallel.slicing import positions
from megatron.core.ops.rotary import RotaryTable, rotary_frequencies, rotary_table
from megatron.core.parallel.context import ParallelContext


class RotaryPositions:
    """Makes the rotary table of a microbatch; None for a model without rotary positions."""

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        self._context = context
        self._frequencies = _frequencies(config)

    def __call__(self, hidden: Tensor, position_ids: Tensor | None) -> RotaryTable | None:
        """For ``hidden`` ``[s, b, h]`` at ``position_ids`` ``[b, S]``; None means 0, 1, … of the whole sequence."""
        if self._frequencies is None:
            return None
        if position_ids is None:
            mesh = self._context.mesh
            ranks = mesh.size("cp")
            held = hidden.shape[0] * (mesh.size("tp") if self._context.sequence_parallel else 1)
            position_ids = positions(held * ranks, mesh.rank("cp"), ranks, device=hidden.device)
        wide = torch.float64 if self._context.dtype == torch.float64 else torch.float32
        return rotary_table(self._frequencies, position_ids, dtype=wide)


def _frequencies(config: ModelConfig) -> Tensor | None:
    if config.position_embedding_type != "rope":
        return None
    return rotary_frequencies(
        config.kv_channels,
        percent=config.rotary_percent,
        base=config.rotary_base,
        interpolation_factor=config.rotary_seq_len_interpolation_factor,
        llama3_factor=config.rope_scaling_factor if config.use_rope_scaling else None,
    )
