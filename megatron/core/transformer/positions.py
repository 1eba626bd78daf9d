"""How the layers of a model turn queries and keys, and the rotary tables of a microbatch."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.context_parallel.slicing import positions
from megatron.core.ops.rotary import Rotary, RotaryTables
from megatron.core.ops.rotary_scaling import (
    UNSCALED,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    Scaling,
    Yarn,
    longrope_attention_factor,
    yarn_attention_factor,
)
from megatron.core.parallel.context import ParallelContext


class RotaryPositions:
    """Makes the rotary tables of a microbatch: none for a model without rotary positions.

    Dynamic NTK and LongRoPE depend on the length of a sequence. It is the length of the call, on all ranks together and
    with padding, wherever documents begin: in training always ``--seq-length``, so that a run computes one function. A
    run at more than ``--original-max-position-embeddings`` trains the model for long contexts; any other trains the
    one for short contexts. transformers decides the same way, unless it is given position ids: then by the largest.
    """

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        self._context = context
        self._kinds = {kind for number in range(config.num_layers) if (kind := rotary_of(config, number)) is not None}

    def __call__(self, hidden: Tensor, position_ids: Tensor | None, *, length: int | None = None) -> RotaryTables:
        """Rotary tables for ``hidden`` ``[s, b, h]`` at ``position_ids`` ``[b, S]``; None means 0, 1, … of the whole
        sequence.

        ``length``: of the sequence, where it is not that of the call: generation computes it in parts.
        """
        if not self._kinds:
            return {}
        mesh = self._context.mesh
        ranks = mesh.size("cp")
        if length is None:
            length = hidden.shape[0] * ranks * self._context.sequence_parts
        if position_ids is None:
            position_ids = positions(length, mesh.rank("cp"), ranks, device=hidden.device)
        wide = torch.float64 if self._context.dtype == torch.float64 else torch.float32
        return {kind: kind.table(position_ids, length=length, dtype=wide) for kind in self._kinds}


def rotary_of(config: ModelConfig, number: int) -> Rotary | None:
    """How layer ``number`` turns queries and keys; None for a layer without rotary positions."""
    if not config.has_rotary(number):
        return None
    if config.rotary_base_local is not None and config.window_of(number) is not None:
        return Rotary(config.rotary_width, config.rotary_base_local)
    return Rotary(config.rotary_width, config.rotary_base, _scaling(config))


def score_factor_of(config: ModelConfig) -> float:
    """What latent attention multiplies its scores by, with YaRN (DeepSeek-V2, arXiv:2405.04434) or without."""
    if config.position_embedding_type != "yarn":
        return 1.0
    return yarn_attention_factor(config.rotary_scaling_factor, mscale=config.mscale_all_dim) ** 2


def _scaling(config: ModelConfig) -> Scaling:
    """What ``--position-embedding-type`` and the flags of each kind say."""
    factor, original, given = (
        config.rotary_scaling_factor,
        config.original_max_position_embeddings,
        config.rotary_attention_factor,
    )
    if config.rotary_seq_len_interpolation_factor is not None:
        return Linear(factor=config.rotary_seq_len_interpolation_factor)
    if config.position_embedding_type == "rope" and not config.use_rope_scaling:
        return UNSCALED
    assert original is not None, "scaled rotary positions need --original-max-position-embeddings"
    if config.use_rope_scaling:
        return Llama3(
            factor=config.rope_scaling_factor,
            low=config.rope_low_freq_factor,
            high=config.rope_high_freq_factor,
            original_length=original,
        )
    if config.position_embedding_type == "dynamic_ntk":
        return DynamicNTK(factor=factor, original_length=original)
    if config.position_embedding_type == "longrope":
        usual = longrope_attention_factor(factor, original)
        return LongRope(
            attention_factor=usual if given is None else given,
            short_factors=config.longrope_short_factors,
            long_factors=config.longrope_long_factors,
            original_length=original,
        )
    usual = yarn_attention_factor(factor, mscale=config.mscale, mscale_all_dim=config.mscale_all_dim)
    return Yarn(
        attention_factor=usual if given is None else given,
        factor=factor,
        beta_fast=config.yarn_beta_fast,
        beta_slow=config.yarn_beta_slow,
        original_length=original,
        round_to_int=config.yarn_correction_range_round_to_int,
    )
