"""How samples of sentences with hidden words are made: what BERT and T5 have in common."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.recipe import RecipeConfig


@dataclass(frozen=True, kw_only=True)
class SentenceConfig(RecipeConfig):
    """Fields of the families that learn from sentences."""

    mask_prob: float = flag("Fraction of the tokens that are masked.", default=0.15, above=0, below=1)
    short_seq_prob: float = flag(
        "Fraction of the samples that are shorter than --seq-length.", default=0.1, at_least=0, at_most=1
    )
