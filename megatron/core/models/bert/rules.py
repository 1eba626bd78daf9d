"""Rules about BERT."""

from __future__ import annotations

from megatron.config.run import RunConfig
from megatron.core.models.bert.config import BertConfig

_SHORTEST = 5  # [CLS] A [SEP] B [SEP]


def samples_have_room(run: RunConfig) -> str | None:
    """Two texts of one token at least."""
    if run.data.seq_length >= _SHORTEST:
        return None
    return (
        f"--seq-length {run.data.seq_length} leaves no room for two texts between [CLS] and [SEP]; use {_SHORTEST} at "
        "least"
    )


def gelu_of_the_word_head(run: RunConfig) -> str | None:
    """A BERT of Megatron-LM has the exact GELU in its head for hidden words, whatever its layers have."""
    if run.group(BertConfig).exact_gelu_head or run.model.non_linearity == "gelu" or run.given("exact_gelu_head"):
        return None
    if not run.provenance or run.training.skip_train:
        return None
    return (
        "GELU in the head for hidden words is the tanh approximation; Megatron-LM's is exact, as with --exact-gelu-head"
    )


RULES = (samples_have_room,)
REMARKS = (gelu_of_the_word_head,)
