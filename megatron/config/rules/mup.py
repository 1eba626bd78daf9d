"""Rules about muP: what a model's width changes."""

from __future__ import annotations

import math

from megatron.config.family import Rule
from megatron.config.flags import flag_of, subject
from megatron.config.model import ModelConfig
from megatron.config.mup import MupConfig
from megatron.config.rules.sentence import changed_flags, rule
from megatron.config.run import RunConfig

_MULTIPLIERS = {
    "logits_multiplier": "--mup-output-mult",
    "embedding_multiplier": "--mup-embedding-mult",
    "position_embedding_multiplier": "--mup-embedding-mult",
}


def settings_need_mup(run: RunConfig) -> str | None:
    """Settings of muP are given with it."""
    flags = [] if run.model.use_mup else changed_flags(run, ModelConfig, among=MupConfig)
    them = "it" if len(flags) == 1 else "them"
    has = subject(flags, "has", "have")
    return f"{has} no effect without --use-mup; give that as well, or leave {them} out" if flags else None


def width_multiplier_is_right(run: RunConfig) -> str | None:
    """The width multiplier is the quotient of the widths."""
    model = run.model
    if not model.use_mup or model.mup_width_mult is None:
        return None
    if math.isclose(model.mup_width_mult, model.width_multiplier, rel_tol=1e-3):
        return None
    return (
        f"--mup-width-mult {model.mup_width_mult:g} is not --hidden-size {model.hidden_size} / --mup-base-hidden-size "
        f"{model.mup_base_hidden_size}, which is {model.width_multiplier:g}; leave it out, or change a width"
    )


def multipliers_have_one_name(run: RunConfig) -> str | None:
    """Multipliers that muP sets are given by its flags."""
    model = run.model
    if not model.use_mup:
        return None
    of_width = model.scale_by_width(model.hidden_size, model.kv_channels)
    for name, instead in _MULTIPLIERS.items():
        value = getattr(model, name)
        if run.given(name) and value not in (1.0, of_width[name]):
            return f"{flag_of(name)} {value:g} and --use-mup are mutually exclusive; use {instead}"
    return None


RULES: tuple[Rule, ...] = (
    settings_need_mup,
    width_multiplier_is_right,
    multipliers_have_one_name,
    rule(
        "--use-mup with --multi-latent-attention and --position-embedding-type yarn is not available: YaRN has a scale "
        "of scores of its own; use --position-embedding-type rope, or say the scale with --softmax-scale",
        lambda run: (
            run.model.use_mup
            and run.model.multi_latent_attention
            and run.model.position_embedding_type == "yarn"
            and not run.given("softmax_scale")
        ),
    ),
)
