"""What ranks that share a sequence send each other with multi-head latent attention, counted at the calls."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.parallel import CpCommType
from megatron.core.context_parallel import key_exchange
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel import exchange
from megatron.core.parallel.model_context import ModelContext
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import StackConfig
from tests.harness import run_ranks

LENGTH, BATCH, RANKS, LAYERS = 8, 2, 3, 2
MODEL = ModelConfig(
    num_layers=LAYERS,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=LENGTH * RANKS,
    multi_latent_attention=True,
    kv_lora_rank=12,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    position_embedding_type="rope",
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


def numbers_sent(context: ModelContext, model: ModelConfig, kind: CpCommType) -> tuple[list[int], list[int]]:
    """Sizes of what a rank sends, forward and backward."""
    context, sent = dataclasses.replace(context, cp_comm_types=(kind,)), list[int]()

    def counted(function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            sent.append(max(x.numel() for x in given if isinstance(x, torch.Tensor)))
            return function(*given, **more)

        return call

    shift, gather, scatter = (
        getattr(key_exchange, name) for name in ("shift", "all_gather_into_async", "reduce_scatter")
    )
    built = GPTModel(model, context, seed=1)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with (
        mock.patch.object(exchange, "shift", counted(exchange.shift)),
        mock.patch.object(key_exchange, "shift", counted(shift)),
        mock.patch.object(key_exchange, "all_gather_into_async", counted(gather)),
        mock.patch.object(key_exchange, "reduce_scatter", counted(scatter)),
    ):
        loss = built(tokens).cross_entropy(tokens, torch.ones(BATCH, LENGTH))
        forward = [*sent]
        loss.backward()
    return forward, sent[len(forward) :]


@pytest.mark.parametrize(("latent", "width"), [(12, 12 + 4), (76, 4 * (12 + 8))])
def test_a_ring_carries_what_is_narrower(latent: int, width: int) -> None:
    """Latents and the key that heads share, or keys and values of all heads: forward to all others, backward again, and
    their gradients back.
    """
    model, size = dataclasses.replace(MODEL, kv_lora_rank=latent), BATCH * LENGTH * width
    for forward, backward in run_ranks(numbers_sent, model, "p2p", cp=RANKS):
        assert forward == [size] * (RANKS - 1) * LAYERS
        assert backward == [size] * (RANKS - 1) * LAYERS * 2


def test_a_gather_carries_latents() -> None:
    """At once, and their gradients by a reduce-scatter."""
    size = BATCH * LENGTH * (12 + 4) * RANKS
    for forward, backward in run_ranks(numbers_sent, MODEL, "all_gather", cp=RANKS):
        assert forward == [size] * LAYERS
        assert backward == [size] * 2 * LAYERS


def test_exchanged_heads_are_expanded() -> None:
    """By a2a each rank computes keys and values of its slice, and sends those of other heads."""
    context = dataclasses.replace(ModelContext.single(), cp_comm_types=("a2a",))
    assert not LatentAttention(BranchPlace(StackConfig(MODEL, causal=True), context, 0)).sends_latents
