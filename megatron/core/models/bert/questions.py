"""What a BERT is asked in a proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config.model import ModelConfig
from megatron.core.conversion.megatron_lm.forward import MegatronLMModel, padding
from megatron.core.conversion.questions import Answer, real_tokens, tokens_for
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.bert.megatron_lm import has_exact_head
from megatron.core.models.bert.model import BertOutput


@dataclass(frozen=True)
class MaskedQuestion:
    """What stands at each place of ``tokens`` ``[b, s]``, and in which order are its two texts (``types``)?

    ``types``: None for a model without token types. ``real``: False for padding, whose answers don't count.
    """

    tokens: Tensor
    types: Tensor | None
    real: Tensor
    binary_head: bool

    @property
    def auto_class(self) -> str:
        """Transformers' class of the model with both heads, or with the head for masked tokens alone."""
        return "AutoModelForPreTraining" if self.binary_head else "AutoModelForMaskedLM"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of words and of the order."""
        types = {} if self.types is None else {"token_type_ids": self.types}
        output = model(self.tokens, attention_mask=self.real.long(), **types)
        if not self.binary_head:
            return {"words": output.logits[self.real]}
        return {"words": output.prediction_logits[self.real], "order": output.seq_relationship_logits}

    def ask_megatron_lm(self, model: MegatronLMModel) -> Answer:
        """Logits of words over the padded vocabulary, and of the order, by Megatron-LM's formulas."""
        x = model.embedded(self.tokens, self.types)
        (stack,) = model.stacks
        x = model.run(stack, x, padding(self.real))
        exact = has_exact_head(model.args, legacy=model.is_legacy)
        head = F.gelu(model.linear(x, "lm_head.dense"), approximate="none" if exact else "tanh")
        head = model.norm(head, "lm_head.norm.", "lm_head.layernorm.", "lm_head.layer_norm.")
        words = {"words": model.words(head)[self.real]}
        if not self.binary_head:
            return words
        pooled = model.linear(x[:, 0], "pooler.dense").tanh()
        return {**words, "order": model.linear(pooled, "binary_head")}

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """Logits of words and of the order from our model; before the last stage, its hidden states."""
        output: BertOutput | Tensor = stage(self.tokens, self.types, attention_mask=self.real, **handed)
        if not isinstance(output, BertOutput):
            return {"hidden": output}
        words = {"words": output.words.logits()[self.real]}
        return words if output.order is None else {**words, "order": output.order}


def question_for(model: ModelConfig, groups: Sequence[object]) -> MaskedQuestion:
    """The question for this model: fixed tokens, of which some are padding."""
    tokens = tokens_for(model)
    length = tokens.shape[1]
    real = real_tokens(length)
    if (
        pad := model.position_embedding_offset
    ):  # then padding is the id before: it has no position, and only it has none
        tokens = tokens.masked_fill(tokens == pad - 1, pad % (model.vocab_size or 1)).masked_fill(~real, pad - 1)
    count = TokenTypesConfig.among(groups).num_tokentypes
    types = (torch.arange(length) * count // length).expand_as(tokens) if count else None
    return MaskedQuestion(tokens, types, real, BertConfig.among(groups).bert_binary_head)
