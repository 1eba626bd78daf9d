"""What only BERT has: its second head, and how its samples are made."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import check_flags, flag


@check_flags
@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Flags of pretrain_bert.py alone."""

    bert_binary_head: bool = flag(
        "Only hidden words: samples are one text, and nothing tells the order of two.",
        default=True,
        off="--bert-no-binary-head",
        architecture=True,
    )
    mask_prob: float = flag("Share of the tokens that are hidden.", default=0.15, above=0, below=1)
    short_seq_prob: float = flag(
        "Share of the samples that are made shorter than --seq-length.", default=0.1, at_least=0, at_most=1
    )
