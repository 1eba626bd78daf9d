"""What only BERT has: its second head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.family import Rule
from megatron.config.flags import check_flags, switch
from megatron.core.models.sentences import SentenceConfig

TOKEN_TYPES = 2
"""Number of token types: one for the first text of a sample, one for the second."""


@check_flags
@dataclass(frozen=True, kw_only=True)
class BertConfig(SentenceConfig):
    """Flags of pretrain_bert.py alone."""

    name: ClassVar[str] = "bert"
    title: ClassVar[str] = "BERT"

    bert_binary_head: bool = switch(
        "Train on masked words only: a sample is one text, without the sentence-order head.",
        off="--bert-no-binary-head",
        architecture=True,
    )
    exact_gelu_head: bool = switch(
        "Use exact GELU in the head for masked words, as Megatron-LM does, whatever the layers use.", architecture=True
    )

    def rules(self) -> Sequence[Rule]:
        """Those of sentences, and its own."""
        from megatron.core.models.bert.rules import RULES

        return (*super().rules(), *RULES)

    def remarks(self) -> Sequence[Rule]:
        """Remarks about differences from Megatron-LM."""
        from megatron.core.models.bert.rules import REMARKS

        return REMARKS


GROUPS: tuple[type, ...] = (BertConfig,)
