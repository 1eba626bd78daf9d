"""Rules about the model and its number formats."""

from __future__ import annotations

from megatron.config.family import Rule, rule
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


def positions_are_of_the_family(run: RunConfig) -> str | None:
    """Not every family has every type of position embedding."""
    kind, known = run.model.position_embedding_type, run.family.position_embedding_types
    if kind in known:
        return None
    return f"--position-embedding-type {kind} is not available for {run.family.title}; use {one_of(known)}"


RULES: tuple[Rule, ...] = (
    positions_are_of_the_family,
    heads_divide_hidden_size,
    query_groups_divide_heads,
    rule(
        "--num-query-groups {run.model.num_query_groups} has no effect without --group-query-attention; "
        "give both or neither",
        lambda run: run.model.num_query_groups != run.model.num_attention_heads and not run.model.group_query_attention,
    ),
    rule(
        "--seq-length {run.data.seq_length} is longer than --max-position-embeddings "
        "{run.model.max_position_embeddings}; use --max-position-embeddings {run.data.seq_length} or a --seq-length "
        "of at most {run.model.max_position_embeddings}",
        lambda run: run.data.seq_length > run.model.max_position_embeddings,
    ),
    rotated_width_is_even,
    rotary_settings_need_rope,
    rule(
        "--use-rope-scaling and --rotary-seq-len-interpolation-factor are mutually exclusive; keep one",
        lambda run: run.model.use_rope_scaling and run.model.rotary_seq_len_interpolation_factor is not None,
    ),
    rule(
        "--rope-scaling-factor {run.model.rope_scaling_factor:g} has no effect without --use-rope-scaling; give both",
        lambda run: run.model.rope_scaling_factor != 8.0 and not run.model.use_rope_scaling,
    ),
    rule(  # its kernels draw dropout from a generator that cannot be replayed
        "--attention-backend sdpa cannot be combined with --attention-dropout {run.model.attention_dropout:g}; "
        "use --attention-dropout 0, or --attention-backend auto",
        lambda run: run.model.attention_backend == "sdpa" and run.model.attention_dropout,
    ),
    rule(
        "--fp16 and --bf16 are mutually exclusive; keep one",
        lambda run: run.precision.fp16 and run.precision.bf16,
    ),
    rule(
        "--grad-reduce-in-bf16 needs --bf16",
        lambda run: run.precision.grad_reduce_in_bf16 and not run.precision.bf16,
    ),
    rule(
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 are mutually exclusive; keep one",
        lambda run: run.precision.grad_reduce_in_bf16 and run.precision.accumulate_allreduce_grads_in_fp32,
    ),
    rule(
        "--fp32-residual-connection needs --bf16 or --fp16; without them everything is in fp32",
        lambda run: run.model.fp32_residual_connection and run.precision.params_dtype == "fp32",
    ),
    rule(
        "--initial-loss-scale {run.precision.initial_loss_scale:g} is less than --min-loss-scale "
        "{run.precision.min_loss_scale:g}; start at {run.precision.min_loss_scale:g} or more",
        lambda run: run.precision.initial_loss_scale < run.precision.min_loss_scale,
    ),
)
