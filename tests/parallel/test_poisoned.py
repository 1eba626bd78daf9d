"""Layouts of the equivalence table with communication that is late: a missing wait would train on NaN."""

from __future__ import annotations

import pytest
import torch

from megatron.core.parallel import collectives
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed
from tests.equivalence import test_equivalence as table
from tests.equivalence import test_experts, test_pipeline, test_sharding_stages
from tests.equivalence.training import at, train, train_alone
from tests.harness import run_ranks
from tests.harness.poisoned import poisoned
from tests.harness.ranks import RanksError
from tests.tiers import tiers

LLAMA = f"{table.VARIANTS['llama']} --num-layers 4"
EXPERTS = next(iter(test_experts.VARIANTS.values()))
CASES: dict[str, tuple[str, str]] = {
    name: (LLAMA, table.layout_for(LLAMA, layout))
    for name, layout in (table.LAYOUTS | test_pipeline.STAGES | test_pipeline.COMBINED).items()
    if "--world-size" in layout
} | {f"experts, {name}": (EXPERTS, layout) for name, layout in test_experts.LAYOUTS.items()}
CASES |= {
    f"{layout}, stage {stage}": (LLAMA, f"{test_sharding_stages.LAYOUTS[layout]} {flags}")
    for layout in (
        "dp2 overlapped, small buckets",
        "tp2 sp dp2, recompute, accumulation fused",
        "pp2 zb-v dp2, recompute",
    )
    for stage, flags in test_sharding_stages.STAGES.items()
}
FIRST = (
    "tp2 sp dp2 zero recompute",
    "cp2",
    "pp2 zb-v dp2 zero overlapped",
    "dp2 overlapped, small buckets, stage 3",
)


def train_late(context: ParallelContext, row: str, layout: str) -> Observed:
    """Three steps, with communication that arrives when it is waited for."""
    with poisoned():
        return train(context, row, layout)


@pytest.mark.parametrize("case", tiers(CASES, first=FIRST))
def test_every_result_is_waited_for(case: str) -> None:
    """On a GPU a result that is used before its wait is whatever was there; gloo has it in time."""
    row, layout = CASES[case]
    table.check(run_ranks(train_late, row, layout, **at(row, layout)), [train_alone(row)])


def use(context: ParallelContext, fault: str) -> list[float]:
    """Start to sum ones, and use them wrongly."""
    x = torch.ones(3)
    with poisoned():
        handle = collectives.all_reduce_async(x, context.mesh, "dp")
        if fault == "reads too soon":
            seen = x * 1
        elif fault == "writes too soon":
            x.fill_(1)
        handle.wait()
        return (seen if fault == "reads too soon" else x).tolist()


def test_what_is_poisoned() -> None:
    """A harness that delays nothing would pass every layout."""
    assert run_ranks(use, "nothing", dp=2) == [[2.0] * 3] * 2
    assert all(value != value for rank in run_ranks(use, "reads too soon", dp=2) for value in rank)
    with pytest.raises(RanksError, match="the result of all_reduce was changed between its start and its wait"):
        run_ranks(use, "writes too soon", dp=2)
