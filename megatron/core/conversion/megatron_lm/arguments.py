"""The settings in Megatron-LM's checkpoints, a namespace of its flags, and our architecture, each from the other."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args

from megatron.config.activation import Activation
from megatron.config.family import FamilyConfig
from megatron.config.flags import flags_of
from megatron.config.model import LAYER_BIASES, ModelConfig
from megatron.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.core.conversion.megatron_lm import layer_arguments
from megatron.core.conversion.megatron_lm.known_arguments import LATEST, OF_QUICK_GEGLU, limits, refuse
from megatron.core.conversion.megatron_lm.layer_arguments import (
    YARN,
    changed_rotary,
    read_attention,
    read_latents,
    read_mlp,
    read_yarn,
    refused_latents,
    refused_windows,
    unsupported_latents,
    written_attention,
    written_latents,
    written_mlp,
    written_yarn,
)
from megatron.core.conversion.megatron_lm.saved_arguments import Arguments
from megatron.core.conversion.portable import PortableModel
from megatron.errors import CheckpointError, ConfigError, enumeration

_POSITIONS = ("learned_absolute", "rope", "yarn", "relative", "none")
# Arguments that have the name and the meaning of a field of ours; and those that the files leave open or say otherwise.
_SAME = (
    *("kv_channels", "rotary_percent", "rotary_base", "rotary_interleaved", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rope_scaling_factor", "normalization", "norm_epsilon", "apply_layernorm_1p"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights"),
    *("attention_dropout", "hidden_dropout", "init_method_std", "make_vocab_size_divisible_by"),
)
_COMPUTED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention"),
    *("num_query_groups", "max_position_embeddings", "position_embedding_type"),
)
_BY_CODE = (
    *("activation", "apply_residual_connection_post_layernorm", "vocab_size"),
    *LAYER_BIASES,
    *OF_QUICK_GEGLU,
    *layer_arguments.FIELDS,
    *layer_arguments.LATENTS,
    "mtp_num_layers",
    *YARN,
)
_DEFAULTS = {
    each.name: each.default
    for each in dataclasses.fields(ModelConfig)
    if each.name in _SAME and isinstance(each.default, (bool, float))
}


def check_is_known(args: Arguments, family: type[FamilyConfig], *, has_latest_layers: bool = True) -> None:
    """Raise CheckpointError for arguments that are unknown here, or have a value that isn't available here.

    ``has_latest_layers``: see ``MegatronLMFormat``.
    """
    limited, positions = limits(args.values), args("position_embedding_type", "learned_absolute")
    theirs = [each for each in _POSITIONS if has_latest_layers or each != "yarn"]
    converted = [each for each in family.position_embedding_types if each in theirs]
    if positions not in converted:
        known = ", ".join(converted)
        limited.append(f"positions of type {positions!r} in a {family.title} (it converts with {known})")
    elif positions == "yarn" and (changed := changed_rotary(args)):
        limited.append(f"YaRN beside {enumeration(changed)}")
    limited += refused_latents(args)
    limited += refused_windows(args, family)
    if not has_latest_layers:
        limited += [
            f"{what} in a {family.title} ({name} = {args(name)})" for name, what in LATEST.items() if args(name, 0)
        ]
        norms = [name for name in ("qk_layernorm", "qk_l2_norm") if args(name, False)]
        limited += [f"norms of queries and keys in a {family.title} ({name} = True)" for name in norms]
    refuse(args.where, limited, args.values)


def model_from_arguments(args: Arguments, *, vocab_size: int, num_layers: int, legacy: bool) -> ModelConfig:
    """The architecture that the settings describe. ``legacy``: to a model from before core."""
    heads = args("num_attention_heads")
    groups = args("num_query_groups", heads) if args("group_query_attention", False) else heads
    positions = args("position_embedding_type", "learned_absolute")
    if args("use_rotary_position_embeddings", False):
        positions = "rope"
    elif not args("add_position_embedding", True) and positions == "learned_absolute":
        positions = "none"
    hidden = args("hidden_size")
    found = {name: value for name in _SAME if (value := args(name, None)) is not None}
    found |= {name: type(default)(found[name]) for name, default in _DEFAULTS.items() if name in found}
    if not found.get("use_rope_scaling"):
        found.pop("rope_scaling_factor", None)
    if depths := args("mtp_num_layers", 0):
        found |= {"mtp_num_layers": depths, "mtp_loss_scaling_factor": args("mtp_loss_scaling_factor", 0.1)}
    found |= {**read_yarn(args), **read_attention(args, num_layers=num_layers), **read_mlp(args)}
    found |= {"position_embedding_type": positions, **read_latents(args)}
    return ModelConfig(
        **found,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=args("ffn_hidden_size", 4 * hidden),
        num_attention_heads=heads,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        max_position_embeddings=args("max_position_embeddings"),
        apply_residual_connection_post_layernorm=has_residual_behind_norm(args, legacy=legacy),
        activation=_activation(args, legacy=legacy),
        vocab_size=vocab_size,
    )


def has_residual_behind_norm(args: Arguments, *, legacy: bool) -> bool:
    """Core ignores the flag."""
    return legacy and bool(args("apply_residual_connection_post_layernorm", False))


def _activation(args: Arguments, *, legacy: bool) -> Activation:
    if args("quick_geglu", False):
        return "quick_geglu"
    if args("swiglu", False):
        return "swiglu"
    if args("squared_relu", False):
        return "squared_relu"
    return "gelu" if is_exact_gelu(args, legacy=legacy) else "gelu_tanh"


def is_exact_gelu(args: Arguments, *, legacy: bool) -> bool:
    """Megatron-LM's GELU is the tanh approximation inside the kernel that also adds the bias, and exact outside it.

    Core ignores openai_gelu.
    """
    fused = args("bias_gelu_fusion", True) and args("add_bias_linear", True)
    return not (fused or (legacy and args("openai_gelu", False)))


def tokenizer_from_arguments(args: Arguments, *, rows: int) -> TokenizerConfig:
    """The tokenizer that training used; one that uses ids as numbers for an unknown kind.

    ``rows``: of the padded vocabulary.
    """
    kind = args("tokenizer_type", "NullTokenizer")
    if kind not in get_args(TokenizerType) or kind == "NullTokenizer":
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=args("vocab_size", rows - 1))
    try:
        return TokenizerConfig(
            tokenizer_type=kind,
            vocab_file=args("vocab_file", None),
            merge_file=args("merge_file", None),
            tokenizer_model=args("tokenizer_model", None),
            vocab_size=args("vocab_size", None),
            vocab_extra_ids=args("vocab_extra_ids", 0),
            tiktoken_pattern=args("tiktoken_pattern", None),
            tiktoken_num_special_tokens=args("tiktoken_num_special_tokens", 1000),
            tiktoken_special_tokens=tuple(args("tiktoken_special_tokens", ())),
        )
    except ConfigError:
        return TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=rows - 1)


def _unknown_there(model: ModelConfig) -> dict[str, bool]:
    """What no model of Megatron-LM's has, and whether this one has it."""
    changed = changed_rotary(partial(getattr, model))
    llama3 = (model.rope_low_freq_factor, model.rope_high_freq_factor, model.original_max_position_embeddings)
    found = {
        f"no positions of type {model.position_embedding_type}": model.position_embedding_type not in _POSITIONS,
        f"no YaRN beside {', '.join(changed)}": (
            model.position_embedding_type == "yarn" and not model.multi_latent_attention and bool(changed)
        ),
        "Llama 3.1's scaling of rotary positions only (factors 1 and 4, original length 8192)": (
            model.use_rope_scaling and llama3 != (1.0, 4.0, 8192)
        ),
        "no flag for an MLP gated by GELU (--geglu)": model.activation in ("geglu", "geglu_tanh"),
        "no clamped MLP and no offset but in --quick-geglu": model.activation != "quick_geglu"
        and any(getattr(model, name) for name in OF_QUICK_GEGLU),
        "no flag for ReLU (--relu)": model.activation == "relu",
        "no flag for GELU by a sigmoid (--activation quick_gelu)": model.activation == "quick_gelu",
        "no flag for biases in some of the layers (--add-attention-output-bias, --add-mlp-bias)": (
            not model.add_bias_linear and (model.add_attention_output_bias or model.add_mlp_bias)
        ),
        "no tanh approximation of GELU in layers without biases (--exact-gelu is not given)": (
            model.activation == "gelu_tanh" and not model.add_bias_linear
        ),
    }
    converted = {*_SAME, *_COMPUTED, *_BY_CODE}
    return found | {
        f"no argument for {spec.typed(value)}": True
        for spec in flags_of(ModelConfig)
        if spec.options.architecture
        and spec.field not in converted
        and (value := getattr(model, spec.field)) != spec.default
    }


def arguments_of(
    portable: PortableModel, *, dist: bool, own: Mapping[str, Any], unsupported: Mapping[str, bool]
) -> Namespace:
    """The namespace that Megatron-LM's ``--use-checkpoint-args`` reads; CheckpointError for what it doesn't have.

    ``own``, ``unsupported``: of the model's family, see ``MegatronLMFormat``.
    """
    model, tokenizer = portable.model, portable.tokenizer
    for what, asked in {**_unknown_there(model), **unsupported_latents(model), **unsupported}.items():
        if asked:
            raise CheckpointError(f"Megatron-LM has {what}, so this model can't be written for it")
    if model.apply_residual_connection_post_layernorm:
        raise CheckpointError(
            "Megatron-LM's core ignores --apply-residual-connection-post-layernorm, so such a model can't be written "
            "for it"
        )
    rope = (
        model.position_embedding_type == "rope" or model.multi_latent_attention
    )  # their use_rotary_position_embeddings is another word for this
    found: dict[str, Any] = {
        **{name: getattr(model, name) for name in (*_COMPUTED, *_SAME)},
        "rotary_base": int(model.rotary_base) if model.rotary_base.is_integer() else model.rotary_base,
        **written_attention(model),
        **written_mlp(model),
        **written_yarn(model),
        **written_latents(model),
        "mtp_num_layers": model.mtp_num_layers or None,
        "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
        **own,
    }
    return Namespace(
        **found,
        use_rotary_position_embeddings=rope,
        add_position_embedding=not rope,
        swiglu=model.activation == "swiglu",
        squared_relu=model.activation == "squared_relu",
        bias_gelu_fusion=model.activation == "gelu_tanh",
        openai_gelu=False,
        seq_length=portable.seq_length,
        vocab_size=model.vocab_size if tokenizer.tokenizer_type != "NullTokenizer" else tokenizer.vocab_size,
        padded_vocab_size=model.padded_vocab_size(1),
        tokenizer_type=tokenizer.tokenizer_type,
        tokenizer_model=tokenizer.tokenizer_model,
        vocab_file=tokenizer.vocab_file,
        merge_file=tokenizer.merge_file,
        vocab_extra_ids=tokenizer.vocab_extra_ids,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        params_dtype=portable.dtype,
        iteration=portable.iteration,
        consumed_train_samples=portable.consumed_samples,
        consumed_valid_samples=0,
        use_legacy_models=False,
        use_mcore_models=True,
        ckpt_format="torch_dist" if dist else "torch",
    )
