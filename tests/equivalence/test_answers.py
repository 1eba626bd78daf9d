"""The rows of the table for models that answer: heads on the first token, and samples of several sequences."""

from __future__ import annotations

import pytest
import torch

from tests.equivalence.flags import CP2, FULL, NO_OVERLAP, PP2, PP3, SMALL, SP, TP2, TP4, ZB_H1, ZERO, ZERO_OVERLAPPED
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train_alone, train_at
from tests.tiers import pairs

HEADS = ("classification_head", "multichoice_head")

VARIANTS: dict[str, str] = {
    "classes": f"classes: {SMALL} --num-layers 3 --apply-residual-connection-post-layernorm --activation gelu",
    "choices": f"choices: {SMALL} --num-layers 3",
}
DRAWING = {name: f"{row} --attention-dropout 0.2 --hidden-dropout 0.2" for name, row in VARIANTS.items()}

LAYOUTS: dict[str, str] = {
    "one sample at a time": "--micro-batch-size 1",
    "all at once": "--micro-batch-size 8",
    "tp2": f"--world-size 2 {TP2} --micro-batch-size 4",
    "tp4 sp": f"--world-size 4 {TP4} {SP} --micro-batch-size 4",
    "dp2 zero overlapped": f"--world-size 2 {ZERO_OVERLAPPED} --ddp-bucket-size 1000",
    "dp4, microbatches that count for nothing": "--world-size 4 --micro-batch-size 1",
    "cp2": f"--world-size 2 {CP2} --micro-batch-size 4",
    "cp2 tp2 sp": f"--world-size 4 {TP2} {SP} {CP2} --micro-batch-size 4 {FULL}",
    "pp2": f"--world-size 2 {PP2}",
    "pp3 zb-h1, one sample at a time": f"--world-size 3 {PP3} {ZB_H1} --micro-batch-size 1",
    "pp2 tp2 sp dp2 zero": f"--world-size 8 {TP2} {SP} {PP2} {ZERO}",
    "pp2 cp2, transfers not overlapped": f"--world-size 4 {CP2} {PP2} {NO_OVERLAP} --micro-batch-size 4",
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("cp2 tp2 sp", "pp2 tp2 sp dp2 zero"),
        slow=("tp2", "cp2", "pp2", "tp4 sp", "dp2 zero overlapped"),  # others contain them
    ),
)
def test_layout_computes_the_model_of_one_rank(variant: str, layout: str) -> None:
    """A head whose gradient is summed twice, or choices that are taken for samples, would train another model."""
    check(train_at(VARIANTS[variant], LAYOUTS[layout]), [train_alone(VARIANTS[variant])])


SAME_DROPOUT: dict[str, str] = {
    "dp2": "--world-size 2",
    "pp2": f"--world-size 2 {PP2}",
    "recompute": f"{FULL}",
    "pp2 dp2 zb-h1": f"--world-size 4 {PP2} {ZB_H1}",
}


@pytest.mark.parametrize(
    ("variant", "layout"), pairs(DRAWING, SAME_DROPOUT, rich=("pp2 dp2 zb-h1",), slow=("dp2", "pp2"))
)
def test_dropout_is_a_function_of_sample_and_layer(variant: str, layout: str) -> None:
    """Also that before the head, which has no layer."""
    check(train_at(DRAWING[variant], SAME_DROPOUT[layout]), [train_alone(DRAWING[variant])])


@pytest.mark.parametrize("variant", DRAWING)
def test_tensor_ranks_drop_the_same_before_the_head(variant: str) -> None:
    """Each holds the whole head: with masks of their own they would train heads that drift apart."""
    one, other = train_at(DRAWING[variant], f"--world-size 2 {TP2} {SP}")
    heads = [name for name in one.weights if name.partition(".")[0] in ("pooler", *HEADS)]
    assert len(heads) == 4
    for name in heads:
        assert torch.equal(one.weights[name][0].values, other.weights[name][0].values), name
