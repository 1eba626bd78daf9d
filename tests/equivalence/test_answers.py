"""The rows of the table for models that answer: heads on the first token, and samples of several sequences."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed
from tests.equivalence.test_equivalence import FULL, HALVES, SMALL, STILL, check, train_at
from tests.equivalence.training import Layout, train
from tests.tiers import pairs

ORIGINAL: dict[str, Any] = {"apply_residual_connection_post_layernorm": True, "activation": "gelu"}
DEEP: dict[str, Any] = SMALL | {"num_layers": 3}

HEADS = ("classification_head", "multichoice_head")

VARIANTS: dict[str, dict[str, Any]] = {
    "classes": DEEP | STILL | ORIGINAL | {"family": "classes"},
    "choices": DEEP | STILL | {"family": "choices"},
}
DRAWING: dict[str, dict[str, Any]] = {
    name: variant | {"attention_dropout": 0.2, "hidden_dropout": 0.2} for name, variant in VARIANTS.items()
}

LAYOUTS: dict[str, Layout] = {
    "one sample at a time": Layout(micro_batch_size=1),
    "all at once": Layout(micro_batch_size=8),
    "tp2": Layout(tp=2, **HALVES),
    "tp4 sp": Layout(tp=4, sequence_parallel=True, **HALVES),
    "dp2 zero overlapped": Layout(dp=2, sharded=True, overlap=True, bucket_size=1000),
    "dp4, microbatches that count for nothing": Layout(dp=4, micro_batch_size=1),
    "cp2": Layout(cp=2, **HALVES),
    "cp2 tp2 sp": Layout(cp=2, tp=2, sequence_parallel=True, recompute=FULL, **HALVES),
    "pp2": Layout(pp=2),
    "pp3 zb-h1, one sample at a time": Layout(pp=3, schedule="zb-h1", micro_batch_size=1),
    "pp2 tp2 sp dp2 zero": Layout(pp=2, tp=2, sequence_parallel=True, dp=2, sharded=True),
    "pp2 cp2, transfers not overlapped": Layout(pp=2, cp=2, overlap_p2p=False, **HALVES),
}


@functools.cache
def reference(variant: str, *, drawing: bool = False) -> Observed:
    """Three steps on one rank."""
    settings = (DRAWING if drawing else VARIANTS)[variant]
    return train(ParallelContext.single(dtype=torch.float64), settings, Layout())


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(VARIANTS, LAYOUTS, rich=("cp2 tp2 sp", "pp2 tp2 sp dp2 zero")),
)
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A head whose gradient is summed twice, or choices that are taken for samples, would train another model."""
    check(train_at(VARIANTS[variant], LAYOUTS[layout]), [reference(variant)])


SAME_DROPOUT = {
    "dp2": Layout(dp=2),
    "pp2": Layout(pp=2),
    "recompute": Layout(recompute=FULL),
    "pp2 dp2 zb-h1": Layout(pp=2, dp=2, schedule="zb-h1"),
}


@pytest.mark.parametrize(("variant", "layout"), pairs(DRAWING, SAME_DROPOUT, rich=("pp2 dp2 zb-h1",)))
def test_dropout_is_a_function_of_sample_and_layer(variant: str, layout: str) -> None:
    """Also that before the head, which has no layer."""
    check(train_at(DRAWING[variant], SAME_DROPOUT[layout]), [reference(variant, drawing=True)])


@pytest.mark.parametrize("variant", DRAWING)
def test_tensor_ranks_drop_the_same_before_the_head(variant: str) -> None:
    """Each holds the whole head: with masks of their own they would train heads that drift apart."""
    one, other = train_at(DRAWING[variant], Layout(tp=2, sequence_parallel=True))
    heads = [name for name in one.weights if name.partition(".")[0] in ("pooler", *HEADS)]
    assert len(heads) == 4
    for name in heads:
        assert torch.equal(one.weights[name][0].values, other.weights[name][0].values), name
