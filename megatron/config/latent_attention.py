"""Multi-head latent attention: its sizes."""

from __future__ import annotations

from megatron.config.flags import Settings, flag, switch


class LatentAttentionConfig(Settings):
    """Settings of multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434), part of those of the model."""

    multi_latent_attention: bool = switch(
        "Multi-head latent attention (MLA, DeepSeek-V2): keys and values of all heads come from one narrow latent "
        "vector of each token. --qk-layernorm then normalizes the latents.",
        architecture=True,
    )
    q_lora_rank: int | None = flag(
        "Width of the latent vector of queries (--multi-latent-attention); without it queries are computed from the "
        "hidden states.",
        default=None,
        at_least=1,
        architecture=True,
    )
    kv_lora_rank: int = flag(
        "Width of the latent vector of keys and values (--multi-latent-attention).",
        default=32,
        at_least=1,
        architecture=True,
    )
    qk_head_dim: int = flag(
        "Channels of each head's queries and keys without positions (--multi-latent-attention).",
        default=128,
        at_least=1,
        architecture=True,
    )
    qk_pos_emb_head_dim: int = flag(
        "Channels with rotary positions (--multi-latent-attention): of each head's queries, and of one key that all "
        "heads share.",
        default=64,
        at_least=2,
        architecture=True,
    )
    v_head_dim: int = flag(
        "Width of each head's values (--multi-latent-attention).", default=128, at_least=1, architecture=True
    )
