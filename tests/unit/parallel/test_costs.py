"""Costs that modules tell, and modules that tell nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload, costs_of

WORKLOAD = Workload(context=ParallelContext.single(), batch=1, length=8, stream_itemsize=4)


class Told(nn.Module):
    """Says what it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """x"""
        return x

    def costs(self, workload: Workload) -> Costs:
        """A FLOP a token."""
        return Costs(float(workload.all_tokens), kept=3, working=5)


class Renamed(Told):
    """The same module by another name."""


class Adapted(Told):
    """More than its base class, whose costs don't know it."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """x + x"""
        return x + x


def test_modules_that_say_nothing_are_named() -> None:
    """A subclass with weights of its own was counted as its base class, and the dry run named nobody."""
    found = costs_of(nn.Sequential(Told(), Renamed(), nn.GELU()), WORKLOAD)
    assert found == Costs(16.0, kept=6, working=5)
    assert costs_of(nn.Sequential(Adapted(), nn.Linear(2, 2)), WORKLOAD).uncounted == {"Adapted", "Linear"}
    assert costs_of(Adapted(), WORKLOAD).flops == 8.0, "what the base class says is better than nothing"
