"""Embeddings of places that hold no word."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.embedding import LanguageModelEmbedding
from tests.harness import run_ranks


def embedded(context: ModelContext) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of this rank's part of six places, of which three hold no word; gradients of vector and words."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        vocab_size=20,
        position_embedding_type="none",
        embedding_multiplier=3.0,
    )
    embedding = LanguageModelEmbedding(config, context).eval()
    initialize(embedding, context.mesh, seed=1)
    tokens = torch.tensor([[0, 3, 0, 5, 7, 0], [1, 0, 2, 0, 4, 6]])
    mask = torch.tensor([[1, 0, 1, 0, 0, 1], [0, 1, 0, 1, 0, 0]]).bool()
    vector = torch.full((4,), 9.0, dtype=context.dtype, requires_grad=True)
    hidden = embedding(tokens, None, StreamKey(0), replaced=(mask, vector))
    hidden.sum().backward()
    assert vector.grad is not None and embedding.word_embeddings.weight.grad is not None
    return hidden.detach(), vector.grad, embedding.word_embeddings.weight.grad[:1].sum(1)


def test_places_without_a_word_hold_the_vector_that_is_given() -> None:
    """A family that puts vectors among its tokens had to add them after sequence parallelism had divided the rows. They
    are hidden states: a Gemma would multiply features of images by the square root of its width.
    """
    whole, vector, first_word = embedded(ModelContext.single(dtype=torch.float64))
    assert (whole.transpose(0, 1)[0, [0, 2, 5]] == 9).all() and (whole != 9).sum() == 7 * 4
    assert vector.tolist() == [5] * 4
    assert first_word.tolist() == [0]  # the id that stands where no word is
    parts = run_ranks(embedded, tp=2, sequence_parallel=True, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole, rtol=0, atol=1e-12)
    assert torch.stack([part[1] for part in parts]).sum(0).tolist() == [5] * 4
