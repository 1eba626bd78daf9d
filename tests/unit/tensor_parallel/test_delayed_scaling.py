"""Scales that earlier iterations have set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config.fp8 import Fp8Config
from megatron.core.ops.quantize import E4M3, E5M2
from megatron.core.parallel.context import ParallelContext
from megatron.core.tensor_parallel.delayed_scaling import DelayedScaling


def scaling_of(**settings: Any) -> DelayedScaling:
    roles = [("a.input", E4M3), ("a.grad_output", E5M2)]
    return DelayedScaling(roles, Fp8Config(fp8_format="hybrid", **settings), ParallelContext.single())


def after(scaling: DelayedScaling, largest: float) -> tuple[float, list[float]]:
    """Scale and history of the first role when a step has seen ``largest``."""
    scaling.observe(0, torch.tensor(largest))
    scaling.update()
    scale, history = (each.tensor for each in scaling.state() if each.name.startswith("fp8.a.input"))
    return scale.item(), history.tolist()


@pytest.mark.parametrize(
    ("algorithm", "scaled_by"),
    [("max", [8.0, 8.0, 8.0, 4.0, 4.0, 4.0]), ("most_recent", [8.0, 2.0, 1.0, 4.0, 4.0, 1.0])],
)
def test_history(algorithm: str, scaled_by: list[float]) -> None:
    """The first place is for the running step; the others move forward, and the step's value comes last. A step that
    saw nothing but zeros moves nothing.
    """
    scaling = scaling_of(fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm)
    found = [after(scaling, each) for each in (8.0, 2.0, 1.0, 4.0, 0.0, 1.0)]
    assert [scale for scale, _ in found] == [448 / each for each in scaled_by]
    histories = [[0.0, 0.0, 8.0], [0.0, 8.0, 2.0], [0.0, 2.0, 1.0], [0.0, 1.0, 4.0], [0.0, 1.0, 4.0], [0.0, 4.0, 1.0]]
    assert [history for _, history in found] == histories


@pytest.mark.parametrize("lost", [float("inf"), float("nan")])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_a_step_that_overflows_leaves_no_trace(algorithm: str, lost: float) -> None:
    """The loss scaling of --fp16 begins with such steps; scales would stand still until they have left the history."""
    scaling = scaling_of(fp8_amax_history_len=3, fp8_amax_compute_algo=algorithm)
    after(scaling, 2.0)
    assert after(scaling, lost) == (448 / 2, [0.0, 0.0, 2.0])
    assert after(scaling, 4.0) == (448 / 4, [0.0, 2.0, 4.0])
