"""What data parallelism sends in a step: gradients and weights, inside of copies of what ranks divide, and between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from torch import nn

from megatron.config.report import gigabytes
from megatron.config.run import RunConfig
from megatron.core.distributed.units import units_of
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.sharding import sharding_of
from megatron.planning.estimate import in_fp8, replicas_of
from megatron.planning.model import planned_context, stage_models


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank sends in a step around rings, as networks without switches do: to ranks of its copy of what
    ranks divide, and, ``between`` copies, to those of others.
    """

    gradients: float = 0
    weights: float = 0
    gradients_between: float = 0
    weights_between: float = 0

    @property
    def total(self) -> float:
        """All of them."""
        return self.gradients + self.weights + self.gradients_between + self.weights_between


def sent_bytes(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> SentBytes:
    """What each rank of a pipeline rank's stages sends, without the padding of buckets, in a full global batch."""
    if run.purpose.only_reads:
        return SentBytes()
    stages = stage_models(run, train_spec, pipeline_rank=pipeline_rank)
    in_8_bits = set(in_fp8(run, train_spec, pipeline_rank)) if run.fp8.fp8_param_gather else set[nn.Parameter]()
    parts = [_sent(run, each, in_8_bits=each.parameter in in_8_bits) for each in _exchanges(run, stages)]
    return SentBytes(*(sum(numbers) for numbers in zip(*map(astuple, parts))))


@dataclass(frozen=True)
class _Exchanges:
    """How often ranks gather a parameter and sum its gradients in a step."""

    parameter: nn.Parameter
    gathers: int
    sums: int


def _exchanges(run: RunConfig, stages: Sequence[nn.Module]) -> Iterator[_Exchanges]:
    """Exchanges of each parameter of a rank's stages. ZeRO 3 gathers layers for forward and backward passes of each
    microbatch, unless no gradient comes so far; embeddings, whose gradients don't depend on them, and output weights,
    of which the loss makes gradients on the way, for forward passes alone, where one is both for each use; with ZeRO 2
    and 3 gradients are summed after each.
    """
    stage, passes = run.parallel.zero_stage, run.num_microbatches()
    seen, reaches = set[str | nn.Parameter](), False
    for unit in (unit for model in stages for unit in units_of(model)):
        reaches = reaches or any(each.requires_grad for each in unit.parameters)
        is_anywhere = unit.layer is None and unit.module is None
        tables = [sharding_of(each) for each in unit.parameters if sharding_of(each).kind == "table"]
        is_table = unit.module is not None and any(each.tied is None for each in tables)
        for parameter in unit.parameters:
            key = sharding_of(parameter).tied or parameter
            is_first, is_trained = key not in seen, parameter.requires_grad
            seen.add(key)
            gathers = int(is_first and is_trained)
            if stage == 3 and run.parallel.keeps_gathered_weights:
                gathers = int(is_first)
            elif stage == 3:
                gathers = passes * (2 if (reaches and not is_table) or is_anywhere else 1)
            sums = passes if stage >= 2 else int(is_first)
            yield _Exchanges(parameter, gathers if stage else 0, sums if is_trained else 0)


def _sent(run: RunConfig, each: _Exchanges, *, in_8_bits: bool) -> SentBytes:
    parallel, elements, ranks = run.parallel, each.parameter.numel(), replicas_of(run, each.parameter)
    of_gradient = 2 if run.precision.grad_reduce_in_bf16 else 4
    width = planned_context(run).dtype.itemsize
    if parallel.zero_stage == 0:
        return SentBytes(gradients=2 * _of_ring(elements * of_gradient, ranks) * each.sums)
    copies = parallel.num_distributed_optimizer_instances
    shards, shard = ranks // copies, elements * copies / ranks
    between, is_trained = _of_ring(shard * of_gradient, copies), each.sums > 0
    divides_state = parallel.outer_dp_sharding_strategy == "optim" and copies > 1
    return SentBytes(
        gradients=_of_ring(elements * of_gradient, shards) * each.sums,
        weights=_of_ring(elements * (1 if in_8_bits else width), shards) * each.gathers,
        gradients_between=between * (1 if divides_state else 2) * is_trained,
        weights_between=_of_ring(shard * width, copies) * (divides_state and is_trained),
    )


def _of_ring(size: float, ranks: int) -> float:
    """Bytes that each of ``ranks`` sends so that all have ``size`` bytes, or the sum of as many in equal parts."""
    return size * (ranks - 1) / ranks


def communication_report(run: RunConfig, train_spec: TrainSpec) -> list[str]:
    """Lines about what the pipeline rank that sends most sends; none where replicas exchange nothing."""
    ranks = range(run.parallel.pipeline_model_parallel_size)
    sent = max((sent_bytes(run, train_spec, rank) for rank in ranks), key=lambda each: each.total)
    if not sent.total:
        return []
    weights = f" and {gigabytes(sent.weights)} of weights" if sent.weights else ""
    lines = [f"a rank sends {gigabytes(sent.gradients)} of gradients{weights} in a step"]
    if run.parallel.num_distributed_optimizer_instances > 1:
        weights = f" and {gigabytes(sent.weights_between)} of weights" if sent.weights_between else ""
        lines[0] += " to ranks of its copy"
        lines.append(f"and {gigabytes(sent.gradients_between)} of gradients{weights} to ranks of other copies")
    return lines
