"""What training asks of the family: GPT's batches, loss and data with a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.model_context import ModelContext
from recurrent.model import recurrent_model


class RecurrentSpec(GPTSpec):
    """Next-token prediction with the recurrent model. For data of one's own, override ``build_datasets``; for another
    loss, ``loss`` and ``counts``.
    """

    name = "recurrent"

    @override
    def build_model(
        self, model: ModelConfig, groups: Sequence[object], context: ModelContext, **part: Any
    ) -> nn.Module:
        """Build the model, or one stage of it. ``part``: which stage, what is recomputed, and the seed of initial
        weights.
        """
        return recurrent_model(model, groups, context, **part)


TRAIN_SPEC: TrainSpec = RecurrentSpec()
