"""Which layers of a stage are recomputed."""

from __future__ import annotations

import pytest

from megatron.core.transformer.block import RecomputePlan


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("num_layers", range(1, 9))
@pytest.mark.parametrize("granularity", [None, "selective", "full"])
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_every_layer_runs_once_and_in_order(count: int, num_layers: int, granularity: str, method: str) -> None:
    """A run that is skipped or doubled would drop or repeat layers."""
    plan = RecomputePlan(granularity, method, num_layers)  # type: ignore[arg-type]
    runs = plan.runs(count)
    assert [layer for start, stop, _ in runs for layer in range(start, stop)] == list(range(count))
    recomputed = [layer for start, stop, again in runs if again for layer in range(start, stop)]
    if granularity != "full":
        assert recomputed == []
    elif method == "uniform":
        assert len(recomputed) == count
    else:
        assert recomputed == list(range(min(num_layers, count)))
