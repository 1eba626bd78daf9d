"""Layouts of the equivalence table with communication that is late: a missing wait would train on NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatron.core.parallel import collectives
from megatron.core.parallel.context import ParallelContext
from megatron.training.evaluation.parity import Observed
from tests.equivalence import test_equivalence as table
from tests.equivalence import test_experts, test_pipeline
from tests.equivalence.training import Layout, train
from tests.harness import run_ranks
from tests.harness.poisoned import poisoned
from tests.harness.ranks import RanksError
from tests.tiers import tiers

LLAMA: dict[str, Any] = table.VARIANTS["llama"] | {"num_layers": 4}
EXPERTS: dict[str, Any] = next(iter(test_experts.VARIANTS.values()))
CASES: dict[str, tuple[dict[str, Any], Layout]] = {
    name: (LLAMA, layout)
    for name, layout in (table.LAYOUTS | test_pipeline.STAGES | test_pipeline.COMBINED).items()
    if layout.tp * layout.cp * layout.dp * layout.pp > 1
} | {f"experts, {name}": (EXPERTS, layout) for name, layout in test_experts.LAYOUTS.items()}
FIRST = (
    "tp2 sp dp2 zero recompute",
    "dp4 zero overlapped, small buckets",
    "cp2",
    "pp2 zb-v dp2 zero overlapped",
)


def train_late(context: ParallelContext, settings: Mapping[str, Any], layout: Layout) -> Observed:
    """Three steps, with communication that arrives when it is waited for."""
    with poisoned():
        return train(context, settings, layout)


def at(layout: Layout) -> dict[str, Any]:
    """Arguments of ``run_ranks``."""
    sizes = {axis: getattr(layout, axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp", "pp_before_dp")}
    return sizes | {"dtype": torch.float64, "sequence_parallel": layout.sequence_parallel}


@pytest.mark.parametrize("case", tiers(CASES, first=FIRST))
def test_every_result_is_waited_for(case: str) -> None:
    """On a GPU a result that is used before its wait is whatever was there; gloo has it in time."""
    settings, layout = CASES[case]
    expected = train(ParallelContext.single(dtype=torch.float64), settings, Layout())
    table.check(run_ranks(train_late, settings, layout, **at(layout), reuse=True), [expected])


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
