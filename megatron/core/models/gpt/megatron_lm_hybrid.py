"""Hybrids in checkpoints of Megatron-LM: their pattern of layers, and the sizes of Mamba-2."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from megatron.config.flags import plural_s
from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import EXPERTS, MAMBA, allocated, read_pattern
from megatron.config.layer_patterns import shortest_pattern
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion.bounds import Heads, Width
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.errors import CheckpointError, ConfigError
from megatron.small_files import Between

KINDS: dict[str, Any] = {
    **dict.fromkeys(("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern"), str),
    **dict.fromkeys(("hybrid_attention_ratio", "hybrid_mlp_ratio"), Annotated[float, Between(0, 1)]),
    **dict.fromkeys(("mamba_state_dim", "mamba_head_dim"), Width),
    **dict.fromkeys(("mamba_num_groups", "mamba_num_heads"), Heads),
}
"""Types of the saved arguments of hybrids."""

_SIZES = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
_EPSILON = 1e-5  # of the gated norm there, whatever norm_epsilon says
_SPEC = ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")
_WITH_MIXERS = ".mixer."


def _pattern_in(args: Arguments) -> str | None:
    """The pattern, with the layers of multi-token prediction that earlier releases have in an argument of its own."""
    given: str | None = args("hybrid_layer_pattern", args("hybrid_override_pattern", None))
    depths, later = args("mtp_num_layers", 0), args("mtp_hybrid_override_pattern", "")
    return given if not given or "/" in given or not later else "/".join((given, *[later] * depths))


def depth_size(args: Arguments) -> int:
    """Layers of each depth of a hybrid; 0 for other models."""
    return len((_pattern_in(args) or "").partition("/")[2].partition("/")[0])


def hybrid_from_arguments(
    args: Arguments, model: ModelConfig, stored: Collection[str]
) -> tuple[HybridConfig, MambaConfig]:
    """Pattern and sizes, or none of a model that is no hybrid. Tensors alone tell that one is a hybrid
    which was trained without pattern and ratios.

    Raises CheckpointError for a pattern that is not one of the model's layers.
    """
    given = _pattern_in(args)
    shares = {"attention": args("hybrid_attention_ratio", 0.0), "mlp": args("hybrid_mlp_ratio", 0.0)}
    if not (given or any(shares.values()) or any(_WITH_MIXERS in name for name in stored)):
        return HybridConfig(), MambaConfig()
    try:
        pattern = read_pattern(given or allocated(model.num_layers, **shares))
    except ConfigError as error:
        raise CheckpointError(f"{args.where}: its saved settings: {error}") from None
    if len(pattern.layers) != model.num_layers:
        said = f"a pattern of {len(pattern.layers)} layers ({pattern.layers}), and num_layers {model.num_layers}"
        raise CheckpointError(f"{args.where}: its saved settings say {said}")
    if len(pattern.depths) != model.mtp_num_layers:
        depths = f"{len(pattern.depths)} depth{plural_s(len(pattern.depths))} of multi-token prediction"
        said = f"a pattern with {depths}, and mtp_num_layers {model.mtp_num_layers}"
        raise CheckpointError(f"{args.where}: its saved settings say {said}")
    hybrid = HybridConfig(hybrid_layer_pattern=pattern.written(model.mtp_num_layers))
    if MAMBA in hybrid.all_letters and model.norm_epsilon != _EPSILON:
        raise CheckpointError(
            f"{args.where} is a model with norm_epsilon = {model.norm_epsilon:g}, which Megatron-LM's Mamba-2 layers "
            f"have in one of their norms and {_EPSILON:g} in the other; here both have the same"
        )
    found = {name: value for name in _SIZES if (value := args(name, None)) is not None}
    return hybrid, MambaConfig(**found).resolved(model, (model.num_layers,))


def experts_of_pattern(hybrid: HybridConfig) -> str:
    """``moe_layer_freq`` of a hybrid, which says nothing where only depths of multi-token prediction have experts."""
    marked = tuple(letter == EXPERTS for letter in hybrid.letters)
    return shortest_pattern(marked) if any(marked) else MoEConfig().moe_layer_freq


def unsupported(model: ModelConfig, groups: Sequence[object]) -> dict[str, bool]:
    """What no hybrid of Megatron-LM's has, and whether this one has it."""
    hybrid, mamba = HybridConfig.among(groups), MambaConfig.among(groups)
    has_mamba = MAMBA in hybrid.all_letters
    return {
        "no limits of the time step (--mamba-time-step-limits, or a Nemotron-H's time_step_min)": has_mamba
        and mamba.mamba_time_step_limits is not None,
        "no convolution of Mamba-2 over other than 4 tokens (--mamba-conv-kernel-dim)": (
            has_mamba and mamba.mamba_conv_kernel_dim != 4
        ),
        f"an epsilon of {_EPSILON:g} in the gated norm of Mamba-2 (--norm-epsilon)": (
            has_mamba and model.norm_epsilon != _EPSILON
        ),
    }


def hybrid_arguments(model: ModelConfig, groups: Sequence[object]) -> dict[str, Any]:
    """The arguments of a hybrid; none for other models."""
    hybrid, mamba = HybridConfig.among(groups), MambaConfig.among(groups)
    if not hybrid.is_hybrid:
        return {}
    return {
        **{name: getattr(mamba, name) for name in _SIZES},
        "mamba_num_heads": mamba.num_heads(model),
        "hybrid_override_pattern": hybrid.hybrid_layer_pattern,
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "is_hybrid_model": True,
        "spec": list(_SPEC),
    }
