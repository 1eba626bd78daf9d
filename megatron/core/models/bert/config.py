"""What only BERT has: its second head, and token types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from typing_extensions import override

from megatron.config.family import Rule
from megatron.config.flags import Settings, architecture_flag, architecture_switch
from megatron.core.models.sentences import SentenceConfig


class BertConfig(SentenceConfig):
    """Flags of pretrain_bert.py alone."""

    name: ClassVar[str] = "bert"
    title: ClassVar[str] = "BERT"
    window_sides: ClassVar[int] = 2

    bert_binary_head: bool = architecture_switch(
        "Train on masked words only: a sample is one text, without the sentence-order head.",
        off="--bert-no-binary-head",
    )
    exact_gelu_head: bool = architecture_switch(
        "Use exact GELU in the head for masked words, as Megatron-LM does, whatever the layers use."
    )

    head_bias: bool = architecture_switch(
        "No bias in the dense layer of the head for masked words (ModernBERT).", off="--bert-no-head-bias"
    )

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules of the families that learn from sentences, and BERT's own."""
        from megatron.core.models.bert.rules import RULES

        return (*super().rules(), *RULES)

    @override
    def remarks(self) -> Sequence[Rule]:
        """Remarks about differences from Megatron-LM."""
        from megatron.core.models.bert.rules import REMARKS

        return REMARKS


class TokenTypesConfig(Settings):
    """Flags of every BERT's embedding, also of one that is fine-tuned."""

    num_tokentypes: int = architecture_flag(
        "Token types. BERT has 2, for the first and the second text of a pair, RoBERTa 1 and ModernBERT 0: their texts "
        "have one type.",
        default=2,
        at_least=0,
        at_most=1024,
    )


GROUPS: tuple[type, ...] = (BertConfig, TokenTypesConfig)


def token_types(groups: Iterable[object]) -> int:
    """How many token types the model of these groups has."""
    return next((group for group in groups if isinstance(group, TokenTypesConfig)), TokenTypesConfig()).num_tokentypes
