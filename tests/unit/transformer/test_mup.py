"""MuP: what a model's width does to its scales, its initial weights and its learning rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.models.gpt.layer_kinds import decoder_stack
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.transformer.embedding import LanguageModelEmbedding


def wide(**settings: Any) -> ModelConfig:
    """A model four times as wide as the one whose settings it has."""
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 67}
    return ModelConfig(**sizes | {"use_mup": True, "mup_base_hidden_size": 16} | settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"softmax_scale": 1 / 16, "logits_multiplier": 0.25, "embedding_multiplier": 1.0}),
        ({"mup_attn_scale_power": 0.5, "mup_output_mult": 3.0}, {"softmax_scale": 0.25, "logits_multiplier": 3.0}),
        ({"mup_base_head_dim": 4.0, "mup_embedding_mult": 2.0}, {"softmax_scale": 0.125, "embedding_multiplier": 2.0}),
        ({"softmax_scale": 1.0, "mup_base_hidden_size": None}, {"softmax_scale": 1.0, "logits_multiplier": 1.0}),
        ({"use_mup": False}, {"softmax_scale": None, "logits_multiplier": 1.0}),
    ],
)
def test_scales_follow_from_the_width(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    """A script of Megatron-LM's trains with its scales of scores and logits, whichever of its flags it leaves out."""
    model = wide(**settings)
    assert {name: getattr(model, name) for name in expected} == pytest.approx(expected)


def test_learned_positions_are_multiplied_with_the_words() -> None:
    """--mup-embedding-mult left positions as they were, which the words then outweighed."""
    contexts, settings = ModelContext.single(dtype=torch.float64), {"max_position_embeddings": 8, "hidden_dropout": 0.0}
    embeddings = [LanguageModelEmbedding(wide(mup_embedding_mult=m, **settings), contexts) for m in (1.0, 3.0)]
    torch.manual_seed(1)
    for parameter in embeddings[0].parameters():
        torch.nn.init.normal_(parameter)
    embeddings[1].load_state_dict(embeddings[0].state_dict())
    once, thrice = (embedding(torch.arange(8).view(1, 8), None, StreamKey(0)) for embedding in embeddings)
    torch.testing.assert_close(thrice, 3.0 * once, rtol=0, atol=1e-12)


def test_width_narrows_the_initial_weights_and_rates_of_matrices_alone() -> None:
    """A router, an expert or a projection that was forgotten grows with the width and spoils the found learning rate;
    a table or a norm that was taken for a matrix learns too slowly. The untied output layer is a table, too: its
    logits are divided already.
    """
    settings: dict[str, Any] = {"max_position_embeddings": 64, "num_layers": 8, "hidden_size": 128}
    config = wide(mup_base_hidden_size=8, untie_embeddings_and_output_weights=True, **settings)
    groups = (MoEConfig(num_experts=4, moe_ffn_hidden_size=256),)
    model = GPTModel(config, ModelContext.single(), stack=decoder_stack(config, groups), seed=1)
    named = list(model.named_parameters())
    policies = parameter_policies(named, OptimizerConfig(), width_multiplier=config.width_multiplier)
    by_sgd = parameter_policies(named, OptimizerConfig(optimizer="sgd"), width_multiplier=config.width_multiplier)
    for name, parameter in named:
        is_matrix = name.endswith("weight") and "norm" not in name and not name.startswith(("embedding", "output"))
        policy, factor = policies[name], 1 / 16 if is_matrix else 1.0
        assert (policy.lr_multiplier, policy.eps_multiplier) == (factor, factor), name
        assert by_sgd[name].lr_multiplier == (1.0 if is_matrix else 16.0), name
        if name.endswith("weight") and "norm" not in name:
            writes = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            std = 0.02 / (math.sqrt(16) if is_matrix else 1.0) / (math.sqrt(16) if writes else 1.0)
            rows = parameter[:67] if name.startswith(("embedding.word", "output")) else parameter
            assert rows.std().item() == pytest.approx(std, rel=0.1), name
