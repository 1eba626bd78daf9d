"""Rules about the model and its number formats."""

from __future__ import annotations

from collections.abc import Collection

from megatron.config.attention_backends import WITHOUT_DROPOUT
from megatron.config.family import Rule
from megatron.config.flags import changed, flag_of, not_available, subject
from megatron.config.latent_attention import LatentAttentionConfig
from megatron.config.layer_patterns import window_layers
from megatron.config.model import LAYER_BIASES
from megatron.config.positions import ROTARY_TYPES
from megatron.config.rules.positions import beyond_positions
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import divisors, divisors_near, multiples_near, some
from megatron.config.run import RunConfig
from megatron.config.update_rules import COEFFICIENTS, MATRIX_RULES
from megatron.errors import ConfigError


def heads_divide_hidden_size(run: RunConfig) -> str | None:
    """Without an explicit head width, the heads share the hidden size evenly."""
    hidden, heads = run.model.hidden_size, run.model.num_attention_heads
    if (
        run.model.multi_latent_attention
        or hidden % heads == 0
        or run.given("kv_channels")
        or run.model.kv_channels != hidden // heads
    ):
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


def biases_have_one_name(run: RunConfig) -> str | None:
    """A model has one set of flags: biases in every layer are what runs without --disable-bias-linear have."""
    model = run.model
    if model.add_bias_linear or not all(getattr(model, each) for each in LAYER_BIASES):
        return None
    flags = " and ".join(map(flag_of, LAYER_BIASES))
    return f"--disable-bias-linear has no effect with {flags}; leave out all four for biases in every layer"


def fields_are_of_the_family(run: RunConfig) -> str | None:
    """Not every family has every part."""
    given = _typed(run, run.family.fields_of_others)
    return not_available(given, f"for {run.family.title}") if given else None


def windows_are_of_the_family(run: RunConfig) -> str | None:
    """A causal model sees nothing after a query, and not every family has windows."""
    window, sides = run.model.window_size, run.family.window_sides
    if window is None or sides == 2 or (sides == 1 and window[1] == 0):
        return None
    given = f"--window-size {window[0]},{window[1]}"
    if sides == 0:
        return f"{given} is not available for {run.family.title}; leave it out"
    return f"{given}: a query of {run.family.title} sees no later keys; use --window-size {window[0]},0"


def window_pattern_fits(run: RunConfig) -> str | None:
    """A pattern of layers is one, is as long as the stack, and leaves both kinds of layers."""
    pattern, layers = run.model.window_attn_skip_freq, run.model.num_layers
    try:
        windows = window_layers(pattern, layers)
    except ConfigError as error:
        return str(error)
    if pattern is None or (any(windows) and not all(windows)):
        return None
    if any(windows):
        return f"--window-attn-skip-freq {pattern} leaves a window in all of the {layers} layers; leave it out"
    return f"--window-attn-skip-freq {pattern} leaves no layer with a window; leave it and --window-size out"


def latent_settings_need_latent_attention(run: RunConfig) -> str | None:
    """Widths of latent attention need it."""
    if run.model.multi_latent_attention:
        return None
    given = [spec.spelling for spec in changed(run.model, LatentAttentionConfig)]
    return f"{subject(given, 'has', 'have')} no effect without --multi-latent-attention; add it" if given else None


def latent_attention_fits(run: RunConfig) -> str | None:
    """What other attention has and latent attention doesn't."""
    model = run.model
    if not model.multi_latent_attention:
        return None
    kind = model.position_embedding_type
    if kind not in (*ROTARY_TYPES, "none"):
        return (
            f"--position-embedding-type {kind} is not available with --multi-latent-attention; use "
            "--position-embedding-type rope, or yarn"
        )
    others = {
        "--group-query-attention": model.group_query_attention,
        "--qk-l2-norm": model.qk_l2_norm,
        "--attention-output-gate": model.attention_output_gate,
        f"--qk-layernorm-kind {model.qk_layernorm_kind}": model.qk_layernorm_kind != "shared",
        f"--clip-qkv {model.clip_qkv}": model.clip_qkv is not None,
    }
    named = [flag for flag, given in others.items() if given]
    return not_available(named, "with --multi-latent-attention") if named else None


def formats_need_the_precision_aware_optimizer(run: RunConfig) -> str | None:
    """Formats of what the optimizer keeps are asked for together with the optimizer that has them."""
    config = run.optimizer
    formats = {
        "--main-grads-dtype": run.precision.main_grads_dtype,
        "--exp-avg-dtype": config.exp_avg_dtype,
        "--exp-avg-sq-dtype": config.exp_avg_sq_dtype,
    }
    asked = [f"{name} {value}" for name, value in formats.items() if value != "fp32"]
    if config.use_precision_aware_optimizer or not asked:
        return None
    return f"{subject(asked, 'needs', 'need')} --use-precision-aware-optimizer; add it"


HAVE_MOMENTS = frozenset({"adam", "ademamix"})
"""Update rules with the moments whose formats flags give."""


def newton_schulz_steps(run: RunConfig) -> str | None:
    """Muon takes whole passes over its coefficients; the last of polar_express repeats."""
    config = run.optimizer
    kind, steps = config.muon_coefficient_type, config.muon_num_ns_steps
    passes = len(COEFFICIENTS[kind])
    if config.optimizer != "muon" or steps % passes == 0 or (kind == "polar_express" and steps > passes):
        return None
    fits = f"{passes} or more" if kind == "polar_express" else f"a multiple of {passes}"
    return (
        f"--muon-num-ns-steps {steps} does not fit --muon-coefficient-type {kind}, whose {passes} steps have a "
        f"coefficient each; give {fits}, or --muon-coefficient-type simple"
    )


def future_tokens_are_plainly_embedded(run: RunConfig) -> str | None:
    """The last stage embeds future tokens with copies of the tables alone."""
    given, later = _typed(run, ("embedding_norm", "word_embedding_size")), run.model.mtp_num_layers
    if not given or not later:
        return None
    return not_available(given, f"with --mtp-num-layers {later}")


def _typed(run: RunConfig, fields: Collection[str]) -> list[str]:
    """Flags of those fields of the model that aren't the defaults, with their values."""
    return [spec.typed(getattr(run.model, spec.field)) for spec in changed(run.model, fields=fields)]


RULES: tuple[Rule, ...] = (
    latent_settings_need_latent_attention,
    latent_attention_fits,
    rule(
        "--mtp-num-layers {run.model.mtp_num_layers} is not available with --position-embedding-type learned_absolute; "
        "use --position-embedding-type rope, or none",
        lambda run: run.model.mtp_num_layers and run.model.position_embedding_type == "learned_absolute",
    ),
    rule(
        "--mtp-num-layers {run.model.mtp_num_layers} is no less than --seq-length {run.data.seq_length}; "
        "use fewer layers",
        lambda run: run.model.mtp_num_layers >= run.data.seq_length,
    ),
    rule(
        "--activation-func-clamp-value {run.model.activation_func_clamp_value:g} has no effect with --activation "
        "{run.model.activation}, which has no gate; use a gated one, such as --quick-geglu",
        lambda run: run.model.activation_func_clamp_value is not None and not run.model.gated,
    ),
    rule(
        "--glu-linear-offset {run.model.glu_linear_offset:g} has no effect with --activation {run.model.activation}, "
        "which has no gate; use a gated one, such as --quick-geglu",
        lambda run: run.model.glu_linear_offset and not run.model.gated,
    ),
    rule(
        "--word-embedding-size {run.model.word_embedding_size} is the --hidden-size; leave it out",
        lambda run: run.model.word_embedding_size == run.model.hidden_size,
    ),
    future_tokens_are_plainly_embedded,
    fields_are_of_the_family,
    biases_have_one_name,
    windows_are_of_the_family,
    window_pattern_fits,
    rule(
        "--window-attn-skip-freq {run.model.window_attn_skip_freq} has no effect without --window-size; give both",
        lambda run: run.model.window_attn_skip_freq is not None and run.model.window_size is None,
    ),
    heads_divide_hidden_size,
    query_groups_divide_heads,
    rule(
        "--num-query-groups {run.model.num_query_groups} has no effect without --group-query-attention; "
        "give both or neither",
        lambda run: run.model.num_query_groups != run.model.num_attention_heads and not run.model.group_query_attention,
    ),
    rule(
        "--position-embedding-offset {run.model.position_embedding_offset} has no effect with "
        "--position-embedding-type {run.model.position_embedding_type}; use --position-embedding-type learned_absolute",
        lambda run: run.model.position_embedding_offset and run.model.position_embedding_type != "learned_absolute",
    ),
    lambda run: beyond_positions(run, "--seq-length", run.data.seq_length),
    rule(
        "--parallel-layernorm has no effect without --parallel-attention; give both",
        lambda run: run.model.parallel_layernorm and not run.model.parallel_attention,
    ),
    rule(
        "--parallel-layernorm has no effect with --norm-placement after, where no norm precedes the MLP; leave it out",
        lambda run: run.model.parallel_layernorm and run.model.norm_placement == "after",
    ),
    rule(
        "--parallel-attention and --apply-residual-connection-post-layernorm are mutually exclusive; keep one",
        lambda run: run.model.parallel_attention and run.model.apply_residual_connection_post_layernorm,
    ),
    rule(
        "--norm-placement {run.model.norm_placement} and --apply-residual-connection-post-layernorm are mutually "
        "exclusive; keep one",
        lambda run: run.model.norm_placement != "before" and run.model.apply_residual_connection_post_layernorm,
    ),
    rule(
        "--no-first-attention-norm has no effect with --norm-placement after; leave it out",
        lambda run: not run.model.first_attention_norm and run.model.norm_placement == "after",
    ),
    rule(
        "--norm-parameters weight has no effect with --normalization RMSNorm, which has no bias; leave it out",
        lambda run: run.model.norm_parameters == "weight" and run.model.normalization == "RMSNorm",
    ),
    rule(
        "--apply-layernorm-1p has no effect with --norm-parameters none; keep one",
        lambda run: run.model.apply_layernorm_1p and run.model.norm_parameters == "none",
    ),
    rule(
        "--qk-layernorm and --qk-l2-norm are mutually exclusive; keep one",
        lambda run: run.model.qk_layernorm and run.model.qk_l2_norm,
    ),
    rule(
        "--qk-layernorm-kind {run.model.qk_layernorm_kind} has no effect without --qk-layernorm; give both",
        lambda run: run.model.qk_layernorm_kind != "shared" and not run.model.qk_layernorm,
    ),
    rule(
        "--qk-layernorm-kind all_heads is not available with --normalization {run.model.normalization}; use "
        "--normalization RMSNorm, or another --qk-layernorm-kind",
        lambda run: run.model.qk_layernorm_kind == "all_heads" and run.model.normalization != "RMSNorm",
    ),
    rule(
        "--attention-backend {run.model.attention_backend} cannot be combined with --attention-dropout "
        "{run.model.attention_dropout:g}; use --attention-dropout 0, or --attention-backend auto",
        lambda run: run.model.attention_backend in WITHOUT_DROPOUT and run.model.attention_dropout,
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
        lambda run: (
            run.precision.grad_reduce_in_bf16
            and run.precision.main_grads_dtype == "fp32"
            and run.precision.accumulate_allreduce_grads_in_fp32
        ),
    ),
    rule(
        "--ddp-reduce-scatter-with-fp32-accumulation with gradients in bf16 needs --use-distributed-optimizer, which "
        "scatters them; give it, or leave --grad-reduce-in-bf16 out",
        lambda run: (
            run.parallel.ddp_reduce_scatter_with_fp32_accumulation
            and run.precision.grad_reduce_in_bf16
            and run.parallel.zero_stage == 0
        ),
    ),
    rule(
        "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 are mutually exclusive; keep one",
        lambda run: run.precision.main_grads_dtype == "bf16" and run.precision.accumulate_allreduce_grads_in_fp32,
    ),
    rule(
        "--main-grads-dtype bf16 needs --bf16; gradients of fp32 and fp16 weights are in fp32",
        lambda run: run.precision.main_grads_dtype == "bf16" and not run.precision.bf16,
    ),
    rule(
        "--use-precision-aware-optimizer is not available with --optimizer {run.optimizer.optimizer}; use --optimizer "
        "adam",
        lambda run: run.optimizer.use_precision_aware_optimizer and run.optimizer.scalar_rule not in HAVE_MOMENTS,
    ),
    newton_schulz_steps,
    rule(
        "--use-mup is not available with --optimizer {run.optimizer.optimizer}, whose matrices need other factors of "
        "the width; use --optimizer adam",
        lambda run: run.model.use_mup and run.optimizer.optimizer in MATRIX_RULES,
    ),
    rule(
        "--optimizer {run.optimizer.optimizer} orthogonalizes or factors matrices in a range of numbers that --fp16 "
        "gradients leave; use --bf16",
        lambda run: run.precision.fp16 and run.optimizer.optimizer in MATRIX_RULES,
    ),
    formats_need_the_precision_aware_optimizer,
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
