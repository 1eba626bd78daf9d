"""What a rank's context is in layers, and while texts are generated."""

from __future__ import annotations

import dataclasses

from megatron.core.parallel.context import ParallelContext


def test_layers_have_whole_sequences_when_their_model_has() -> None:
    """Each layer has a context of its own, and went on to gather the few tokens of a step of generation."""
    context = dataclasses.replace(ParallelContext.single(), sequence_parallel=True)
    layer = context.in_layer(3)
    inner = layer.in_layer(None)
    with context.whole_sequences():
        assert not (context.sequence_parallel or layer.sequence_parallel or inner.sequence_parallel)
    assert context.sequence_parallel
    assert layer.sequence_parallel
    assert inner.sequence_parallel
