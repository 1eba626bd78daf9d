"""Pipeline stages of models whose layers differ or can't be divided evenly: cut by the FLOPs of each layer."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Sequence

from megatron.config.pipeline import Stage, num_stages
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.planning.estimate import stage_flops, whole_costs


def with_stages(run: RunConfig, train_spec: TrainSpec) -> RunConfig:
    """The run with ``stage_layers`` by FLOPs, unless flags say how to cut it, all layers cost alike and divide, or some
    module's costs aren't known.

    The vocabulary size must be known.
    """
    parallel, stages = run.parallel, num_stages(run)
    asked = (
        run.segments,
        parallel.pipeline_model_parallel_layout,
        parallel.num_layers_per_virtual_pipeline_stage,
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
        parallel.account_for_embedding_in_pipeline_split,
        parallel.account_for_loss_in_pipeline_split,
    )
    if stages == 1 or any(asked) or whole_costs(run, train_spec).uncounted:
        return run

    def flops(number: int, *, is_first: bool = False, is_last: bool = False) -> float:
        return stage_flops(run, train_spec, Stage(range(number, number + 1), is_first=is_first, is_last=is_last))

    layers = [flops(number) for number in range(run.num_layers)]
    are_alike = max(layers) <= min(layers) * (1 + 1e-9) and not run.model.mtp_num_layers
    if not any(layers) or (are_alike and len(layers) % stages == 0):
        return run
    layers[0], layers[-1] = flops(0, is_first=True), flops(len(layers) - 1, is_last=True)
    cut = dataclasses.replace(parallel, stage_layers=tuple(even_cut(layers, stages)))
    return dataclasses.replace(run, parallel=cut)


def even_cut(costs: Sequence[float], parts: int) -> list[int]:
    """How many consecutive ``costs`` each of ``parts`` gets, at least one, so that the costliest part costs least; with
    that bound kept, each part comes as near as it can to an even share of what is left.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    low, high = max(costs), sums[-1]
    while high - low > 1e-12 * sums[-1]:
        middle = (low + high) / 2
        low, high = (low, middle) if _parts_needed(sums, middle)[0] <= parts else (middle, high)
    bound = high * (1 + 1e-9)
    needed = _parts_needed(sums, bound)
    sizes, start = list[int](), 0
    for left in range(parts, 0, -1):
        share = (sums[-1] - sums[start]) / left
        ends = [
            end
            for end in range(start + 1, len(costs) - left + 2)
            if sums[end] - sums[start] <= bound and needed[end] <= left - 1
        ]
        end = min(ends, key=lambda end: abs(sums[end] - sums[start] - share))
        sizes.append(end - start)
        start = end
    return sizes


def _parts_needed(sums: Sequence[float], bound: float) -> list[int]:
    """The least number of parts, none above ``bound``, for the costs from each position on."""
    count = len(sums) - 1
    needed = [0] * (count + 1)
    for start in reversed(range(count)):
        end = min(bisect_right(sums, sums[start] + bound), count + 1) - 1
        needed[start] = 1 + needed[max(end, start + 1)]
    return needed
