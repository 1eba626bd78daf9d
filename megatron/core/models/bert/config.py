"""What only BERT has, its second head and token types, with rules about them; and the parts that it may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from megatron.config.family import PartConfig, Rule
from megatron.config.flags import architecture_flag, architecture_switch
from megatron.config.lora import LoraConfig
from megatron.config.moe import MoEConfig
from megatron.config.positions import ROTARY_TYPES
from megatron.config.quantization_training import QuantizationTrainingConfig
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig
from megatron.core.models.sentences import SentenceConfig


class BertConfig(SentenceConfig):
    """Flags of pretrain_bert.py alone."""

    name: ClassVar[str] = "bert"
    title: ClassVar[str] = "BERT"
    position_embedding_types: ClassVar[tuple[str, ...]] = ("learned_absolute", *ROTARY_TYPES, "alibi", "none")
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
        return (*super().rules(), *RULES)

    @override
    def remarks(self) -> Sequence[Rule]:
        """Remarks about differences from Megatron-LM."""
        return REMARKS


class TokenTypesConfig(PartConfig):
    """Flags of every BERT's embedding, also of one that is fine-tuned."""

    num_tokentypes: int = architecture_flag(
        "Token types. BERT has 2, for the first and the second text of a pair, RoBERTa 1 and ModernBERT 0: their texts "
        "have one type.",
        default=2,
        at_least=0,
        at_most=1024,
    )


GROUPS: tuple[type, ...] = (BertConfig, TokenTypesConfig, MoEConfig, LoraConfig, QuantizationTrainingConfig)


def two_texts_have_two_types(run: RunConfig) -> str | None:
    """The head for the order of two texts needs to know which is which."""
    types, head = run.part(TokenTypesConfig).num_tokentypes, run.find(BertConfig)
    if types >= 2 or head is None or not head.bert_binary_head:
        return None
    return (
        f"the sentence-order head needs a token type for each of two texts, and --num-tokentypes {types} gives "
        f"{'one only' if types else 'none'}; give --bert-no-binary-head"
    )


RULES: tuple[Rule, ...] = (
    rule(  # [CLS] A [SEP] B [SEP]
        "--seq-length {run.data.seq_length} leaves no room for two texts between [CLS] and [SEP]; use 5 at least",
        lambda run: run.data.seq_length < 5,
    ),
    two_texts_have_two_types,
)
REMARKS: tuple[Rule, ...] = (
    rule(  # of Megatron-LM's BERT, whatever its layers have
        "GELU in the head for masked tokens is the tanh approximation; Megatron-LM's is exact, as with "
        "--exact-gelu-head",
        lambda run: (
            not (run.group(BertConfig).exact_gelu_head or run.given("exact_gelu_head"))
            and run.model.nonlinearity != "gelu"
            and run.provenance
            and not run.training.skip_train
        ),
    ),
)
