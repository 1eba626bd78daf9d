"""Multipliers of embeddings and logits, and the soft cap of logits."""

from __future__ import annotations

import torch

from megatron.config.model import ModelConfig
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.transformer.embedding import LanguageModelEmbedding
from megatron.core.transformer.output_layer import vocabulary_output


def test_embeddings_are_multiplied_as_gemma_multiplies_them() -> None:
    """Gemma was trained with sqrt(3072) = 55.4256 rounded to 55.5: the exact number is off by 0.13 % everywhere."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=32,
        position_embedding_type="rope",
        embedding_multiplier=3072**0.5,
    )
    embedding = LanguageModelEmbedding(config, ModelContext.single(dtype=torch.bfloat16)).eval()
    weight = embedding.word_embeddings.weight
    torch.nn.init.normal_(weight)
    found = embedding(torch.arange(32).view(1, 32), None, StreamKey(0)).squeeze(1)
    assert torch.equal(found, weight[:32] * torch.tensor(55.5, dtype=torch.bfloat16))


def test_logits_are_multiplied_and_then_capped() -> None:
    """Logits, losses and the likeliest ids are of the same numbers."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=20,
        logits_multiplier=0.5,
        final_logit_softcapping=2.0,
    )
    context = ModelContext.single(dtype=torch.float64)
    hidden, weight = torch.randn(5, 1, 8).double(), torch.randn(128, 8).double()
    output = vocabulary_output(hidden, weight, config, context)
    expected = 2.0 * torch.tanh(0.5 * (hidden[:, 0] @ weight[:20].t()) / 2.0)
    torch.testing.assert_close(output.logits()[0], expected, rtol=0, atol=1e-12)
    labels = torch.arange(5)
    losses = torch.nn.functional.cross_entropy(expected, labels, reduction="none")
    torch.testing.assert_close(output.token_losses(labels[None])[0], losses, rtol=0, atol=1e-12)
    torch.testing.assert_close(output.cross_entropy(labels[None], torch.ones(1, 5).double()), losses.sum())
    assert torch.equal(output.most_likely()[0], expected.argmax(dim=1))
