"""Rules about BERT."""

from __future__ import annotations

from megatron.config.family import Rule, rule
from megatron.config.run import RunConfig
from megatron.core.models.bert.config import BertConfig, token_types


def two_texts_have_two_types(run: RunConfig) -> str | None:
    """The head for the order of two texts needs to know which is which."""
    types, head = token_types(run.extra), run.find(BertConfig)
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
