"""Which model an architecture is: the one place that goes from a family's settings to its class."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.bert import BertConfig
from megatron.config.model import ModelConfig
from megatron.config.t5 import T5Config
from megatron.core.models.bert import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.stage import Stage
from megatron.core.models.t5 import T5Model
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan


def build_model(
    model: ModelConfig,
    groups: Sequence[object],
    context: ParallelContext,
    *,
    stage: Stage | None = None,
    recompute: RecomputePlan | None = None,
    seed: int | None = None,
) -> GPTModel | BertModel | T5Model:
    """The stage's part of the model (all of it without ``stage``), whose family and its own settings ``groups`` tell.

    ``seed``: of the initial weights; without it they are whatever memory holds.
    """
    for group in groups:
        if isinstance(group, BertConfig):
            return BertModel(
                model,
                context,
                stage=stage,
                binary_head=group.bert_binary_head,
                exact_gelu_head=group.exact_gelu_head,
                recompute=recompute,
                seed=seed,
            )
        if isinstance(group, T5Config):
            return T5Model(model, group, context, stage=stage, recompute=recompute, seed=seed)
    return GPTModel(model, context, stage=stage, recompute=recompute, seed=seed)
