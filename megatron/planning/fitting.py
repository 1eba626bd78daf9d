"""What to change so that a run fits into a device's memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config.report import gigabytes
from megatron.config.rules import failures
from megatron.config.rules.sizes import divisors
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.errors import ConfigError
from megatron.planning.estimate import memory_estimate, unit_costs
from megatron.planning.model import stage_models


@dataclass(frozen=True)
class Change:
    """Flags that save memory, the fields of one group that they set, and a rough cost in speed, to rank changes by."""

    flags: str
    group: str
    values: tuple[tuple[str, Any], ...]
    cost: float


@dataclass(frozen=True)
class Fit:
    """A variant of a run that fits: the flags to change, and its bytes on one rank."""

    flags: str
    total: int


def what_fits(
    run: RunConfig,
    train_spec: TrainSpec,
    *,
    device_bytes: float,
    ranks_per_node: int,
    most: int = 3,
) -> list[Fit]:
    """Variants of ``run`` that pass all rules and fit, at most ``most``; those that cost the least speed come first."""
    kinds = (
        _sharding(run),
        _tensor_parallel(run, ranks_per_node),
        _context_parallel(run, ranks_per_node),
        _recomputation(run),
        _micro_batch(run),
    )
    combinations = (tuple(filter(None, chosen)) for chosen in itertools.product(*((None, *kind) for kind in kinds)))
    fits: list[Fit] = []
    sufficient: list[tuple[Change, ...]] = []
    for changes in sorted(combinations, key=lambda each: sum(change.cost for change in each)):
        # Fewer of the same changes already suffice.
        if not changes or any(set(enough) <= set(changes) for enough in sufficient):
            continue
        variant = run
        for change in changes:
            group = dataclasses.replace(getattr(variant, change.group), **dict(change.values))
            variant = dataclasses.replace(variant, **{change.group: group})
        if failures(variant) or (total := memory_estimate(variant, train_spec).total) > device_bytes:
            continue
        sufficient.append(changes)
        fits.append(Fit(" ".join(change.flags for change in changes), total))
        if len(fits) == most:
            break
    return fits


def check_units(run: RunConfig, train_spec: TrainSpec, *, device_bytes: float, ranks_per_node: int) -> None:
    """Raise ConfigError where a unit of ZeRO 2 or 3, whole, is larger than a device."""
    if run.parallel.zero_stage < 2 or run.purpose.only_reads:
        return
    size, name = max(unit_costs(run, model).largest for model in stage_models(run, train_spec))
    if size <= device_bytes:
        return
    fits = what_fits(run, train_spec, device_bytes=device_bytes, ranks_per_node=ranks_per_node, most=1)
    would = fits[0].flags if fits else "a larger --tensor-model-parallel-size, which divides it, or a smaller layer"
    raise ConfigError(
        f"with ZeRO {run.parallel.zero_stage} the unit {name} takes {gigabytes(size)} while it is whole, and a rank's "
        f"device has {gigabytes(device_bytes)}: use {would}"
    )


def _sharding(run: RunConfig) -> Iterator[Change]:
    if run.parallel.zero_stage == 0 and run.data_parallel_size > 1:
        yield Change("--use-distributed-optimizer", "parallel", (("use_distributed_optimizer", True),), cost=0.5)


def _tensor_parallel(run: RunConfig, ranks_per_node: int) -> Iterator[Change]:
    now = run.parallel.tensor_model_parallel_size
    if now > 1 and not run.parallel.sequence_parallel:
        yield Change("--sequence-parallel", "parallel", (("sequence_parallel", True),), cost=0.5)
    for size in divisors(min(ranks_per_node, run.world_size)):
        if size > now:
            flags = f"--tensor-model-parallel-size {size} --sequence-parallel"
            values = (("tensor_model_parallel_size", size), ("sequence_parallel", True))
            yield Change(flags, "parallel", values, cost=2 * (size / now - 1))


def _context_parallel(run: RunConfig, ranks_per_node: int) -> Iterator[Change]:
    now = run.parallel.context_parallel_size
    if run.parallel.cp_comm_type != ("p2p",):  # other ways have sizes of their own
        return
    for size in divisors(min(ranks_per_node, run.world_size)):
        if size > now:
            values = (("context_parallel_size", size),)
            yield Change(f"--context-parallel-size {size}", "parallel", values, cost=3 * (size / now - 1))


def _recomputation(run: RunConfig) -> Iterator[Change]:
    now = run.training.recompute_granularity
    if now is None:
        values = (("recompute_granularity", "selective"),)
        yield Change("--recompute-granularity selective", "training", values, cost=1)
    if now != "full":
        full = (("recompute_granularity", "full"), ("recompute_activations", False))
        yield Change("--recompute-granularity full", "training", full, cost=5)


def _micro_batch(run: RunConfig) -> Iterator[Change]:
    now = run.training.micro_batch_size
    for size in divisors(now)[:-1]:
        yield Change(f"--micro-batch-size {size}", "training", (("micro_batch_size", size),), cost=now / size)
