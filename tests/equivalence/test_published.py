"""Every published type, from its weights, at tensor and pipeline parallelism against one rank, with documents."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("transformers", reason="weights of published types come from the dev extra's transformers")

from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.models.registry import family_of
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed
from tests.equivalence.flags import CP2, PP2, SMALL, SP, TP2, ZERO
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import train, train_at
from tests.harness.published import random_model, without_dropout
from tests.published import FIRST, MODELS
from tests.tiers import pairs

LAYOUTS: dict[str, str] = {
    "tp2 sp pp2": f"--world-size 4 {TP2} {SP} {PP2} --micro-batch-size 4",
    "cp2 dp2 zero": f"--world-size 4 {CP2} {ZERO}",
}

SMALL_STEPS = "--lr 1e-4"
"""For OLMo Hybrid with random weights: its gradients are so steep that three steps of the table's size make 2e-9 of
the rounding of fp64, with any seed."""


@functools.cache
def model_of(name: str) -> PortableModel:
    """A published model."""
    portable = from_transformers(random_model(*MODELS[name]))
    tensors = {ours: tensor.make().double() for ours, tensor in portable.tensors.items()}
    weights = {ours: LazyTensor(tuple(each.shape), each.dtype, each.clone) for ours, each in tensors.items()}
    return dataclasses.replace(portable, model=without_dropout(portable.model), tensors=weights)


def row_of(name: str) -> str:
    """The row that the model takes part in; its own settings replace those of the row."""
    family = family_of(model_of(name).groups).name
    row = f"gpt: {SMALL} --reset-attention-mask" if family == "gpt" else f"{family}: {SMALL}"
    return f"{row} {SMALL_STEPS}" if name == "olmo_hybrid" else row


@functools.cache
def reference(name: str) -> Observed:
    """The table's steps on one rank."""
    return train(ParallelContext.single(dtype=torch.float64), row_of(name), "", model_of(name))


@pytest.mark.parametrize(
    ("name", "layout"),
    # Settings of the others are those of rows of GPT, BERT, T5, experts and hybrids.
    pairs(FIRST.values(), LAYOUTS, rich=LAYOUTS, slow={*FIRST.values()} - {"gpt_oss", "nemotron_h"}),
)
def test_layout_computes_the_model_of_one_rank(name: str, layout: str) -> None:
    """A published model divided wrongly would train on from other weights, or another function."""
    check(train_at(row_of(name), LAYOUTS[layout], model_of(name)), [reference(name)])
