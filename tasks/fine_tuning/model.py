"""BERT with a classification or multiple-choice head."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from megatron.config.lora import LoraConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.core.models.bert.config import TokenTypesConfig
from megatron.core.models.bert.model import NO_ADAPTERS, NO_EXPERTS, BertBody, Pooler, head_of_first_token
from megatron.core.ops.dropout import dropout
from megatron.core.parallel.costs import Costs, Workload, total_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.block import RecomputePlan


@dataclass(frozen=True)
class AnswerLogits:
    """``values`` ``[b, answers]``, right on the first context-parallel rank only, which has the first token."""

    values: Tensor
    context: ModelContext


class BertClassifier(BertBody):
    """The stage's part of a BERT with a head on its first token (Devlin et al. 2018, arXiv:1810.04805, section 4).

    ``classes``: outputs of the head for one sequence. With one, each sequence of a sample is a choice and gets a score.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        *,
        classes: int,
        token_types: int = TokenTypesConfig.num_tokentypes,
        moe: MoEConfig = NO_EXPERTS,
        lora: LoraConfig = NO_ADAPTERS,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> None:
        stage = stage or Stage(range(config.num_layers), is_first=True, is_last=True)
        super().__init__(config, context, stage=stage, token_types=token_types, moe=moe, lora=lora, recompute=recompute)
        self.pooler = Pooler(config, context) if stage.is_last else None
        head = head_of_first_token(classes, config, context) if stage.is_last else None
        self.classification_head = head if classes > 1 else None
        self.multichoice_head = head if classes == 1 else None
        if seed is not None:
            initialize(self, context.mesh, seed=seed)

    @override
    def forward(
        self,
        tokens: Tensor | None,
        types: Tensor | None,
        *,
        attention_mask: Tensor,
        rng_key: StreamKey | None = None,
        hidden: Tensor | None = None,
        side_losses: SideLosses | None = None,
        text_mask: Tensor | None = None,
    ) -> AnswerLogits | Tensor:
        """Token ids and types ``[b, choices, S]`` (None after the first stage) to logits ``[b, answers]``, before the
        last stage to hidden states ``[s, b·choices, h]``; masks are ``[b, choices, S]``. See BertModel.
        """
        rng_key = rng_key or StreamKey(0)
        hidden = self.hidden_states(
            None if tokens is None else tokens.flatten(0, 1),
            None if types is None else types.flatten(0, 1),
            attention_mask=attention_mask.flatten(0, 1),
            rng_key=rng_key,
            hidden=hidden,
            side_losses=side_losses,
            text_mask=None if text_mask is None else text_mask.flatten(0, 1),
        )
        head = self.classification_head or self.multichoice_head
        if self.pooler is None or head is None:
            return hidden
        logits: Tensor = head(self._dropped(self.pooler(hidden), rng_key))
        return AnswerLogits(logits.view(len(attention_mask), -1), self._context)

    @override
    def costs(self, workload: Workload) -> Costs:
        """The body's, and those of the head on one token."""
        heads = (self.pooler, self.classification_head, self.multichoice_head)
        return super().costs(workload) + total_of(heads, dataclasses.replace(workload, length=1))

    def _dropped(self, pooled: Tensor, rng_key: StreamKey) -> Tensor:
        """Dropout with the same mask on all tensor-parallel ranks, which hold the same vectors."""
        if not self.training or self._config.hidden_dropout == 0.0:
            return pooled
        self._context.rng.enter(rng_key, "answer")
        return dropout(pooled, self._config.hidden_dropout, self._context.rng.replicated)
