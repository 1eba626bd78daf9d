"""Losses, gradient norms and learning rates of 20 steps equal megatron-core's, at four layouts.

``tests/golden/regenerate_training.py`` recorded them, from the same data files and initial weights. The losses agree in
fp64 to 1e-11 for the classic GPT (megatron-core rounds a constant of its GELU to 8 digits) and to 1e-15 for the Llama,
so the tolerance is 1e-9.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import sharded_parameters
from megatron.training.reporting.metrics import StepRecord
from megatron.training.step import train_step
from tests.golden.regenerate_training import FLAGS, RECORDED, STEPS, VARIANTS, weight, write_documents
from tests.harness import run_ranks
from tests.harness.runs import tiny_run

CURVES = json.loads(RECORDED.read_text())["curves"]
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2 sp": ("--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2, "sequence_parallel": True}),
    "pp2": ("--pipeline-model-parallel-size 2", {"pp": 2}),
    "dp2 zero": ("--use-distributed-optimizer", {"dp": 2}),
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The documents that megatron-core read."""
    prefix = str(tmp_path_factory.mktemp("documents") / "data")
    write_documents(prefix)
    return prefix


def train(context: ParallelContext, flags: str) -> list[StepRecord]:
    """Records of the steps from the weights that megatron-core started from."""
    run = tiny_run(context, flags)
    for model in run.models:
        for name, parameter, sharding in sharded_parameters(model):
            whole = weight(sharding.tied or name, sharding.shape)
            for piece in sharding.pieces(context.mesh):
                parameter.detach()[piece.slices(of_local=True)] = whole[piece.slices(of_local=False)]
    batches = run.data.training_batches(0)
    return [train_step(run, next(batches)) for _ in range(STEPS)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts_train_what_megatron_core_trains(variant: str, prefix: str) -> None:
    """A model, gradient, update, schedule or order of samples other than Megatron-LM's, alike on all layouts, would
    pass every comparison of our layouts with each other.
    """
    flags, expected = f"{FLAGS} {VARIANTS[variant][0]} --data-path {prefix}", CURVES[variant]
    found = {"one rank": train(ParallelContext.single(dtype=torch.float64), flags)}
    for layout, (more, axes) in LAYOUTS.items():
        ranks = run_ranks(train, f"{flags} {more}", dtype=torch.float64, timeout=180.0, **axes)
        found |= {f"{layout}, rank {rank}": records for rank, records in enumerate(ranks)}
    for place, records in found.items():
        losses = [record.losses["lm loss"] for record in records]
        assert losses == pytest.approx(expected["losses"], rel=1e-9), place
        assert [record.grad_norm for record in records] == pytest.approx(expected["grad_norms"], rel=1e-9), place
        # A record shows the rate of the step to come.
        assert [record.learning_rate for record in records[:-1]] == pytest.approx(expected["rates"][1:], rel=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_differs_by_rounding_alone(variant: str, prefix: str) -> None:
    """A part of the step that loses precision in fp32, as users run it, isn't seen in fp64.

    Our losses in fp32 are within 2e-7 of megatron-core's in fp64, which is the rounding of two numbers.
    """
    flags = f"{FLAGS} {VARIANTS[variant][0]} --data-path {prefix}"
    losses = [record.losses["lm loss"] for record in train(ParallelContext.single(), flags)]
    assert losses == pytest.approx(CURVES[variant]["losses"], rel=5e-7)
