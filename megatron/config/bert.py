"""What only BERT has: its second head."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import check_flags, flag
from megatron.config.sentences import SentenceConfig


@check_flags
@dataclass(frozen=True, kw_only=True)
class BertConfig(SentenceConfig):
    """Flags of pretrain_bert.py alone."""

    bert_binary_head: bool = flag(
        "Only hidden words: samples are one text, and nothing tells the order of two.",
        default=True,
        off="--bert-no-binary-head",
        architecture=True,
    )
