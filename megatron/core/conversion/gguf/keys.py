"""Types and bounds of the keys of GGUF files: whoever wrote a file, nothing is computed with a value that is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from megatron.core.conversion.bounds import Count, Factor, Heads, Layers, Small, Width
from megatron.errors import CheckpointError
from megatron.small_files import Between, check_kinds

_Id = Annotated[int, Between(-1, 1 << 32)]  # of a token; a number that no token has says that there is none
_Number = Annotated[float, Between(-1e12, 1e12)]
_Heads = Annotated[int, Between(0, 1 << 16)]
_Widths = Annotated[int, Between(0, 1 << 24)]
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("block_count", "decoder_block_count"), Layers),
    "attention.relative_buckets_count": Width,
    "decoder_start_token_id": _Id,
    **dict.fromkeys(("context_length", "vocab_size"), Count),
    "embedding_length": Width,
    "feed_forward_length": _Widths | list[int],  # a number for each layer where some have none
    "attention.head_count": _Heads,
    "attention.head_count_kv": _Heads | list[int],
    **dict.fromkeys(("ssm.conv_kernel", "ssm.time_step_rank", "ssm.group_count"), Heads),
    **dict.fromkeys(("ssm.inner_size", "ssm.state_size"), Width),
    "rope.scaling.finetuned": bool,
    "full_attention_interval": Annotated[int, Between(1, 1 << 17)],
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), Heads),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), Small),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "logit_scale"), _Number),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _Number),
    **dict.fromkeys(("embedding_scale", "residual_scale", "expert_weights_scale"), _Number),
    "attention.sliding_window": Annotated[int, Between(0, 1 << 32)],
    "attention.sliding_window_pattern": Annotated[int, Between(0, 100_000)] | list[bool],
    "use_parallel_residual": bool,
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor"), Factor),
    **dict.fromkeys(("rope.scaling.low_freq_factor", "rope.scaling.high_freq_factor"), Factor),
    **dict.fromkeys(("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.attn_factor"), Factor),
    "rope.scaling.original_context_length": Count,
    "rope.scaling.type": str,
    **dict.fromkeys(("expert_count", "expert_used_count"), Annotated[int, Between(0, 1 << 16)]),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), Annotated[int, Between(0, 1 << 16)]),
    "expert_feed_forward_length": Width,
    **dict.fromkeys(("attention.q_lora_rank", "attention.kv_lora_rank"), Heads),
    **dict.fromkeys(("expert_shared_count", "expert_gating_func"), Annotated[int, Between(0, 1 << 16)]),
    "leading_dense_block_count": Annotated[int, Between(0, 100_000)],
    "expert_weights_norm": bool,
    "rope.scaling.yarn_log_multiplier": Factor,
    "expert_shared_feed_forward_length": Annotated[int, Between(0, 1 << 24)],
    "tokenizer.chat_template": str,
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), str),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), list[str]),
    **dict.fromkeys(("tokenizer.ggml.token_type", "tokenizer.ggml.precompiled_charsmap"), list[int]),
    "tokenizer.ggml.scores": list[float],
    **{f"tokenizer.ggml.{each}_token_id": _Id for each in ("bos", "eos", "eot", "eom", "unknown", "padding")},
    **{f"tokenizer.ggml.add_{each}": bool for each in ("bos_token", "eos_token", "space_prefix")},
    "tokenizer.ggml.remove_extra_whitespaces": bool,
}
"""What files say of models, by keys without their architecture's name in front."""


def check_keys(keys: Mapping[str, Any], *, where: str) -> None:
    """Raise CheckpointError for a key of another type than readers know, or out of bounds. ``where``: the file."""
    check_kinds(keys, _KINDS, where=f"{where}: its keys", error=CheckpointError)
