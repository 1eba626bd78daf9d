"""Maximal update parametrization (muP): settings of a narrow model that fit a wide one."""

from __future__ import annotations

from megatron.config.flags import Settings, derive, flag, switch


class MupConfig(Settings):
    """Settings of muP (arXiv:2203.03466), part of those of the model; the field names are Megatron-LM's.

    What they change in the model are other settings, which checkpoints compare and converters read: see
    ``scale_by_width``.
    """

    use_mup: bool = switch(
        "Maximal update parametrization (muP): initial weights, learning rates, logits and attention scores follow the "
        "model's width, so that a learning rate found on a narrow model fits a wide one (see docs/training.md).",
        from_checkpoint=True,
    )
    mup_base_hidden_size: int | None = flag(
        "Width of the model for which --lr and --init-method-std were found. The width multiplier is --hidden-size "
        "divided by it.",
        derived="--hidden-size",
        follows=("use_mup", "hidden_size"),
        at_least=1,
        from_checkpoint=True,
    )
    mup_width_mult: float | None = flag(
        "The width multiplier, which follows from the two widths: only to check that it is what a script expects.",
        derived="--hidden-size / --mup-base-hidden-size",
        follows=("use_mup", "hidden_size", "mup_base_hidden_size"),
        above=0,
        from_checkpoint=True,
    )
    mup_output_mult: float = flag(
        "With --use-mup: multiply logits by this. 1: divide them by the width multiplier.",
        default=1.0,
        above=0,
        from_checkpoint=True,
    )
    mup_embedding_mult: float = flag(
        "With --use-mup: multiply embeddings, of positions as well, by this.",
        default=1.0,
        above=0,
        from_checkpoint=True,
    )
    mup_attn_scale_power: float = flag(
        "With --use-mup: attention scores are divided by the width of a head to this power; 0.5 is the usual scale.",
        default=1.0,
        at_least=0,
        from_checkpoint=True,
    )
    mup_base_head_dim: float | None = flag(
        "With --use-mup: multiply attention scores by the square root of this, the width of a head of the base model, "
        "so that a head of that width has the usual scale.",
        default=None,
        above=0,
        from_checkpoint=True,
    )

    def scale_by_width(self, hidden_size: int, head_width: int) -> dict[str, float]:
        """The model's settings that muP gives where they are not given themselves, by their fields."""
        derive(self, "mup_base_hidden_size", hidden_size)
        assert self.mup_base_hidden_size is not None
        multiplier = hidden_size / self.mup_base_hidden_size
        derive(self, "mup_width_mult", multiplier)
        base = 1.0 if self.mup_base_head_dim is None else self.mup_base_head_dim**0.5
        return {
            "softmax_scale": base / head_width**self.mup_attn_scale_power,
            "logits_multiplier": 1 / multiplier if self.mup_output_mult == 1.0 else self.mup_output_mult,
            "embedding_multiplier": self.mup_embedding_mult,
            "position_embedding_multiplier": self.mup_embedding_mult,
        }
