"""Parameters, FLOPs and memory of a run, from its model built without values.

Weights, gradients and optimizer state are exact up to the padding of buckets. Activations are those that each module's
``costs`` counts; tests compare them with the tensors that torch saves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from megatron.config.pipeline import Stage, model_stages
from megatron.config.run import RunConfig
from megatron.core.distributed.buffers import usual_bucket_size
from megatron.core.distributed.grad_sync import IN_FLIGHT, TIED_CHUNK
from megatron.core.distributed.parameter_policy import Policies, parameter_policies
from megatron.core.distributed.units import units_of
from megatron.core.models.train_spec import TrainSpec
from megatron.core.optimizer.matrix_updates import matrices_of
from megatron.core.optimizer.update_rule import MatrixRule
from megatron.core.optimizer.update_rules import UPDATE_RULES, state_bytes
from megatron.core.parallel.costs import Costs
from megatron.core.parallel.sharding import sharded_parameters, sharding_of
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.planning.model import planned_context, stage_model, stage_models, whole_model
from megatron.planning.schedule import StageNeeds, most_held, most_needed, schedule_facts
from megatron.planning.step_memory import Updated, step_bytes
from megatron.planning.unit_memory import UnitCosts

_SHARED_BYTES = 8  # of a parameter: the weight that workers share, and its outer momentum
_SENT_BYTES = 16  # of a parameter on its way: differences, as a message, what arrives, and its sum


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of the layers, of the final norm, and of everything before and after (``ends``)."""

    layers: int = 0
    final_norm: int = 0
    ends: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return self.layers + self.final_norm + self.ends


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step.

    ``kept``: activations at the end of the forward pass. ``working``: the most that the loss, or the backward pass of
    one layer (or of one recomputed run of layers), needs in addition. ``copies``: of weights in FP8, one for each
    direction in which products sum over them; of those that are gathered in FP8 one is among the weights.
    ``uncounted``: see ``Costs``. ``offloaded``: what is in main memory instead, and ``activations_offloaded`` with it.
    ``whole``: weights and gradients that are whole for a while only (ZeRO 2 and 3).
    ``updating``: copies that the optimizer makes of a part of its numbers at a time, or what ranks send each other of
    gradients or workers of weights, or weights in FP8 made whole for a checkpoint.
    ``shared``: what workers of DiLoCo share: weights in fp32, and their outer momentum.
    """

    weights: int
    gradients: int
    main_params: int
    moments: int
    kept: int
    working: int
    copies: int = 0
    uncounted: frozenset[str] = frozenset()
    offloaded: int = 0
    updating: int = 0
    whole: int = 0
    activations_offloaded: int = 0
    shared: int = 0

    @property
    def states(self) -> int:
        """What is allocated during the whole run."""
        return self.weights + self.gradients + self.main_params + self.moments + self.shared

    def with_units(self, peak: int, always: int, sums: int) -> MemoryEstimate:
        """The estimate with units that are whole for a while (ZeRO 2 and 3): a pass needs ``peak`` bytes at most, its
        activations, units and sums of gradients included, and ``always`` more. ``sums``: of the gradients, which aren't
        there from the start of a step on.
        """
        whole = peak + always - sums - self.kept - self.working
        return replace(self, whole=max(whole, 0), working=self.working + min(whole, 0))

    @property
    def total(self) -> int:
        """The peak in bytes."""
        return self.states + self.copies + max(self.kept + self.working + self.whole, self.updating)


def parameter_sizes(run: RunConfig, train_spec: TrainSpec) -> dict[str, int]:
    """Elements of every parameter of the whole model by name, without vocabulary padding, whose size must be known."""
    return {
        sharding.tied or name: math.prod(sharding.shape)
        for name, _, sharding in sharded_parameters(whole_model(run, train_spec))
    }


def model_parameters(run: RunConfig, train_spec: TrainSpec) -> int:
    """Parameters of the whole model, without vocabulary padding; the vocabulary size must be known."""
    return sum(parameter_sizes(run, train_spec).values())


def active_parameters(run: RunConfig, train_spec: TrainSpec) -> int:
    """Parameters that take part for one token: of experts, as many as a token chooses."""
    sizes = {
        sharding.tied or name: (math.prod(sharding.shape), getattr(parameter, "active_share", 1.0))
        for name, parameter, sharding in sharded_parameters(whole_model(run, train_spec))
    }
    return round(sum(size * share for size, share in sizes.values()))


def frozen_parameters(run: RunConfig, train_spec: TrainSpec) -> int:
    """Parameters that ``--freeze`` and ``--train-only`` exclude from training."""
    sizes = parameter_sizes(run, train_spec)
    return sum(size for name, size in sizes.items() if name not in run.optimizer.trained)


def rank_parameters(run: RunConfig, train_spec: TrainSpec, *, pipeline_rank: int = 0) -> ParameterCounts:
    """Parameters of one pipeline rank, with vocabulary padding; tied copies on the rank count once."""
    found = _held(run, train_spec, pipeline_rank)
    layers = sum(each.numel() for name, each in found.items() if ".layers." in name)
    final_norm = sum(each.numel() for name, each in found.items() if "final_layernorm" in name)
    return ParameterCounts(layers, final_norm, sum(each.numel() for each in found.values()) - layers - final_norm)


def _held(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> dict[str, nn.Parameter]:
    return {
        sharding.tied or name: parameter
        for stage in stage_models(run, train_spec, pipeline_rank=pipeline_rank)
        for name, parameter, sharding in sharded_parameters(stage)
    }


def beside_parameters(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int | None = None) -> int:
    """Parameters of what runs frozen beside the model, such as a teacher: of a rank of a pipeline, or of one without
    other ranks.
    """
    built = stage_models(run, train_spec, pipeline_rank=pipeline_rank)
    parts = (part for part in map(train_spec.beside, built) if part is not None)
    held = {
        sharding.tied or name: parameter for part in parts for name, parameter, sharding in sharded_parameters(part)
    }
    return sum(each.numel() for each in held.values())


def flops_per_sample(run: RunConfig, train_spec: TrainSpec) -> float:
    """Model FLOPs of one sample, forward and backward, without recomputation: what TFLOP/s and MFU are stated with.

    Gradients of frozen weights don't count. Gradients of hidden states do, even where all layers before are frozen.
    """
    return whole_costs(run, train_spec).training_flops / run.training.micro_batch_size


def whole_costs(run: RunConfig, train_spec: TrainSpec) -> Costs:
    """Costs of one microbatch in the whole model."""
    return _costs(run, train_spec, whole_model(run, train_spec))


def memory_estimate(run: RunConfig, train_spec: TrainSpec) -> MemoryEstimate:
    """Memory of the rank that needs most; the vocabulary size must be known."""
    ranks = (rank_peak(run, train_spec, rank) for rank in range(run.parallel.pipeline_model_parallel_size))
    return max(ranks, key=lambda each: each.total)


def rank_peak(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> MemoryEstimate:
    """Memory of one rank, with the activations that its schedule keeps at once."""
    by_stage = stage_costs(run, train_spec)
    # A split backward pass holds what has come back until gradients of weights are computed: no less than without.
    splits = PipelineSettings.of(run).splits_backward
    here = [costs.kept + costs.offloaded * splits for costs in by_stage]
    kept = most_held(run, here, _received(run, train_spec))[pipeline_rank]
    away = schedule_facts(run, [costs.offloaded for costs in by_stage]).peaks[pipeline_rank]
    memory = _rank_memory(run, train_spec, pipeline_rank, by_stage, kept=int(kept))
    if run.parallel.zero_stage > 1 and not run.purpose.only_reads:
        peak = most_needed(run, here, _received(run, train_spec), _unit_needs(run, train_spec))[pipeline_rank]
        memory = memory.with_units(int(peak), *_units_of_rank(run, train_spec, pipeline_rank))
    return replace(memory, activations_offloaded=int(away))


def _unit_needs(run: RunConfig, train_spec: TrainSpec) -> list[StageNeeds]:
    """What each stage needs beside activations with ZeRO 2 and 3, units included."""
    first, later = (
        [
            _costs(run, train_spec, model, unit_costs(run, model, is_last=stage.is_last, accumulates=accumulates))
            for model, stage in zip(stage_models(run, train_spec), model_stages(run))
        ]
        for accumulates in (False, True)
    )
    sums = (unit_costs(run, model).sums for model in stage_models(run, train_spec))
    return [StageNeeds(*each) for each in zip((one.working for one in first), (one.working for one in later), sums)]


def _units_of_rank(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> tuple[int, int]:
    """Bytes of units that are whole all the time while a rank computes, and of the sums of gradients."""
    costs = [unit_costs(run, model) for model in stage_models(run, train_spec, pipeline_rank=pipeline_rank)]
    return sum(each.always for each in costs), sum(each.sums for each in costs)


def unit_costs(run: RunConfig, model: nn.Module, *, is_last: bool = False, accumulates: bool = False) -> UnitCosts:
    """What ZeRO 2 and 3 add to the costs of a stage; see ``UnitCosts``."""
    named = {sharding.tied or name: parameter for name, parameter, sharding in sharded_parameters(model)}
    policies = parameter_policies(named.items(), run.optimizer)
    return UnitCosts(
        run,
        model,
        partial(_shards, run),
        policies={parameter: policies[name] for name, parameter in named.items()},
        gathered=partial(_gathered_bytes, run, frozenset(_multiplied_in_fp8(run, [model]))),
        of_gradient=2 if run.precision.grad_reduce_in_bf16 else 4,
        is_last=is_last,
        accumulates=accumulates,
    )


def _gathered_bytes(run: RunConfig, in_fp8: frozenset[nn.Parameter], parameter: nn.Parameter) -> tuple[int, int]:
    """Bytes of an element of a weight that ranks gather with ZeRO 3, and of the copies that a layer makes of it."""
    if run.parallel.zero_stage < 3:
        return 0, 0
    width = planned_context(run).dtype.itemsize
    if parameter not in in_fp8:
        return width, 0
    return (1, 1) if run.fp8.fp8_param_gather and parameter.requires_grad else (width, 2)


def _received(run: RunConfig, train_spec: TrainSpec) -> list[int]:
    """Bytes of a microbatch that each stage receives from the one before."""
    context = planned_context(run)
    return [
        sum(
            math.prod(spec.shape) * spec.dtype.itemsize
            for spec in train_spec.stage_inputs(run, stage, context).values()
        )
        for stage in model_stages(run)
    ]


def rank_memory(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> MemoryEstimate:
    """Memory of one rank that keeps the activations of one microbatch in each of its stages."""
    by_stage = stage_costs(run, train_spec)
    kept = sum(costs.kept for costs, stage in zip(by_stage, model_stages(run)) if stage.rank == pipeline_rank)
    memory = _rank_memory(run, train_spec, pipeline_rank, by_stage, kept=kept)
    if run.parallel.zero_stage > 1 and not run.purpose.only_reads:
        needs = [
            each for each, stage in zip(_unit_needs(run, train_spec), model_stages(run)) if stage.rank == pipeline_rank
        ]
        always, sums = _units_of_rank(run, train_spec, pipeline_rank)
        memory = memory.with_units(int(kept + max(each.later for each in needs)) + sums, always, sums)
    return memory


def stage_costs(run: RunConfig, train_spec: TrainSpec) -> list[Costs]:
    """Costs of one microbatch in each stage, first to last, on one of the ranks that share the stage."""
    return [_costs(run, train_spec, stage) for stage in stage_models(run, train_spec)]


def stage_flops(run: RunConfig, train_spec: TrainSpec, stage: Stage) -> float:
    """Training FLOPs of one microbatch in a stage of the run's model, which need not be one of its stages."""
    return _costs(run, train_spec, stage_model(run, train_spec, stage)).training_flops


def _rank_memory(
    run: RunConfig, train_spec: TrainSpec, pipeline_rank: int, by_stage: Sequence[Costs], *, kept: int
) -> MemoryEstimate:
    named = _held(run, train_spec, pipeline_rank)
    held = named.values()
    parameters, beside = sum(each.numel() for each in held), beside_parameters(run, train_spec, pipeline_rank)
    trained = 0 if run.purpose.only_reads else sum(each.numel() for each in held if each.requires_grad)
    mine = [costs for costs, stage in zip(by_stage, model_stages(run)) if stage.rank == pipeline_rank]
    width = planned_context(run).dtype.itemsize
    kept_by = {} if run.purpose.only_reads else parameter_policies(named.items(), run.optimizer)
    sizes = {
        name: -(-named[name].numel() // _state_shards(run, named[name]))
        for name in kept_by
        if named[name].requires_grad
    }
    owned = sum(sizes.values())
    states = sum(size * state_bytes(kept_by[name].update_rule, run.optimizer) for name, size in sizes.items())
    of_matrices = _matrix_state(run, {name: named[name] for name in sizes}, kept_by)
    optimizer, multiplied_in_fp8 = run.optimizer, in_fp8(run, train_spec, pipeline_rank)
    in_bytes = [each for each in multiplied_in_fp8 if each.requires_grad and _shards(run, each) > 1]
    in_bytes = in_bytes if run.fp8.fp8_param_gather and not run.purpose.only_reads else []
    gathered, own = sum(each.numel() for each in in_bytes), sum(each.numel() // _shards(run, each) for each in in_bytes)
    by_unit = run.parallel.zero_stage == 3 and not run.purpose.only_reads  # copies go with their unit
    copies = 2 * sum(each.numel() for each in multiplied_in_fp8 if not by_unit or _shards(run, each) == 1)
    copies -= 0 if by_unit else gathered
    here = owned - int(owned * optimizer.optimizer_offload_fraction * optimizer.optimizer_cpu_offload)
    outer = 0 if run.parallel.diloco_workers is None else _SHARED_BYTES
    away = states * (owned - here) // max(owned, 1)
    received, overlaps = _received_gradients(run, trained), run.parallel.overlap_grad_reduce
    stage, of_gradient = run.parallel.zero_stage, 2 if run.precision.grad_reduce_in_bf16 else 4
    if by_unit:
        parameters = _of_shards(run, held)
    return MemoryEstimate(
        weights=(parameters + beside) * width + (own if stage == 3 else own * width - gathered * (width - 1)),
        gradients=(_of_shards(run, (named[name] for name in sizes)) if stage >= 2 else trained) * of_gradient,
        main_params=here * _master_bits(run, width) // 8,
        moments=states - away + of_matrices,
        updating=max(
            step_bytes(run, _updated(run, train_spec, pipeline_rank), here=here),
            received,
            (0 if by_unit else gathered * width - copies) + _quantized_at_a_time(run, in_bytes),
            owned // run.diloco.diloco_fragments * _SENT_BYTES if run.parallel.num_workers > 1 else 0,
            0 if run.purpose.only_reads else _tied_gradients(run, train_spec, pipeline_rank),
        ),
        offloaded=away + (owned - here) * ((4 if width < 4 else 0) + outer),
        shared=here * outer,
        kept=0 if run.purpose.only_reads else kept,
        working=max(costs.working for costs in mine) + received * overlaps,
        copies=copies,
        uncounted=frozenset().union(*(costs.uncounted for costs in mine)),
    )


def _updated(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> dict[str, Updated]:
    """The parameters that a pipeline rank trains, with what a step does to them."""
    found = dict[str, Updated]()
    for model in () if run.purpose.only_reads else stage_models(run, train_spec, pipeline_rank=pipeline_rank):
        units = {each: unit.name for unit in units_of(model) for each in unit.parameters}
        named = {sharding.tied or name: each for name, each, sharding in sharded_parameters(model)}
        policies = parameter_policies(named.items(), run.optimizer)
        for name, each in named.items():
            is_divided = run.parallel.zero_stage > 1 and _shards(run, each) > 1
            key = sharding_of(each).tied or (units[each] if is_divided else None)
            if each.requires_grad:
                found[name] = Updated(each, policies[name], _state_shards(run, each), key)
    return found


def _matrix_state(run: RunConfig, trained: Mapping[str, nn.Parameter], policies: Policies) -> int:
    """Bytes that rules of matrices keep for those of a stage, an equal part of them on each of its ranks."""
    config, found = run.optimizer, 0
    for name, parameter in trained.items():
        rule = UPDATE_RULES[policies[name].update_rule](config)
        if isinstance(rule, MatrixRule):
            states = (rule.matrix_state(matrix.shape).values() for matrix in matrices_of(parameter, config))
            found += 4 * sum(math.prod(shape) for each in states for shape in each)
    return found // (run.world_size // run.parallel.pipeline_model_parallel_size)


def _quantized_at_a_time(run: RunConfig, weights: Sequence[nn.Parameter]) -> int:
    """Bytes that a rank makes to quantize its part of a matrix of ``weights``: multiples of it, and codes. By blocks
    also their scales, spread over it, and rows around it.
    """
    wide, by_blocks = max(planned_context(run).dtype.itemsize, 4), run.fp8.fp8_recipe == "blockwise"
    part = min(max((math.prod(each.shape[-2:]) for each in weights), default=0), _of_shards(run, weights))
    return part * (wide + 1 + (wide + 2) * by_blocks)


def _received_gradients(run: RunConfig, trained: int) -> int:
    """Bytes of all ranks' parts of the buckets that are summed in fp32, and of one sum, but for a larger bucket of a
    tied parameter's.
    """
    parallel, ranks = run.parallel, run.data_parallel_size * run.parallel.context_parallel_size
    wide = parallel.ddp_reduce_scatter_with_fp32_accumulation and run.precision.grad_reduce_in_bf16
    if not wide or ranks == 1:
        return 0
    bucket = min(trained, parallel.ddp_bucket_size or usual_bucket_size(ranks))
    return 2 * min(trained, IN_FLIGHT * bucket) + 4 * bucket // ranks


def _tied_gradients(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> int:
    """Bytes to sum a part of the gradient of a parameter that pipeline ranks share: the other's, or, of several ranks,
    theirs twice and the sum.
    """
    ranks = range(run.parallel.pipeline_model_parallel_size)
    held, most = [_held(run, train_spec, rank) for rank in ranks], 0
    for name, parameter in held[pipeline_rank].items():
        holders = sum(name in each for each in held)
        if holders > 1 and parameter.requires_grad:
            part = min(-(-parameter.numel() // _shards(run, parameter)), TIED_CHUNK)
            most = max(most, part * (1 if holders == 2 else 2 * holders))
    return most * (2 if run.precision.grad_reduce_in_bf16 else 4)


def _master_bits(run: RunConfig, weight_bytes: int) -> int:
    """Bits of master storage per parameter: none for fp32 weights, else 32, or 17 with the precision-aware optimizer in
    bf16.
    """
    if weight_bytes >= 4:
        return 0
    return 17 if run.optimizer.use_precision_aware_optimizer and run.precision.bf16 else 32


def in_fp8(run: RunConfig, train_spec: TrainSpec, pipeline_rank: int) -> list[nn.Parameter]:
    """Weights that layers of a pipeline rank multiply by in FP8."""
    return _multiplied_in_fp8(run, stage_models(run, train_spec, pipeline_rank=pipeline_rank))


def _multiplied_in_fp8(run: RunConfig, stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [
        module.get_parameter("weight")
        for stage in (stages if run.fp8.is_on else ())
        for module in stage.modules()
        if getattr(module, "fp8", None) is not None
    ]


def _shards(run: RunConfig, parameter: nn.Parameter) -> int:
    """Ranks over which what the stage of ZeRO divides of a parameter is divided."""
    parallel = run.parallel
    return replicas_of(run, parameter) // parallel.num_distributed_optimizer_instances if parallel.zero_stage else 1


def replicas_of(run: RunConfig, parameter: nn.Parameter) -> int:
    """Ranks that hold the same part of a parameter and sum its gradients."""
    parallel = run.parallel
    replicas = run.data_parallel_size * parallel.context_parallel_size
    if "edp" not in sharding_of(parameter).reduce:
        return replicas
    experts = parallel.expert_model_parallel_size * parallel.etp
    return replicas * parallel.tensor_model_parallel_size // experts


def _of_shards(run: RunConfig, parameters: Iterable[nn.Parameter]) -> int:
    """Elements of this rank's shards."""
    return sum(-(-each.numel() // _shards(run, each)) for each in parameters)


def _state_shards(run: RunConfig, parameter: nn.Parameter) -> int:
    """Ranks over which the optimizer state of a parameter is divided."""
    over_copies = run.parallel.outer_dp_sharding_strategy == "optim"
    return replicas_of(run, parameter) if over_copies else _shards(run, parameter)


def _costs(run: RunConfig, train_spec: TrainSpec, model: nn.Module, units: UnitCosts | None = None) -> Costs:
    workload = train_spec.workload(run, planned_context(run))
    workload = replace(workload, splits_backward=PipelineSettings.of(run).splits_backward)
    return train_spec.costs(model, workload if units is None else replace(workload, with_unit=units))
