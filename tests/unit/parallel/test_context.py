"""What a rank's context is in layers, and while texts are generated."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.core.parallel.model_context import ModelContext


def test_layers_have_whole_sequences_when_their_model_has() -> None:
    """Each layer has a context of its own, and went on to gather the few tokens of a step of generation."""
    context = dataclasses.replace(ModelContext.single(), sequence_parallel=True)
    layer = context.in_layer(3)
    inner = layer.in_layer(None)
    with context.products.by(lambda x, weight, bias: x):
        assert not (context.splits_sequence or layer.splits_sequence or inner.splits_sequence)
        assert context.sequence_parallel, "a fact of the run stays"
    assert context.splits_sequence and layer.splits_sequence and inner.splits_sequence


def test_facts_stay_as_they_are() -> None:
    """What is done by changing a context is seen, or not, by whoever has copied it before."""
    context = ModelContext.single()
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.sequence_parallel = True  # type: ignore[misc]
