"""What only BERT has: its second head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.flags import check_flags, flag
from megatron.config.model import ModelConfig
from megatron.config.train_spec import Outline, Rule
from megatron.core.models.sentences import SentenceConfig

TOKEN_TYPES = 2
"""Embeddings that tell the first text of a sample from the second."""


@check_flags
@dataclass(frozen=True, kw_only=True)
class BertConfig(SentenceConfig):
    """Flags of pretrain_bert.py alone."""

    family: ClassVar[str] = "bert"

    bert_binary_head: bool = flag(
        "Train on masked words only: a sample is one text, without the sentence-order head.",
        default=True,
        off="--bert-no-binary-head",
        architecture=True,
    )
    exact_gelu_head: bool = flag(
        "Use exact GELU in the head for masked words, as Megatron-LM does, whatever the layers use.",
        default=False,
        architecture=True,
    )

    def rules(self) -> Sequence[Rule]:
        """Those of sentences, and its own."""
        from megatron.core.models.bert.rules import RULES

        return (*super().rules(), *RULES)

    def remarks(self) -> Sequence[Rule]:
        """What differs from Megatron-LM."""
        from megatron.core.models.bert.rules import REMARKS

        return REMARKS

    def outline(self, model: ModelConfig) -> Outline:
        """A head for hidden words, and one for the order of two texts."""
        return Outline(
            title="BERT",
            token_types=TOKEN_TYPES,
            has_padding=True,
            has_word_head=True,
            pooled_outputs=2 if self.bert_binary_head else 0,
        )


GROUPS: tuple[type, ...] = (BertConfig,)
