"""Rules about the families that learn from sentences: flags of others are refused by name, never ignored."""

from __future__ import annotations

from megatron.config.run import RunConfig
from megatron.config.sentences import SentenceConfig

_MASKING = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer", "HuggingFaceTokenizer")


def flags_of_causal_data(run: RunConfig) -> str | None:
    """How a stream of documents is packed means nothing to samples of sentences."""
    if run.find(SentenceConfig) is None:
        return None
    named = run.data.given_document_flags()
    if not named:
        return None
    verb = "has" if len(named) == 1 else "have"
    return (
        f"{' and '.join(named)} {verb} no meaning for {run.outline.title}, whose samples are single texts with "
        "padding; leave it out"
    )


def tokenizer_can_mask(run: RunConfig) -> str | None:
    """Hidden words need a token in their place."""
    kind = run.tokenizer.tokenizer_type
    if not run.outline.has_padding or kind in _MASKING or (kind == "NullTokenizer" and run.data.mock_data):
        return None
    return (
        f"--tokenizer-type {kind} has no tokens to mask with; for {run.outline.title} use {', '.join(_MASKING[:-1])} "
        f"or {_MASKING[-1]}"
    )


RULES = (flags_of_causal_data, tokenizer_can_mask)
