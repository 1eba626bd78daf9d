"""The settings in a Megatron-LM checkpoint: a namespace of its flags, checked and read by name."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from megatron.core.conversion.bounds import KINDS, Count, Factor, Heads, Small
from megatron.core.conversion.megatron_lm.known_arguments import without
from megatron.errors import CheckpointError
from megatron.small_files import Between, check_kinds

_ABSENT = object()
# What the newest releases call a flag.
_TODAY = {"apply_layernorm_1p": "layernorm_zero_centered_gamma", "norm_epsilon": "layernorm_epsilon"}
_KINDS: dict[str, Any] = {
    **KINDS,
    **dict.fromkeys(("seq_length", "padded_vocab_size"), Count),
    "layernorm_epsilon": Small,
    **dict.fromkeys(("tokenizer_type", "tiktoken_pattern", "vocab_file", "merge_file", "tokenizer_model"), str),
    **dict.fromkeys(("vocab_extra_ids", "tiktoken_num_special_tokens"), Annotated[int, Between(0, 1 << 24)]),
    "softmax_type": Literal["vanilla", "off-by-one", "learnable"],
    "softmax_scale": Factor,
    "quick_geglu": bool,
    "activation_func_clamp_value": Factor,
    "glu_linear_offset": Annotated[float, Between(-1e12, 1e12)],
    **dict.fromkeys(("yarn_rotary_scaling_factor", "yarn_beta_fast", "yarn_beta_slow"), Factor),
    **dict.fromkeys(("yarn_mscale", "yarn_mscale_all_dim"), Annotated[float, Between(0, 1e12)]),
    "yarn_original_max_position_embeddings": Count,
    "yarn_correction_range_round_to_int": bool,
    **dict.fromkeys(("beta_fast", "beta_slow", "rotary_scaling_factor"), Factor),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Annotated[float, Between(0, 1e12)]),
    "original_max_position_embeddings": Count,
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), Heads),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), Heads),
    "multi_latent_attention": bool,
}


class Arguments:
    """A saved namespace, read with the defaults of the version that lacked a flag.

    ``ignored``: arguments that are read as if they weren't there.
    """

    def __init__(self, saved: Any, where: str, ignored: Collection[str] = ()) -> None:
        if not isinstance(saved, Namespace):
            raise CheckpointError(
                f"{where} holds no settings ('args'), so its architecture is unknown: convert a checkpoint that "
                "Megatron-LM's training saved"
            )
        self.values, self.where = without(vars(saved), ignored, where=where), where
        self.check_kinds(_KINDS)

    def check_kinds(self, kinds: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a value of another type than ``kinds`` say, or out of their bounds."""
        check_kinds(self.values, kinds, where=f"{self.where}: its saved settings", error=CheckpointError)

    def __call__(self, name: str, default: Any = _ABSENT) -> Any:
        """The value of a flag, or ``default`` where it is not there or None; CheckpointError without a default."""
        value = self.values.get(name, self.values.get(_TODAY.get(name, "")))
        if value is not None:
            return value
        if default is _ABSENT:
            raise CheckpointError(f"{self.where}: its saved settings lack {name}")
        return default
