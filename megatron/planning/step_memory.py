"""What an optimizer step makes beside its state: copies of a part at a time, and matrices on their way to one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.config.run import RunConfig
from megatron.core.distributed.buffers import usual_bucket_size
from megatron.core.distributed.layout import ALIGNMENT, PlannedBucket, lay_out
from megatron.core.distributed.parameter_policy import ParameterPolicy
from megatron.core.optimizer.matrix_updates import dealt, matrices_of
from megatron.core.optimizer.optimizer import CHUNK
from megatron.core.optimizer.update_rule import MatrixRule
from megatron.core.optimizer.update_rules import ROUNDED_STOCHASTICALLY, UPDATE_RULES, is_narrow
from megatron.core.parallel.sharding import sharding_of


@dataclass(frozen=True)
class Updated:
    """A trained parameter of a rank. ``parts``: ranks that divide its update. ``unit``: see ``lay_out``."""

    parameter: nn.Parameter
    policy: ParameterPolicy
    parts: int
    unit: str | None = None


def step_bytes(run: RunConfig, updated: Mapping[str, Updated], *, here: int) -> int:
    """Bytes that a step of the optimizer makes at most, on one rank of a stage. ``updated``: the stage's parameters by
    name, in their order. ``here``: elements that the rank updates on its device.
    """
    buffers = defaultdict[Hashable, list[Updated]](list)
    for each in reversed([*updated.values()]):
        buffers[sharding_of(each.parameter).reduce, each.policy].append(each)
    ranks = run.world_size // run.parallel.pipeline_model_parallel_size
    by_chunk, loads, moved = 0, [0.0] * ranks, list[list[_Moved]]()
    for group in buffers.values():
        layout, rule = _layout(run, group), UPDATE_RULES[group[0].policy.update_rule](run.optimizer)
        largest = max(planned.span.size for planned in layout) // group[0].parts
        by_chunk = max(by_chunk, _copied_bytes(run, group[0].policy.update_rule) * min(here, CHUNK, largest))
        if isinstance(rule, MatrixRule):
            moved += _buckets(run, rule, group, layout, loads)
    return max(by_chunk, _of_matrices(moved))


def _layout(run: RunConfig, group: Sequence[Updated]) -> list[PlannedBucket]:
    """Where the parameters of a buffer lie."""
    parts = group[0].parts
    return lay_out(
        [(each.parameter.numel(), each.unit) for each in group],
        bucket_size=run.parallel.ddp_bucket_size or usual_bucket_size(parts),
        multiple=parts * ALIGNMENT,
    )


def _copied_bytes(run: RunConfig, name: str) -> int:
    """Bytes of temporary copies per parameter that is updated: fp32 copies of narrow numbers, two of integers to make
    those narrow, and what the rule makes.
    """
    config, rule = run.optimizer, UPDATE_RULES[name](run.optimizer)
    narrow = [state for state in rule.state_names if is_narrow(state, config)]
    remainders = config.use_precision_aware_optimizer and run.precision.bf16
    splits_bits = remainders or any(state in ROUNDED_STOCHASTICALLY for state in narrow)
    copied = len(narrow) + remainders + run.precision.grad_reduce_in_bf16
    return 4 * (copied + (2 if isinstance(rule, MatrixRule) else rule.temporaries)) + 8 * splits_bits


@dataclass(frozen=True)
class _Moved:
    """A bucket of matrices on one rank: bytes of its part of the numbers, of the matrices that it owns, of what
    transforming them takes, and of copies of a chunk. ``sources``: kinds of numbers that are gathered.
    """

    part: int = 0
    owned: int = 0
    workspace: int = 0
    copied: int = 0
    sources: int = 0


def _of_matrices(buckets: Sequence[Sequence[_Moved]]) -> int:
    """The most bytes on a rank while one bucket's matrices leave for their owners, those of the one before are
    transformed, and updates of the one before that come back. ``buckets``: each for every rank of the stage.
    """
    most, nothing, sends = 0, _Moved(), bool(buckets) and len(buckets[0]) > 1
    for of_rank in zip(*buckets):
        for leaving, there, returning in zip(
            [*of_rank, nothing, nothing], [nothing, *of_rank, nothing], [nothing, nothing, *of_rank]
        ):
            # What is on its way: numbers that were sent, and as much memory for those that arrive.
            on_its_way, arriving, back = (each.part + each.owned * sends for each in (leaving, there, returning))
            before = there.sources * arriving + back + max(leaving.sources - 1, 0) * on_its_way
            after, updates = leaving.sources * on_its_way + back, there.owned
            moments = (
                before + leaving.part + max(leaving.copied, on_its_way),
                after + (there.sources + 1) * there.owned,
                after + there.sources * there.owned + updates + there.workspace,
                after + updates + there.part * sends + there.owned,
                after - back + arriving + 2 * returning.part,
                after - back + arriving + returning.part + returning.copied,
            )
            most = max(most, *moments)
    return most


def _buckets(
    run: RunConfig,
    rule: MatrixRule,
    group: Sequence[Updated],
    layout: Sequence[PlannedBucket],
    loads: list[float],
) -> Iterator[list[_Moved]]:
    """The buckets of parameters of one buffer, each for every rank of the stage."""
    remaining = iter(group)
    for planned in layout:
        members = [next(remaining) for _ in planned.members]
        shapes = [[matrix.shape for matrix in matrices_of(each.parameter, run.optimizer)] for each in members]
        owned = [list[tuple[int, int]]() for _ in loads]
        for each, owners in zip(shapes, dealt(shapes, loads)):
            for shape, owner in zip(each, owners):
                owned[owner].append(shape)
        elements = planned.span.size // group[0].parts
        copied = _copied_bytes(run, group[0].policy.update_rule) * min(elements, CHUNK)
        yield [
            _Moved(
                4 * elements,
                4 * sum(map(math.prod, each)),
                rule.workspace(each),
                copied,
                sources=1 + rule.reads_weights,
            )
            for each in owned
        ]
