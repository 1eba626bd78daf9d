"""Arithmetic of a stack of layers: 2 for each multiply-add of its matrix products."""

from __future__ import annotations

from megatron.config.model import ModelConfig


def layers_flops_per_token(model: ModelConfig, keys: float) -> float:
    """Model FLOPs of all layers for one token that attends to ``keys`` others, forward and backward."""
    query_width = model.num_attention_heads * model.kv_channels
    mlp = model.ffn_hidden_size * (1.5 if model.gated else 1.0)
    attention = query_width * (1 + model.num_query_groups / model.num_attention_heads + keys / model.hidden_size)
    return 12 * model.num_layers * model.hidden_size * (mlp + attention)
