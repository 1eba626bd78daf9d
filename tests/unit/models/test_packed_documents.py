"""Documents packed into one sample, with their own positions, are to the model as if each were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.collectives import all_reduce
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.transformer.output_layer import VocabularyOutput
from tests.harness import run_ranks

LENGTH, VOCABULARY, TOLERANCE = 16, 67, 1e-9
DOCUMENTS = [(0, 0, 5), (0, 5, 6), (0, 6, 16), (1, 0, 9), (1, 9, 16)]
"""(row, start, stop); one document is a single token, and none ends where the sequence is cut in two."""

POSITIONS = ("learned_absolute", "rope")
BACKENDS = ("eager", "sdpa", "chunked")


def build(context: ModelContext, *, positions: str, backend: str = "auto", **settings: Any) -> GPTModel:
    settings |= {"position_embedding_type": positions, "attention_backend": backend}
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        **settings,
    )
    return GPTModel(config, context, seed=3)


def packed() -> dict[str, Tensor]:
    """Two samples of documents as the data set packs them."""
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    document_ids, position_ids = torch.zeros(2, LENGTH, dtype=torch.int32), torch.zeros(2, LENGTH, dtype=torch.int64)
    for number, (row, start, stop) in enumerate(DOCUMENTS):
        document_ids[row, start:stop] = number
        position_ids[row, start:stop] = torch.arange(stop - start)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "document_ids": document_ids,
        "position_ids": position_ids,
    }


def run(model: GPTModel, tokens: Tensor, **inputs: Tensor) -> VocabularyOutput:
    output = model(tokens, **inputs)
    assert isinstance(output, VocabularyOutput)
    return output


def gradients_of(model: GPTModel, loss: Tensor, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's part of every parameter's gradient, summed over ranks that saw only part of the sequence."""
    model.zero_grad()
    torch.autograd.backward(loss)
    found = {}
    for name, parameter, sharding in sharded_parameters(model):
        assert parameter.grad is not None
        found[name] = all_reduce(parameter.grad.clone(), mesh, *sharding.partial_grad)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_packed_document_is_computed_as_if_it_were_alone(positions: str, backend: str) -> None:
    """With --reset-attention-mask and --reset-position-ids a document would see its neighbours, or the wrong places."""
    context, batch = ModelContext.single(dtype=torch.float64), packed()
    model = build(context, positions=positions, backend=backend)
    for row, start, stop in DOCUMENTS:
        mask = torch.zeros(2, LENGTH, dtype=torch.float64)
        mask[row, start:stop] = 1.0
        output = run(model, batch["tokens"], position_ids=batch["position_ids"], document_ids=batch["document_ids"])
        alone = run(model, batch["tokens"][row : row + 1, start:stop])
        torch.testing.assert_close(output.logits()[row, start:stop], alone.logits()[0], rtol=0, atol=TOLERANCE)
        loss = output.cross_entropy(batch["labels"], mask)
        loss_alone = alone.cross_entropy(batch["labels"][row : row + 1, start:stop], mask[row : row + 1, start:stop])
        assert loss.item() == pytest.approx(loss_alone.item(), abs=TOLERANCE)
        found, expected = gradients_of(model, loss, context.mesh), gradients_of(model, loss_alone, context.mesh)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=TOLERANCE, msg=f"gradient of {name}")


def test_rotary_angles_follow_the_position_ids_of_each_sample() -> None:
    """Within a document only distances count; with --reset-position-ids alone, attention crosses documents and sees
    wrong distances when the ids are not used. Here sample 0 has distances doubled, which a factor of 2 halves again.
    """
    context, tokens = ModelContext.single(dtype=torch.float64), packed()["tokens"]
    plain = build(context, positions="rope")
    stretched = build(context, positions="rope", rotary_seq_len_interpolation_factor=2.0)
    steps = torch.arange(LENGTH)
    logits = run(stretched, tokens, position_ids=torch.stack((2 * steps, steps))).logits()
    torch.testing.assert_close(logits[0], run(plain, tokens).logits()[0], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits[1], run(stretched, tokens).logits()[1], rtol=0, atol=TOLERANCE)
    assert (logits[1] - run(plain, tokens).logits()[1]).abs().max() > 1e-3


def packed_loss(context: ModelContext, positions: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Token losses of the packed samples, and the gradients of parameters that every rank holds whole."""
    model, batch = build(context, positions=positions), packed()
    output = run(model, batch["tokens"], position_ids=batch["position_ids"], document_ids=batch["document_ids"])
    loss = output.cross_entropy(batch["labels"], torch.ones(2, LENGTH, dtype=torch.float64))
    gradients = gradients_of(model, loss, context.mesh)
    whole = {name: gradients[name] for name, _, sharding in sharded_parameters(model) if not sharding.split}
    return output.token_losses(batch["labels"]), whole


@pytest.mark.parametrize("positions", POSITIONS)
def test_packed_documents_under_sequence_parallelism(positions: str) -> None:
    """Each rank holds half of the sequence and must look up the positions of that half, not of the first."""
    expected, gradients = packed_loss(ModelContext.single(dtype=torch.float64), positions)
    assert ("embedding.position_embeddings.weight" in gradients) == (positions == "learned_absolute")
    for losses, found in run_ranks(packed_loss, positions, tp=2, dtype=torch.float64, sequence_parallel=True):
        torch.testing.assert_close(losses, expected, rtol=0, atol=TOLERANCE)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=TOLERANCE, msg=f"gradient of {name}")
