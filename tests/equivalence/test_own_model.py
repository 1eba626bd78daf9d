"""examples/own_model with experts, a part that its recipe adds in two lines: any layout takes the steps of one rank."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module

import pytest
import torch

from megatron.core.models.registry import Family, register
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed, compare, observe
from megatron.training.run.run import build_run
from tests.end_to_end.commands import ROOT
from tests.harness import run_ranks
from tests.harness.runs import axes_of, context_of, tiny_config
from tests.tiers import tiers

FLAGS = (
    "--mock-data --num-layers 4 --position-embedding-type none --normalization RMSNorm --swiglu --disable-bias-linear "
    "--forget-floor 0.25 --hidden-dropout 0 --num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 "
    "--moe-aux-loss-coeff 0.1 --moe-ffn-hidden-size 16 --clip-grad 0.5"
)
LAYOUTS = {
    "tp2 sp ep2": "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
    "dp2 ep2 zero": "--expert-model-parallel-size 2 --use-distributed-optimizer",
    "pp2 zb-h1": "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1",
}


def recurrent() -> Family:
    """The family, whose package is in a folder of its own."""
    if (folder := str(ROOT / "examples/own_model")) not in sys.path:
        sys.path.insert(0, folder)
    found: Family = import_module("recurrent").FAMILY
    register(found)
    return found


def steps(context: ParallelContext, flags: str) -> Observed:
    """Three steps of a tiny model."""
    family = recurrent()
    config = tiny_config(f"{FLAGS} {flags}", ranks=context.mesh.world_size, family=family)
    return observe(build_run(config, family.train_spec, context_of(config, context), started=0.0), steps=3)


@lru_cache(maxsize=1)
def on_one_rank() -> Observed:
    """In a process of its own, which alone knows the family then."""
    (found,) = run_ranks(steps, "", dtype=torch.float64)
    return found


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=["tp2 sp ep2"]))
def test_layout_takes_the_steps_of_one_rank(layout: str) -> None:
    """A family that follows the recipe gets its experts divided, balanced and reduced without code of its own."""
    config = tiny_config(f"{FLAGS} {LAYOUTS[layout]}", ranks=2, family=recurrent())
    axes = axes_of(config) | {"dtype": torch.float64}
    found = compare(run_ranks(steps, LAYOUTS[layout], **axes), [on_one_rank()])
    assert {each.kind: each.where for each in found if each.where is not None} == {}
    assert any("router" in name for name in on_one_rank().gradients)
