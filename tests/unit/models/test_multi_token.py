"""Multi-token prediction against a loop over its modules with plain torch, and the fields it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.gpt.multi_token import shifted_fields
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.transformer.block import RecomputePlan
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.positions import RotaryPositions

LENGTH, VOCABULARY, DEPTHS, FACTOR = 12, 29, 2, 0.3


def settings(*, untied: bool = True) -> ModelConfig:
    return ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        untie_embeddings_and_output_weights=untied,
        make_vocab_size_divisible_by=1,
        mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=FACTOR,
    )


def batch_of(*, documents: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (3, LENGTH + 1), generator=generator)
    mask = (torch.rand(3, LENGTH, generator=generator) > 0.3).double()
    found = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}
    ends = torch.rand(3, LENGTH, generator=generator) < 0.3
    return found | ({"document_ids": ends.int().cumsum(1)} if documents else {})


@pytest.mark.parametrize("documents", [False, True])
def test_fields_stay_within_the_sequence_and_the_document(documents: bool) -> None:
    """A depth would learn to predict the first words of another document, or padding after the end."""
    batch = batch_of(documents=documents)
    batch["text_length"] = torch.tensor([LENGTH, LENGTH - 2, 0])
    found = shifted_fields(batch, DEPTHS)
    for sample in range(3):
        for depth in range(DEPTHS):
            for place in range(LENGTH):
                source, at = place + depth + 1, (sample, depth, place)
                counts = source < LENGTH
                if counts and documents:
                    counts = bool(batch["document_ids"][sample, source] == batch["document_ids"][sample, place])
                assert found["mtp_loss_mask"][at] == (batch["loss_mask"][sample, source] if counts else 0)
                assert found["mtp_text_mask"][at] == (counts and source < batch["text_length"][sample])
                if source < LENGTH:
                    assert found["mtp_tokens"][at] == batch["tokens"][sample, source]
                    assert found["mtp_labels"][at] == batch["labels"][sample, source]


def plain_loss(model: Any, config: ModelConfig, batch: dict[str, Tensor]) -> Tensor:
    """Mean of the next token, and the factor times the mean over depths of the means of later ones."""
    context, embedding = ModelContext.single(dtype=torch.float64), model.embedding
    hidden = embedding(batch["tokens"], None, StreamKey(0))
    inputs = LayerInputs(StreamKey(0), SideLosses(), RotaryPositions(config, context)(hidden, None))
    hidden = model.decoder(hidden, inputs)
    weight = embedding.word_embeddings.weight if model.output_layer is None else model.output_layer.weight

    def mean(states: Tensor, shift: int) -> Tensor:
        stop = LENGTH - shift
        logits = F.linear(states.transpose(0, 1)[:, :stop], weight)
        labels, mask = batch["labels"][:, shift:], batch["loss_mask"][:, shift:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()

    total = mean(hidden, 0)
    for depth in range(DEPTHS):
        layer = model.mtp.layers[str(depth)]
        ids = torch.zeros_like(batch["tokens"])
        ids[:, : LENGTH - depth - 1] = batch["tokens"][:, depth + 1 :]
        embedded = F.embedding(ids.t(), embedding.word_embeddings.weight)
        joined = F.linear(torch.cat((layer.enorm(embedded), layer.hnorm(hidden)), dim=-1), layer.eh_proj.weight)
        hidden = layer.final_layernorm(layer.transformer_layer(joined, inputs))
        total = total + FACTOR / DEPTHS * mean(hidden, depth + 1)
    return total


@pytest.mark.parametrize("recompute", [RecomputePlan(), RecomputePlan("full")], ids=["kept", "recomputed"])
@pytest.mark.parametrize("untied", [True, False])
def test_equals_a_loop_over_its_modules(untied: bool, recompute: RecomputePlan) -> None:
    """A wrong weight of a depth, a lost gradient of the shared embedding or head trains on unnoticed."""
    config, context, spec = settings(untied=untied), ModelContext.single(dtype=torch.float64), GPTSpec()
    model = GPTModel(config, context, recompute=recompute, seed=5).train()
    batch = batch_of(documents=False)
    expected = plain_loss(model, config, batch)
    wanted = torch.autograd.grad(expected, [*model.parameters()])
    microbatch = Microbatch({**batch, **shifted_fields(batch, DEPTHS)}, StreamKey(0))
    counts = spec.counts(microbatch, context)
    weights = {name: counts["lm loss"] / count for name, count in counts.items()}
    microbatch = Microbatch(microbatch.tensors, StreamKey(0), loss_weights=weights)
    loss = spec.loss(spec.forward(model, {}, microbatch), microbatch)
    (loss.sum / loss.count).backward()  # type: ignore[no-untyped-call]
    assert (loss.sum / loss.count - expected).abs() < 1e-12
    assert {name: count.item() for name, (_, count) in loss.parts.items()} == {
        "lm loss": batch["loss_mask"].sum().item(),
        "mtp_1 loss": batch["loss_mask"][:, 1:].sum().item(),
        "mtp_2 loss": batch["loss_mask"][:, 2:].sum().item(),
    }, "the log divides by these"
    for (name, parameter), each in zip(model.named_parameters(), wanted):
        assert parameter.grad is not None, name
        assert (parameter.grad - each).abs().max() < 1e-12, name


def test_without_future_tokens_only_the_next_is_predicted() -> None:
    """Scoring and generation have no future tokens, and pay for no depth."""
    config = settings()
    model = GPTModel(config, ModelContext.single(dtype=torch.float64), seed=5)
    output = model(batch_of(documents=False)["tokens"])
    assert not isinstance(output, Tensor)
    assert output.mtp == ()
