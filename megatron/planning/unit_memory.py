"""Weights and gradients that are whole for a while only (ZeRO 2 and 3): how many a rank holds at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.config.run import RunConfig
from megatron.core.distributed.grad_sync import IN_FLIGHT
from megatron.core.distributed.units import Unit, units_of
from megatron.core.models.train_spec import TrainSpec
from megatron.planning.model import stage_models


@dataclass(frozen=True)
class WholeAtOnce:
    """Elements on one rank beside its shards, at most: ``weights``, ``gradients``, and ``sums`` of the latter that
    arrive.
    """

    weights: int = 0
    gradients: int = 0
    sums: int = 0


def whole_at_once(
    run: RunConfig, train_spec: TrainSpec, pipeline_rank: int, shards: Callable[[nn.Parameter], int]
) -> WholeAtOnce:
    """What the stage of ZeRO lets a rank hold whole; nothing for stages 0 and 1, which keep all of it.

    ``shards``: ranks over which a parameter is divided; one that isn't divided is never here.
    """
    stage = run.parallel.zero_stage
    if stage < 2:
        return WholeAtOnce()

    def size(unit: Unit, *, trained: bool, divided: bool = False) -> int:
        return sum(
            each.numel() // (shards(each) if divided else 1)
            for each in unit.parameters
            if shards(each) > 1 and (each.requires_grad or not trained)
        )

    chunks = [units_of(model) for model in stage_models(run, train_spec, pipeline_rank=pipeline_rank)]
    if run.purpose.only_reads:
        return WholeAtOnce()
    # Layers that are computed again together are whole until all of them had their backward pass.
    again = run.training.recompute_num_layers or 1 if run.training.recompute_method == "uniform" else 1
    layers = max(1 + run.parallel.overlap_param_gather, again)
    in_flight = IN_FLIGHT if run.parallel.overlap_grad_reduce else 0
    found = [
        WholeAtOnce(
            weights=_at_once(units, lambda unit: size(unit, trained=False), layers),
            gradients=_at_once(units, lambda unit: size(unit, trained=True), 1 + in_flight),
            sums=max((size(unit, trained=True, divided=True) for unit in units), default=0) * max(in_flight, 1),
        )
        for units in chunks
    ]
    weights = max(each.weights for each in found)
    if run.parallel.keeps_gathered_weights:
        weights = sum(size(unit, trained=False) for units in chunks for unit in units)
    return WholeAtOnce(
        weights=0 if stage == 2 else weights,
        gradients=max(each.gradients for each in found),
        sums=max(each.sums for each in found),
    )


def _at_once(units: Sequence[Unit], size: Callable[[Unit], int], layers: int) -> int:
    """Sizes of all units outside of layers, which are whole during a pass, and of the largest ``layers`` neighbours."""
    sizes = [size(unit) for unit in units if unit.layer is not None]
    runs = [sum(sizes[start : start + layers]) for start in range(max(1, len(sizes) - layers + 1))]
    return sum(size(unit) for unit in units if unit.layer is None) + max(runs)
