"""Rules about position embeddings."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.family import Rule
from megatron.config.flags import FlagSpec, changed, flags_of, one_of, subject
from megatron.config.layer_patterns import marked_layers
from megatron.config.model import ModelConfig
from megatron.config.positions import ROTARY_FIELDS
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

OF_YARN = frozenset(field for field, types in ROTARY_FIELDS.items() if "yarn" in types and "rope" not in types)
"""Settings of YaRN, which have no effect on latent attention without a factor, as in Megatron-LM."""
_OF_LLAMA3 = ("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor")


def positions_are_of_the_family(run: RunConfig) -> str | None:
    """Not every family has every type of position embedding."""
    kind, known = run.model.position_embedding_type, run.family.position_embedding_types
    if kind in known:
        return None
    return f"--position-embedding-type {kind} is not available for {run.family.title}; use {one_of(known)}"


def beyond_positions(run: RunConfig, flag: str, length: int) -> str | None:
    """What is wrong with a sequence of the ``length`` of ``flag``; a table of learned positions can't become longer."""
    most, source = run.model.max_position_embeddings, run.checkpoint.load_hf
    if length <= most:
        return None
    said, shorter = f"{flag} {length} is longer than --max-position-embeddings {most}", f"a {flag} of at most {most}"
    if source is not None and run.model.position_embedding_type == "learned_absolute":
        return f"{said}; use {shorter}: the learned positions of {source} cannot be extended"
    return f"{said}; use --max-position-embeddings {length} or {shorter}"


def rotated_channels(model: ModelConfig) -> str | None:
    """What is wrong with the channels that rotary positions turn in pairs, or with LongRoPE's factors of them."""
    short, long, pairs = len(model.longrope_short_factors), len(model.longrope_long_factors), model.rotary_width // 2
    if model.position_embedding_type == "longrope" and not short == long == pairs:
        return (
            f"--longrope-short-factors has {short} numbers and --longrope-long-factors {long}; give {pairs} each, one "
            "for each pair of rotated channels"
        )
    excluded = 2 if model.position_embedding_type == "dynamic_ntk" else 0  # its exponent is width / (width - 2)
    if not model.is_rotary or (model.rotary_width > excluded and model.rotary_width % 2 == 0):
        return None
    flag = "--qk-pos-emb-head-dim" if model.multi_latent_attention else "--kv-channels"
    return (
        f"--rotary-percent {model.rotary_percent:g} of {flag} {model.positional_width} rotates {model.rotary_width} "
        f"channels; their number must be even and more than {excluded}"
    )


def rotary_settings_have_an_effect(run: RunConfig) -> str | None:
    """Settings of rotary positions need positions of a type that has them."""
    model, kind = run.model, run.model.position_embedding_type
    named = [
        spec
        for spec in flags_of(ModelConfig)
        if kind not in ROTARY_FIELDS.get(spec.field, (kind,))
        and getattr(model, spec.field) != spec.default
        and not (spec.field == "original_max_position_embeddings" and model.use_rope_scaling)
        and not (spec.field in OF_YARN and model.multi_latent_attention and model.rotary_scaling_factor == 1)
    ]
    if not named:
        return None
    wanted = min((ROTARY_FIELDS[spec.field] for spec in named), key=len)[0]
    return f"{_no_effect(named)} with --position-embedding-type {kind}; use --position-embedding-type {wanted}"


def llama3_settings_need_scaling(run: RunConfig) -> str | None:
    """Settings of --use-rope-scaling need it."""
    model, named = run.model, changed(run.model, fields=_OF_LLAMA3)
    if model.use_rope_scaling or model.position_embedding_type != "rope" or not named:
        return None
    return f"{_no_effect(named)} without --use-rope-scaling; give both"


def _no_effect(specs: Sequence[FlagSpec]) -> str:
    return f"{subject([spec.spelling for spec in specs], 'has', 'have')} no effect"


def rope_type_is_of_latent_attention(run: RunConfig) -> str | None:
    """--rope-type is for latent attention, and does not contradict --position-embedding-type."""
    asked, kind = run.model.rope_type, run.model.position_embedding_type
    if asked == "yarn" and not run.model.multi_latent_attention and kind != "yarn":
        return "--rope-type yarn is for --multi-latent-attention; use --position-embedding-type yarn"
    if asked is None or kind in (asked, "rope") or not run.model.multi_latent_attention:
        return None
    return f"--rope-type {asked} and --position-embedding-type {kind} contradict each other; leave --rope-type out"


def scaling_is_complete(run: RunConfig) -> str | None:
    """Every kind of scaling starts from the length that the model was trained on, and goes to a multiple of it."""
    model, kind = run.model, run.model.position_embedding_type
    if kind not in ROTARY_FIELDS["rotary_scaling_factor"]:
        return None
    missing = ["--original-max-position-embeddings"] * (model.original_max_position_embeddings is None)
    missing += ["--rotary-scaling-factor"] * (
        model.rotary_scaling_factor == 1 and not run.given("rotary_scaling_factor")
    )
    if not missing:
        return None
    return (
        f"--position-embedding-type {kind} needs {' and '.join(missing)}, as in "
        "--original-max-position-embeddings 4096 --rotary-scaling-factor 8 for sequences of 32768"
    )


def no_rope_pattern_fits(run: RunConfig) -> str | None:
    """A pattern of layers is one, is as long as the stack, and marks some layers."""
    pattern, layers = run.model.no_rope_freq, run.model.num_layers
    if pattern is None:
        return None
    try:
        marked = marked_layers(pattern, layers, flag="--no-rope-freq")
    except ConfigError as error:
        return str(error)
    return None if any(marked) else f"--no-rope-freq {pattern} marks none of the {layers} layers; leave it out"


RULES: tuple[Rule, ...] = (
    no_rope_pattern_fits,
    rule(
        "--rotary-base-local has no effect without --window-size; give both",
        lambda run: run.model.rotary_base_local is not None and run.model.window_size is None,
    ),
    positions_are_of_the_family,
    rule(
        "--scale-alibi has no effect with --position-embedding-type {run.model.position_embedding_type}; use "
        "--position-embedding-type alibi",
        lambda run: run.model.scale_alibi and run.model.position_embedding_type != "alibi",
    ),
    lambda run: rotated_channels(run.model),
    rotary_settings_have_an_effect,
    llama3_settings_need_scaling,
    rope_type_is_of_latent_attention,
    scaling_is_complete,
    rule(
        "--use-rope-scaling and --rotary-seq-len-interpolation-factor are mutually exclusive; keep one",
        lambda run: run.model.use_rope_scaling and run.model.rotary_seq_len_interpolation_factor is not None,
    ),
    rule(
        "--rope-low-freq-factor {run.model.rope_low_freq_factor:g} must be less than --rope-high-freq-factor "
        "{run.model.rope_high_freq_factor:g}",
        lambda run: run.model.use_rope_scaling and run.model.rope_low_freq_factor >= run.model.rope_high_freq_factor,
    ),
    rule(
        "--yarn-beta-fast {run.model.yarn_beta_fast:g} must not be less than --yarn-beta-slow "
        "{run.model.yarn_beta_slow:g}",
        lambda run: run.model.yarn_beta_slow > run.model.yarn_beta_fast,
    ),
)
