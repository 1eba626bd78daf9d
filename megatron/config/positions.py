"""How a model knows positions: learned, rotary and scaled, or as biases on scores."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import Settings, architecture_flag, architecture_switch, flag

ROTARY_TYPES = ("rope", "yarn", "dynamic_ntk", "longrope")
"""Values of ``position_embedding_type`` that turn queries and keys by their positions."""
ROTARY_FIELDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("rotary_percent", "rotary_base", "rotary_base_local", "rotary_interleaved"), ROTARY_TYPES),
    "no_rope_freq": ROTARY_TYPES,
    **dict.fromkeys(("rotary_seq_len_interpolation_factor", "use_rope_scaling"), ("rope",)),
    **dict.fromkeys(("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor"), ("rope",)),
    **dict.fromkeys(("original_max_position_embeddings", "rotary_scaling_factor"), ROTARY_TYPES[1:]),
    "rotary_attention_factor": ("yarn", "longrope"),
    **dict.fromkeys(("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int"), ("yarn",)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), ("yarn",)),
    **dict.fromkeys(("longrope_short_factors", "longrope_long_factors"), ("longrope",)),
}
"""Settings of rotary positions, and the types that have them; ``use_rope_scaling`` has an original length, too."""


ORIGINAL_LENGTH = 4096
"""The original length of YaRN in Megatron-LM's latent attention, unless a flag says another."""


class PositionConfig(Settings):
    """Settings of position embeddings, part of those of the model."""

    position_embedding_offset: int = architecture_flag(
        "Rows of the learned position table before that of position 0: 2 in OPT, the padding id + 1 in some encoders.",
        default=0,
        at_least=0,
        at_most=1024,
    )
    position_embedding_type: Literal[
        "learned_absolute", "rope", "yarn", "dynamic_ntk", "longrope", "alibi", "relative", "none"
    ] = architecture_flag(
        "Position embedding type. rope: rotary positions; yarn, dynamic_ntk and longrope: rotary positions scaled for "
        "sequences longer than --original-max-position-embeddings; alibi: scores fall with the distance, at a slope "
        "for each head; relative: a learned bias on attention scores, for encoder-decoder models.",
        default="learned_absolute",
        renamed_values={"rotary": ("rope", ""), "absolute": ("learned_absolute", "")},
        refused_values={
            "mrope": "positions of images are outside this project; use rope",
        },
    )
    rope_type: Literal["rope", "yarn"] | None = flag(
        "Megatron-LM's word for the rotary positions of --multi-latent-attention: with yarn, as without the flag, "
        f"--position-embedding-type rope with a --rotary-scaling-factor is yarn from a length of {ORIGINAL_LENGTH}.",
        default=None,
    )
    scale_alibi: bool = architecture_switch(
        "Scale ALiBi's biases as attention scores are scaled, as Falcon does; they are added after it otherwise."
    )
    rotary_percent: float = architecture_flag(
        "Fraction of each head's width that is rotated.", default=1.0, above=0, at_most=1
    )
    rotary_base: float = architecture_flag("Base of the rotary frequencies (theta).", default=10000.0, above=1)
    rotary_base_local: float | None = architecture_flag(
        "Base of the rotary frequencies in layers with a window (--window-size), which are then not scaled; without it "
        "these layers have the frequencies of the others.",
        default=None,
        above=1,
    )
    no_rope_freq: str | None = architecture_flag(
        "Layers without rotary positions: N for every N-th layer, or a list such as '[0]*3+[1]' with a 1 for each "
        "such layer.",
        default=None,
    )
    rotary_interleaved: bool = architecture_switch("Rotate neighbouring pairs instead of the two halves of a head.")
    rotary_seq_len_interpolation_factor: float | None = architecture_flag(
        "Divide rotary positions by this factor (linear interpolation).", default=None, above=0
    )
    use_rope_scaling: bool = architecture_switch("Scale rotary frequencies as Llama 3 does.")
    rope_scaling_factor: float = architecture_flag("Factor of --use-rope-scaling.", default=8.0, at_least=1)
    rope_low_freq_factor: float = architecture_flag(
        "Frequencies that turn fewer times than this within the original length are divided (--use-rope-scaling).",
        default=1.0,
        above=0,
        aliases=("--low-freq-factor",),
    )
    rope_high_freq_factor: float = architecture_flag(
        "Frequencies that turn more times than this within the original length are kept (--use-rope-scaling).",
        default=4.0,
        above=0,
        aliases=("--high-freq-factor",),
    )
    original_max_position_embeddings: int | None = architecture_flag(
        "Length of the sequences that the model was trained on before its rotary positions were scaled.",
        derived="8192 with --use-rope-scaling",
        follows=("use_rope_scaling",),
        at_least=2,
        aliases=(
            "--yarn-original-max-position-embeddings",
            "--rope-scaling-original-max-position-embeddings",
            "--rope-original-max-positional-embeddings",
        ),
    )
    rotary_scaling_factor: float = architecture_flag(
        "How many times the original length the model reads with yarn, dynamic_ntk or longrope.",
        default=1.0,
        at_least=1,
    )
    rotary_attention_factor: float | None = architecture_flag(
        "Factor of rotated queries and of rotated keys with yarn or longrope; follows from --rotary-scaling-factor "
        "unless given.",
        default=None,
        above=0,
    )
    yarn_beta_fast: float = architecture_flag(
        "YaRN keeps frequencies that turn more often than this within the original length.",
        default=32.0,
        above=0,
        aliases=("--beta-fast", "--rope-scaling-beta-fast"),
    )
    yarn_beta_slow: float = architecture_flag(
        "YaRN divides frequencies that turn less often than this within the original length.",
        default=1.0,
        above=0,
        aliases=("--beta-slow", "--rope-scaling-beta-slow"),
    )
    yarn_correction_range_round_to_int: bool = architecture_switch(
        "Don't round the range between YaRN's two frequencies to whole pairs of channels.",
        off="--no-yarn-correction-range-round-to-int",
    )
    mscale: float = architecture_flag(
        "YaRN: with --mscale-all-dim, the attention factor is (0.1 mscale ln(factor) + 1) / (0.1 mscale-all-dim "
        "ln(factor) + 1).",
        default=1.0,
        at_least=0,
        aliases=("--rope-scaling-mscale",),
    )
    mscale_all_dim: float = architecture_flag(
        "YaRN: see --mscale. With --multi-latent-attention scores are multiplied by the square of (0.1 mscale-all-dim "
        "ln(factor) + 1), too.",
        default=0.0,
        at_least=0,
        aliases=("--rope-scaling-mscale-all-dim",),
    )
    longrope_short_factors: tuple[float, ...] = architecture_flag(
        "LongRoPE's divisor of each rotary frequency in sequences up to the original length.",
        default=(),
        above=0,
        aliases=("--short-factor",),
    )
    longrope_long_factors: tuple[float, ...] = architecture_flag(
        "LongRoPE's divisor of each rotary frequency in longer sequences.",
        default=(),
        above=0,
        aliases=("--long-factor",),
    )
