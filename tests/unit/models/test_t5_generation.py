"""The likeliest answer of an encoder-decoder model, token by token."""

from __future__ import annotations

import pytest
import torch

from megatron.core.models.registry import FAMILIES
from megatron.core.models.t5.generation import beginnings, likeliest_answer
from megatron.core.models.t5.model import T5Model
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.output_layer import VocabularyOutput
from tests.harness.runs import tiny_run

TEXT, BEGIN, NEVER = [7, 30, 8, 31, 9, 22], 4, -1


@pytest.fixture(scope="module")
def model() -> T5Model:
    """One that says several words, and others of another text."""
    positions = "--position-embedding-type relative --decoder-seq-length 8"
    flags = f"--mock-data {positions} --untie-embeddings-and-output-weights --seed 7"
    found = tiny_run(ParallelContext.single(), flags, family=FAMILIES["t5"]).models[0].eval()
    assert isinstance(found, T5Model)
    return found


def answer(model: T5Model, text: list[int], *, end: int, most: int = 7) -> list[int]:
    return likeliest_answer(model, text, begin=BEGIN, end=end, most=most, device=torch.device("cpu"))


def test_every_token_is_the_likeliest_after_those_before(model: T5Model) -> None:
    """The whole answer given to the decoder at once calls for itself, a place later."""
    said = answer(model, TEXT, end=NEVER)
    output = model(torch.tensor([TEXT]), torch.tensor([[BEGIN, *said[:-1]]]))
    assert isinstance(output, VocabularyOutput)
    assert output.logits()[0].argmax(-1).tolist() == said
    assert len(said) == 7 and len(set(said)) > 2, "one word over and over would show little"
    assert said != answer(model, TEXT[:3], end=NEVER), "an answer to every text would show little"


def test_it_stops_at_the_end(model: T5Model) -> None:
    """Words behind the end were never trained, and the end is no word."""
    said = answer(model, TEXT, end=NEVER)
    end = said[2]
    assert answer(model, TEXT, end=end) == said[: said.index(end)]
    assert answer(model, TEXT, end=NEVER, most=3) == said[:3]


def test_beginnings_of_spans(model: T5Model) -> None:
    """What follows each name, and the likeliest tokens there after what was told before; a name at the very end has
    nothing behind it.
    """
    one, two = 30, 31
    tokens, told = (
        torch.tensor([TEXT, TEXT[::-1]]),
        torch.tensor([[BEGIN, one, 9, 8, two, 7], [BEGIN, one, 5, 6, 7, two]]),
    )
    real = torch.ones_like(tokens, dtype=torch.bool)
    found = beginnings(model, tokens, told, attention_mask=real, names=(one, two), count=3)
    assert found.true.tolist() == [9, 7, 5]
    output = model(tokens, told, attention_mask=real)
    assert isinstance(output, VocabularyOutput)
    logits = output.logits()
    places = [logits[0, 1], logits[0, 4], logits[1, 1]]
    assert found.likeliest.tolist() == [place.topk(3).indices.tolist() for place in places]
    assert len({tuple(row) for row in found.likeliest.tolist()}) > 1, "one answer to all would show little"
