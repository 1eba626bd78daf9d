"""Rules about BERT."""

from __future__ import annotations

from megatron.config.family import Rule, rule
from megatron.core.models.bert.config import BertConfig

RULES: tuple[Rule, ...] = (
    rule(  # [CLS] A [SEP] B [SEP]
        "--seq-length {run.data.seq_length} leaves no room for two texts between [CLS] and [SEP]; use 5 at least",
        lambda run: run.data.seq_length < 5,
    ),
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
