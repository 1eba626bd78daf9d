"""Choices of attention: scores, windows, sinks, and what is done to queries and keys before their product."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import Settings, architecture_flag, architecture_switch


class AttentionConfig(Settings):
    """Settings of attention layers, part of those of the model."""

    softmax_scale: float | None = architecture_flag(
        "Factor of attention scores; 1 / sqrt(width of a head) unless given.", default=None, above=0
    )
    window_size: tuple[int, int] | None = architecture_flag(
        "Sliding window: how many keys before and after its own position a query sees, such as 4095,0.",
        default=None,
        at_least=0,
    )
    window_attn_skip_freq: str | None = architecture_flag(
        "Which layers have full attention instead of --window-size: every N-th layer for a number N, or those with a 0 "
        "in a list such as '[1]*5+[0]'.",
        default=None,
    )
    attn_logit_softcapping: float | None = architecture_flag(
        "Soft cap c of scaled attention scores s: c tanh(s / c), as in Gemma 2.", default=None, above=0
    )
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = architecture_flag(
        "Attention sinks: off-by-one adds 1 to the denominator of the softmax, learnable adds a learned number for "
        "each head.",
        default="vanilla",
    )
    qk_layernorm: bool = architecture_switch("Apply the norm to queries and keys.")
    qk_layernorm_kind: Literal["shared", "per_head", "all_heads"] = architecture_flag(
        "What --qk-layernorm normalizes: shared: each head, with one weight for all of them (Qwen 3); per_head: each "
        "head, with a weight of its own and no bias (Cohere, StableLM); all_heads: all heads together (OLMo 2).",
        default="shared",
    )
    qk_l2_norm: bool = architecture_switch(
        "Divide each head's queries and keys by their root mean square, without weights (Llama 4)."
    )
    attention_output_gate: bool = architecture_switch(
        "Multiply the result of self-attention by the sigmoid of a gate that is projected beside each head's queries "
        "(Qwen3-Next)."
    )
    clip_qkv: float | None = architecture_flag(
        "Clip queries, keys and values to at most this absolute value.", default=None, above=0
    )

    @property
    def has_qk_norms(self) -> bool:
        """Whether queries and keys are normalized in any way."""
        return self.qk_layernorm or self.qk_l2_norm
