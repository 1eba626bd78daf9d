"""What families that learn from sentences with masked words have in common: settings, and rules about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from megatron.config.family import FamilyConfig, Rule
from megatron.config.flags import flag
from megatron.config.run import RunConfig

_MASKING = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer", "HuggingFaceTokenizer")


class SentenceConfig(FamilyConfig):
    """Fields of the families that learn from sentences."""

    usual_tokenizer: ClassVar[str | None] = "BertWordPieceLowerCase"  # whole texts need tokens that begin and end them
    pads_samples: ClassVar[bool] = True
    varying_counts: ClassVar[str | None] = "masked tokens"
    # Biases of outputs are part of the families' own heads.
    fields_of_others: ClassVar[tuple[str, ...]] = (
        *("add_output_layer_bias", "parallel_attention", "parallel_layernorm"),
        *("multi_latent_attention", "mtp_num_layers", "word_embedding_size"),
    )

    mask_prob: float = flag("Fraction of the tokens that are masked.", default=0.15, above=0, below=1)
    short_seq_prob: float = flag(
        "Fraction of the samples that are shorter than --seq-length.", default=0.1, at_least=0, at_most=1
    )

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules of families whose samples are single texts, made with a tokenizer that can mask."""
        return (no_flags_of_document_streams, tokenizer_can_mask)


def no_flags_of_document_streams(run: RunConfig) -> str | None:
    """Flags about the packing of document streams are refused by name."""
    named = run.data.given_document_flags()
    if not named:
        return None
    verb = "has" if len(named) == 1 else "have"
    return (
        f"{' and '.join(named)} {verb} no meaning for {run.family.title}, whose samples are single texts with "
        "padding; leave it out"
    )


def tokenizer_can_mask(run: RunConfig) -> str | None:
    """Masking needs a mask token."""
    kind = run.tokenizer.tokenizer_type
    if kind in _MASKING or (kind == "NullTokenizer" and run.data.mock_data):
        return None
    return (
        f"--tokenizer-type {kind} has no tokens to mask with; for {run.family.title} use "
        f"{', '.join(_MASKING[:-1])} or {_MASKING[-1]}"
    )
