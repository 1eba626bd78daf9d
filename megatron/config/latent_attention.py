"""Multi-head latent attention: its sizes."""

from __future__ import annotations

from megatron.config.flags import Settings, architecture_flag, architecture_switch


class LatentAttentionConfig(Settings):
    """Settings of multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434), part of those of the model."""

    multi_latent_attention: bool = architecture_switch(
        "Multi-head latent attention (MLA, DeepSeek-V2): keys and values of all heads come from one narrow latent "
        "vector of each token. --qk-layernorm then normalizes the latents."
    )
    q_lora_rank: int | None = architecture_flag(
        "Width of the latent vector of queries (--multi-latent-attention); without it queries are computed from the "
        "hidden states.",
        default=None,
        at_least=1,
    )
    kv_lora_rank: int = architecture_flag(
        "Width of the latent vector of keys and values (--multi-latent-attention).", default=32, at_least=1
    )
    qk_head_dim: int = architecture_flag(
        "Channels of each head's queries and keys without positions (--multi-latent-attention).",
        default=128,
        at_least=1,
    )
    qk_pos_emb_head_dim: int = architecture_flag(
        "Channels with rotary positions (--multi-latent-attention): of each head's queries, and of one key that all "
        "heads share.",
        default=64,
        at_least=2,
    )
    v_head_dim: int = architecture_flag(
        "Width of each head's values (--multi-latent-attention).", default=128, at_least=1
    )
