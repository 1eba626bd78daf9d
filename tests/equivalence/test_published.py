"""Every published type, from its weights, at tensor and pipeline parallelism against one rank, with documents."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="weights of published types come from the dev extra's transformers")

from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import LazyTensor
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed
from tests.equivalence.test_equivalence import check, train_at
from tests.equivalence.training import Layout, train
from tests.harness.published import random_model, without_dropout
from tests.published import FIRST, MODELS
from tests.tiers import pairs

LAYOUTS = {
    "tp2 sp pp2": Layout(tp=2, pp=2, sequence_parallel=True, micro_batch_size=4),
    "cp2 dp2 zero": Layout(cp=2, dp=2, sharded=True, micro_batch_size=2),
}


@functools.cache
def settings_of(name: str) -> dict[str, Any]:
    """Architecture and weights of a case."""
    portable = from_transformers(random_model(*MODELS[name]))
    tensors = {ours: tensor.make().double() for ours, tensor in portable.tensors.items()}
    weights = {ours: LazyTensor(tuple(each.shape), each.dtype, each.clone) for ours, each in tensors.items()}
    published = dataclasses.replace(portable, model=without_dropout(portable.model), tensors=weights)
    return {"published": published, "document_ids": True}


@functools.cache
def reference(name: str) -> Observed:
    """Three steps on one rank."""
    return train(ParallelContext.single(dtype=torch.float64), settings_of(name), Layout())


LIKE_ANOTHER = [
    *(
        "mistral",
        "qwen2",
        "qwen3 with windows",
        "starcoder2",
        "smollm3",
        "granite",
        "glm",
        "glm4",
        "gemma",
        "gemma2",
        "olmo",
    ),
    *(
        "olmo2",
        "olmoe",
        "qwen3_moe",
        "mixtral",
        "deepseek_v2",
        "glm4_moe",
        "gptj",
        "nemotron",
        "stablelm",
        "phi3",
        "gpt2",
    ),
    *("camembert", "xlm-roberta", "megatron-bert", "bert", "t5", "falcon newer", "opt"),
]
"""Types whose layers another type has, too, or the equivalence table's own variants."""


@pytest.mark.parametrize(
    ("name", "layout"),
    pairs(FIRST.values(), LAYOUTS, rich=LAYOUTS, slow=LIKE_ANOTHER),
)
def test_layout_computes_the_model_of_one_rank(name: str, layout: str) -> None:
    """A published model divided wrongly would train on from other weights, or another function."""
    check(train_at(settings_of(name), LAYOUTS[layout]), [reference(name)])
