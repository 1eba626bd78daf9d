"""examples/xlnet: two streams, memory and orders of segments give on any layout the numbers of one rank, in fp64."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from typing import Any

import pytest
import torch

from megatron.core.models.registry import Family, register
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed, compare, observe
from megatron.training.run.run import build_run
from tests.end_to_end.commands import ROOT
from tests.harness import run_ranks
from tests.harness.runs import tiny_config
from tests.tiers import tiers

FLAGS = (
    "--num-layers 4 --num-attention-heads 4 --seq-length 12 --mem-len 17 --num-predict 4 --mock-data --clip-grad 0.5 "
    "--position-embedding-type relative --apply-residual-connection-post-layernorm --no-first-attention-norm "
    "--disable-bias-linear --add-mlp-bias --add-output-layer-bias --hidden-dropout 0 --attention-dropout 0"
)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2 sp pp2": (
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        {"tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "tp2 pp2 recomputed": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --recompute-granularity selective",
        {"tp": 2, "pp": 2},
    ),
    "dp2 zero, microbatches of 1": ("--use-distributed-optimizer --micro-batch-size 1", {"dp": 2}),
    "tp4 sp, whole layers recomputed": (
        "--tensor-model-parallel-size 4 --sequence-parallel --recompute-granularity full --recompute-method uniform",
        {"tp": 4, "sequence_parallel": True},
    ),
    "pp2 zb-v dp2": (
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Et|t|t|tL",
        {"pp": 2, "dp": 2},
    ),
}


def xlnet() -> Family:
    """The family, whose package is in a folder of its own."""
    if (folder := str(ROOT / "examples/xlnet")) not in sys.path:
        sys.path.insert(0, folder)
    found: Family = import_module("xlnet").FAMILY
    register(found)
    return found


def steps(context: ParallelContext, flags: str) -> Observed:
    """Three steps of a tiny XLNet."""
    family = xlnet()
    config = tiny_config(f"{FLAGS} {flags}", ranks=context.mesh.world_size, family=family)
    return observe(build_run(config, family.train_spec, context), steps=3)


@lru_cache(maxsize=1)
def on_one_rank() -> Observed:
    """In a process of its own, which alone knows the family then."""
    (found,) = run_ranks(steps, "", dtype=torch.float64)
    return found


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=["tp2 sp pp2"]))
def test_layout_takes_the_steps_of_one_rank(layout: str) -> None:
    """A wrong sum over ranks, or a memory of another segment, would train another model at this layout."""
    flags, axes = LAYOUTS[layout]
    found = compare(run_ranks(steps, flags, dtype=torch.float64, **axes), [on_one_rank()])
    assert {each.kind: each.where for each in found if each.where is not None} == {}
