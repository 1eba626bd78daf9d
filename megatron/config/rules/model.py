"""Rules about the model and its number formats."""

from __future__ import annotations

from megatron.config.flags import one_of
from megatron.config.rules.sizes import divisors, divisors_near, multiples_near, some
from megatron.config.run import RunConfig


def heads_divide_hidden_size(run: RunConfig) -> str | None:
    """Without an explicit head width, the heads share the hidden size evenly."""
    hidden, heads = run.model.hidden_size, run.model.num_attention_heads
    if hidden % heads == 0 or run.given("kv_channels") or run.model.kv_channels != hidden // heads:
        return None
    return (
        f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; use a width of "
        f"{multiples_near(hidden, heads)}, or {divisors_near(hidden, heads)} heads, or give --kv-channels"
    )


def query_groups_divide_heads(run: RunConfig) -> str | None:
    """Every key/value head serves equally many query heads."""
    heads, groups = run.model.num_attention_heads, run.model.num_query_groups
    if heads % groups == 0:
        return None
    return (
        f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}; groups that fit: "
        f"{some(divisors(heads), near=groups)}"
    )


def query_groups_need_grouped_attention(run: RunConfig) -> str | None:
    """--num-query-groups needs --group-query-attention."""
    model = run.model
    if model.group_query_attention or model.num_query_groups == model.num_attention_heads:
        return None
    return (
        f"--num-query-groups {model.num_query_groups} has no effect without --group-query-attention; "
        "give both or neither"
    )


def sequence_fits_positions(run: RunConfig) -> str | None:
    """--seq-length is at most --max-position-embeddings."""
    length, most = run.data.seq_length, run.model.max_position_embeddings
    if length <= most:
        return None
    return (
        f"--seq-length {length} is longer than --max-position-embeddings {most}; "
        f"use --max-position-embeddings {length} or a --seq-length of at most {most}"
    )


def rotated_width_is_even(run: RunConfig) -> str | None:
    """Rotary positions turn pairs of channels."""
    model = run.model
    rotated = int(model.kv_channels * model.rotary_percent)
    if model.position_embedding_type != "rope" or (rotated > 0 and rotated % 2 == 0):
        return None
    return (
        f"--rotary-percent {model.rotary_percent:g} of --kv-channels {model.kv_channels} rotates {rotated} channels; "
        "their number must be even and more than 0"
    )


def rotary_settings_need_rope(run: RunConfig) -> str | None:
    """Settings of rotary positions need rotary positions."""
    model = run.model
    asked = {
        "--rotary-percent": model.rotary_percent != 1.0,
        "--rotary-base": model.rotary_base != 10000.0,
        "--rotary-interleaved": model.rotary_interleaved,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
        "--use-rope-scaling": model.use_rope_scaling,
    }
    named = [flag for flag, given in asked.items() if given]
    if model.position_embedding_type == "rope" or not named:
        return None
    return (
        f"{' and '.join(named)} {'has' if len(named) == 1 else 'have'} no effect with --position-embedding-type "
        f"{model.position_embedding_type}; use --position-embedding-type rope"
    )


def one_rotary_scaling(run: RunConfig) -> str | None:
    """Rotary positions are scaled in one way."""
    if run.model.use_rope_scaling and run.model.rotary_seq_len_interpolation_factor is not None:
        return "--use-rope-scaling and --rotary-seq-len-interpolation-factor are mutually exclusive; keep one"
    return None


def scaling_factor_needs_scaling(run: RunConfig) -> str | None:
    """--rope-scaling-factor needs --use-rope-scaling."""
    if run.model.use_rope_scaling or run.model.rope_scaling_factor == 8.0:
        return None
    return (
        f"--rope-scaling-factor {run.model.rope_scaling_factor:g} has no effect without --use-rope-scaling; give both"
    )


def attention_kernel_draws_no_dropout(run: RunConfig) -> str | None:
    """The fused kernels draw dropout from a generator that cannot be replayed, so they are not used with it."""
    drop = run.model.attention_dropout
    if run.model.attention_backend != "sdpa" or drop == 0:
        return None
    return (
        f"--attention-backend sdpa cannot be combined with --attention-dropout {drop:g}; "
        "use --attention-dropout 0, or --attention-backend auto"
    )


def one_precision(run: RunConfig) -> str | None:
    """Weights have one format."""
    if run.precision.fp16 and run.precision.bf16:
        return "--fp16 and --bf16 are mutually exclusive; keep one"
    return None


def bf16_reduction_needs_bf16(run: RunConfig) -> str | None:
    """Gradients in bf16 come from weights in bf16."""
    if run.precision.grad_reduce_in_bf16 and not run.precision.bf16:
        return "--grad-reduce-in-bf16 needs --bf16"
    return None


def one_gradient_format(run: RunConfig) -> str | None:
    """Gradients are accumulated in one format."""
    if run.precision.grad_reduce_in_bf16 and run.precision.accumulate_allreduce_grads_in_fp32:
        return "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 are mutually exclusive; keep one"
    return None


def fp32_residual_needs_half_precision(run: RunConfig) -> str | None:
    """--fp32-residual-connection needs a model in 16 bits."""
    if run.model.fp32_residual_connection and run.precision.params_dtype == "fp32":
        return "--fp32-residual-connection needs --bf16 or --fp16; without them everything is in fp32"
    return None


def loss_scales_are_ordered(run: RunConfig) -> str | None:
    """--initial-loss-scale is at least --min-loss-scale."""
    first, least = run.precision.initial_loss_scale, run.precision.min_loss_scale
    if first >= least:
        return None
    return f"--initial-loss-scale {first:g} is less than --min-loss-scale {least:g}; start at {least:g} or more"


def positions_are_of_the_family(run: RunConfig) -> str | None:
    """Not every family has every type of position embedding."""
    kind, known = run.model.position_embedding_type, run.family.position_embedding_types
    if kind in known:
        return None
    return f"--position-embedding-type {kind} is not available for {run.family.title}; use {one_of(known)}"


RULES = (
    positions_are_of_the_family,
    heads_divide_hidden_size,
    query_groups_divide_heads,
    query_groups_need_grouped_attention,
    sequence_fits_positions,
    rotated_width_is_even,
    rotary_settings_need_rope,
    one_rotary_scaling,
    scaling_factor_needs_scaling,
    attention_kernel_draws_no_dropout,
    one_precision,
    bf16_reduction_needs_bf16,
    one_gradient_format,
    fp32_residual_needs_half_precision,
    loss_scales_are_ordered,
)
