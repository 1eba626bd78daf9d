"""Types of the settings in other programs' checkpoints, with bounds beyond any model's."""

from __future__ import annotations

from typing import Annotated, Any

from megatron.small_files import Between

Count = Annotated[int, Between(1, 1 << 31)]
Layers = Annotated[int, Between(1, 100_000)]
Width = Annotated[int, Between(1, 1 << 24)]
Heads = Annotated[int, Between(1, 1 << 16)]
Rate = Annotated[float, Between(0, 0.999)]
Small = Annotated[float, Between(1e-30, 1)]
Factor = Annotated[float, Between(1e-6, 1e12)]

KINDS: dict[str, Any] = {
    "num_layers": Layers,
    **dict.fromkeys(("hidden_size", "ffn_hidden_size"), Width),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), Width),
    "activation_func_clamp_value": Factor,
    "mtp_num_layers": Annotated[int, Between(0, 64)],
    **dict.fromkeys(("num_attention_heads", "num_query_groups", "kv_channels"), Heads),
    **dict.fromkeys(("max_position_embeddings", "make_vocab_size_divisible_by", "vocab_size"), Count),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), Rate),
    **dict.fromkeys(("norm_epsilon", "init_method_std"), Small),
    **dict.fromkeys(("rotary_base", "rotary_percent", "rope_scaling_factor"), Factor),
    **dict.fromkeys(("rotary_seq_len_interpolation_factor", "clip_qkv"), Factor),
    **dict.fromkeys(("position_embedding_type", "normalization"), str),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "parallel_attention", "qk_layernorm"), bool),
}
"""Types and bounds of our architecture's fields, whatever another program calls the setting."""
