"""Layers of every family report their side losses to the microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.config.model import ModelConfig
from megatron.core.models.bert.model import BertModel
from megatron.core.models.bert.train_spec import BertSpec
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.model import T5Model
from megatron.core.models.t5.train_spec import T5Spec
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.transformer.layer import TransformerLayer
from tasks.fine_tuning.model import BertClassifier
from tasks.fine_tuning.train_spec import ClassificationSpec, LabelledData


def test_every_layer_is_given_the_microbatch_s_collector() -> None:
    """BERT, T5 and fine-tuned models gave their layers a collector that nobody read: a router's loss was lost."""
    config = ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=50, max_position_embeddings=8)
    context, ids = ModelContext.single(), torch.ones(3, 8, dtype=torch.long)
    choices = ids[:, None].expand(3, 2, 8)
    texts = {"text": ids, "types": ids, "attention_mask": ids}
    cases: list[tuple[TrainSpec, nn.Module, dict[str, Any], int]] = [
        (GPTSpec(), GPTModel(config, context, seed=1), {"tokens": ids}, 2),
        (BertSpec(), BertModel(config, context, seed=1), texts, 2),
        (
            T5Spec(),
            T5Model(config, T5Config(decoder_num_layers=3, decoder_seq_length=8), context, seed=1),
            {"text_enc": ids, "text_dec": ids, "enc_mask": ids},
            5,
        ),
        (
            ClassificationSpec("RACE", LabelledData()),
            BertClassifier(config, context, classes=1, seed=1),
            dict.fromkeys(texts, choices),
            2,
        ),
    ]
    for spec, model, tensors, layers in cases:
        given: list[SideLosses] = []
        for module in model.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(lambda _, args, given=given: given.append(args[1].side_losses))
        microbatch = Microbatch(tensors, StreamKey(0))
        spec.forward(model, {}, microbatch)
        assert given == [microbatch.side_losses] * layers, spec.name
