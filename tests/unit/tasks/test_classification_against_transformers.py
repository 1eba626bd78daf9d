"""A BERT that answers computes what transformers' does, forward and backward, from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from tasks.fine_tuning.model import AnswerLogits, BertClassifier
from tests.unit.models.test_bert_against_transformers import (
    LENGTH,
    batch,
    body_weights,
    config_of_the_original,
    load,
    reference_model,
)

CLASSES, CHOICES = 3, 3


def ours(classes: int, **settings: Any) -> BertClassifier:
    context = ModelContext.single(dtype=torch.float64)
    return BertClassifier(config_of_the_original(**settings), context, classes=classes, seed=1)


def weights(reference: Any, head: str) -> dict[str, Tensor]:
    """The reference's tensors under our names."""
    source = {name: tensor.detach() for name, tensor in reference.named_parameters()}
    return body_weights(reference) | {f"{head}.{kind}": source[f"classifier.{kind}"] for kind in ("weight", "bias")}


def check(model: BertClassifier, reference: Any, head: str, label: Tensor, *, choices: int) -> None:
    """Compare logits, loss and every gradient; the batch is one of ``choices`` sequences a sample."""
    load(model, weights(reference, head))
    given = {name: tensor.view(-1, choices, LENGTH) for name, tensor in batch().items() if tensor.dim() == 2}
    theirs = {name: tensor if head == "multichoice_head" else tensor.squeeze(1) for name, tensor in given.items()}
    expected = reference(
        theirs["tokens"], attention_mask=theirs["real"].long(), token_type_ids=theirs["types"], labels=label
    )
    output = model(given["tokens"], given["types"], attention_mask=given["real"])
    assert isinstance(output, AnswerLogits)
    torch.testing.assert_close(output.values, expected.logits, rtol=0, atol=1e-9)
    torch.autograd.backward((cross_entropy(output.values, label), expected.loss))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in reference.parameters():
        parameter.data = parameter.grad  # so that the weight mapping maps gradients
    for name, gradient in weights(reference, head).items():
        found = gradients[name]
        assert found is not None
        torch.testing.assert_close(found[: gradient.shape[0]], gradient, rtol=0, atol=1e-9, msg=name)


def test_classes() -> None:
    """The logits and gradients of BertForSequenceClassification, to fp64's rounding."""
    reference = reference_model("BertForSequenceClassification", num_labels=CLASSES)
    check(ours(CLASSES), reference, "classification_head", torch.tensor([2, 0, 1]), choices=1)


def test_choices() -> None:
    """The logits and gradients of BertForMultipleChoice: a sample's sequences are its choices."""
    check(ours(1), reference_model("BertForMultipleChoice"), "multichoice_head", torch.tensor([1]), choices=CHOICES)


def test_dropout_before_the_head_is_of_the_sample() -> None:
    """It would be missing, or another when a microbatch is computed again; evaluation has none."""
    model, given = ours(CLASSES, dropout=0.5), {name: tensor.unsqueeze(1) for name, tensor in batch().items()}
    for part in (model.embedding, model.encoder):
        assert part is not None
        part.eval()

    def logits(sample: int) -> Tensor:
        output = model(given["tokens"], given["types"], attention_mask=given["real"], rng_key=StreamKey(sample))
        assert isinstance(output, AnswerLogits)
        return output.values

    assert torch.equal(logits(0), logits(0))
    assert not torch.allclose(logits(0), logits(1))
    model.eval()
    assert torch.equal(logits(0), logits(1))


@pytest.mark.parametrize(("classes", "head"), [(2, "classification_head"), (1, "multichoice_head")])
def test_heads_have_megatrons_names(classes: int, head: str) -> None:
    """Checkpoints name them, and a head of one kind must not load as the other."""
    names = [name for name, _ in ours(classes).named_parameters() if "head" in name]
    assert names == [f"{head}.weight", f"{head}.bias"]
