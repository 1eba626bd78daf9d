"""Rules about BERT: flags of other families are refused by name, never ignored."""

from __future__ import annotations

from megatron.config.bert import BertConfig
from megatron.config.run import RunConfig

_SHORTEST = 5  # [CLS] A [SEP] B [SEP]
_MASKING = ("BertWordPieceLowerCase", "BertWordPieceCase", "SentencePieceTokenizer")


def flags_of_causal_data(run: RunConfig) -> str | None:
    """How a stream of documents is packed means nothing to samples of sentences."""
    if run.find(BertConfig) is None:
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
        f"{' and '.join(named)} {verb} no meaning for BERT, whose samples are single texts with padding; leave it out"
    )


def samples_have_room(run: RunConfig) -> str | None:
    """Two texts of one token at least."""
    if not run.is_bert or run.data.seq_length >= _SHORTEST:
        return None
    return (
        f"--seq-length {run.data.seq_length} leaves no room for two texts between [CLS] and [SEP]; use {_SHORTEST} at "
        "least"
    )


def tokenizer_can_mask(run: RunConfig) -> str | None:
    """Hidden words need a token in their place."""
    kind = run.tokenizer.tokenizer_type
    if not run.is_bert or kind in _MASKING or (kind == "NullTokenizer" and run.data.mock_data):
        return None
    return (
        f"--tokenizer-type {kind} has no tokens to mask with; for BERT use {', '.join(_MASKING[:-1])} or {_MASKING[-1]}"
    )


RULES = (flags_of_causal_data, samples_have_room, tokenizer_can_mask)
