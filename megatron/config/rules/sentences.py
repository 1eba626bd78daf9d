"""Rules about the families that learn from sentences: flags of others are refused by name, never ignored."""

from __future__ import annotations

from megatron.config.run import RunConfig
from megatron.config.sentences import SentenceConfig
from megatron.config.t5 import T5Config

_MASKING = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")


def flags_of_causal_data(run: RunConfig) -> str | None:
    """How a stream of documents is packed means nothing to samples of sentences."""
    if run.find(SentenceConfig) is None:
        return None
    data = run.data
    asked = {
        "--packing": data.packing != "stream",
        "--reset-position-ids": data.reset_position_ids and data.packing == "stream",
        "--reset-attention-mask": data.reset_attention_mask and data.packing == "stream",
        "--eod-mask-loss": data.eod_mask_loss,
        "--sft": data.sft,
        "--fim-rate": data.fim_rate > 0,
    }
    named = [flag for flag, given in asked.items() if given]
    if not named:
        return None
    verb = "has" if len(named) == 1 else "have"
    return (
        f"{' and '.join(named)} {verb} no meaning for {_family(run)}, whose samples are single texts with padding; "
        "leave it out"
    )


def tokenizer_can_mask(run: RunConfig) -> str | None:
    """Hidden words need a token in their place."""
    kind = run.tokenizer.tokenizer_type
    if _family(run) is None or kind in _MASKING or (kind == "NullTokenizer" and run.data.mock_data):
        return None
    return (
        f"--tokenizer-type {kind} has no tokens to mask with; for {_family(run)} use {', '.join(_MASKING[:-1])} or "
        f"{_MASKING[-1]}"
    )


def _family(run: RunConfig) -> str | None:
    """Which family it is; None for one that reads anything."""
    if run.is_bert:
        return "BERT"
    return None if run.find(T5Config) is None else "T5"


RULES = (flags_of_causal_data, tokenizer_can_mask)
