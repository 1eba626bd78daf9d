"""Runs one rank on a pretended accelerator: model, some steps, an evaluation, generation, and a checkpoint."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.checkpoint.planner import SavePlan
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.core.checkpointing.save import SavePlanner
from megatron.core.checkpointing.sharded_view import Staging, sharded_views
from megatron.core.datasets import mock as mock_data
from megatron.core.distributed import buffers
from megatron.core.distributed.transient import TransientTensor
from megatron.core.inference.request import Request
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.launch import DTYPES, mesh_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.tensor_parallel import initialize
from megatron.planning.model import stage_models
from megatron.rehearsal.accelerator import DEVICE_TYPE, Waits, pretending, register
from megatron.rehearsal.experts import balanced
from megatron.rehearsal.recorder import Memory, Operation, Recorder
from megatron.rehearsal.task import Task
from megatron.training.checkpoints.trained_model import model_in_training
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.evaluation.generating import engine_of_every_rank
from megatron.training.run import agreement
from megatron.training.run.data import TrainingData
from megatron.training.run.run import Run
from megatron.training.run.run import build_run as build_run
from megatron.training.run.stages import stages_here
from megatron.training.step import train_step as train_step


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a rank did. ``operations``: of the whole rehearsal, and of its last step. ``waits``: in the last step, by
    place in the program. ``states``, ``highest``: bytes that are held between steps, and at most in one; ``weights``,
    ``gradients``: of ``states``. ``save``: which boxes of which tensors it would write to a checkpoint, were it alone.
    """

    pipeline_rank: int
    world_size: int
    parallel: ParallelConfig
    operations: Sequence[Operation]
    last_step: Sequence[Operation]
    refused: Sequence[str]
    waits: Counter[str]
    states: int
    weights: int
    gradients: int
    highest: int
    save: SavePlan


def rehearse(task: Task, *, failed: Callable[[Exception], None]) -> Rehearsed:
    """Take the task's steps as its rank, evaluate if the run does, generate a text if its model does, and plan a
    checkpoint. Steps before the last, evaluation and text are of one microbatch.

    ``failed``: called with an error in a backward pass, which ends the process.
    """
    config, train_spec, rank = task.config, task.train_spec, task.rank
    device = register(memory=task.memory)
    waits, recorder, held = Waits(), Recorder(rank), Memory()
    with (
        _world(rank, config.world_size),
        ExitStack() as stack,
        pretending(waits, failed, (recorder.see, held.see)) as mode,
        recorder.recording(),
        _answers(config, train_spec),
        mock.patch.object(TransientTensor, TransientTensor._resize.__name__, _counted_by(held)),
        mock.patch.object(initialize, initialize._drawn_rows.__name__, _rows_at_once),
        mock.patch.object(mock_data, "_NUM_DOCUMENTS", min(mock_data._NUM_DOCUMENTS, 100 * config.data.seq_length)),
    ):
        context = _context(config, device, rank)
        stack.enter_context(balanced(context.mesh, waits))
        run = build_run(config, train_spec, context)
        with unset_fake_temporarily():
            on_cpu = dataclasses.replace(context, device=torch.device("cpu"))
            data = TrainingData(run.config, train_spec, on_cpu, run.tokenizer)
        batches = _on_device(mode, device, data.training_batches(0))
        states, begun = held.held, 0
        for left in reversed(range(task.steps)):
            microbatches = next(batches)
            waits.places.clear()
            begun = len(recorder.operations)
            train_step(run, microbatches[:1] if left else microbatches)
            del microbatches
            states = held.held
        of_step, in_step, highest = recorder.operations[begun:], Counter(waits.places), held.highest
        buffers = [*run.buffers, *run.frozen]
        own = [each for buffer in buffers for each in (buffer.params, buffer.codes, buffer.shards)]
        held_models = [*run.models, *filter(None, map(run.train_spec.beside, run.models))]
        weights = _bytes([*own, *(each for model in held_models for each in model.parameters())])
        sums = [bucket.grad_sums for buffer in buffers for bucket in buffer.buckets]
        gradients = _bytes([*(buffer.grads for buffer in buffers), *(each.flat for each in sums if each is not None)])
        if run.config.training.eval_iters:
            for name in data.evaluated("valid")[:1]:
                found = data.evaluation_batches("valid", evaluation=0, name=name)
                evaluate(run, (batch[:1] for batch in _on_device(mode, device, found)))
        if train_spec.continues_texts:
            _generate(run)
        save = _plan_save(run, recorder)
    gc.collect()
    return Rehearsed(
        pipeline_rank=context.mesh.rank("pp"),
        world_size=config.world_size,
        parallel=config.parallel,
        operations=[dataclasses.replace(each) for each in recorder.operations],
        last_step=of_step,
        refused=recorder.refused,
        waits=in_step,
        states=states,
        weights=weights,
        gradients=gradients,
        highest=highest,
        save=save,
    )


def _counted_by(memory: Memory) -> Callable[[TransientTensor, int], None]:
    """The change of a transient tensor's size, which ``memory`` sees."""
    resize = TransientTensor._resize

    def counted(tensor: TransientTensor, size: int) -> None:
        resize(tensor, size)
        memory.see_resized(tensor.flat)

    return counted


def _bytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = [each.untyped_storage() for each in tensors if each is not None]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


@contextmanager
def _world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group(f"cpu:fake,{DEVICE_TYPE}:fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        with mock.patch.object(dist.ProcessGroup, "_has_hooks", return_value=False):  # it warns of none
            dist.destroy_process_group()


def _context(config: RunConfig, device: torch.device, rank: int) -> ParallelContext:
    mesh = mesh_of(config.parallel, world_size=config.world_size, rank=rank)
    rng, dtype = RngStreams(config.training.seed, mesh, device), DTYPES[config.precision.params_dtype]
    return ParallelContext.of(config.parallel, mesh=mesh, rng=rng, device=device, dtype=dtype)


def _on_device(
    mode: FakeTensorMode, device: torch.device, batches: Iterator[list[Microbatch]]
) -> Iterator[list[Microbatch]]:
    """Batches that are read with their values, as tensors of the device."""
    while True:
        with unset_fake_temporarily():
            batch = next(batches, None)
        if batch is None:
            return
        yield [
            dataclasses.replace(
                each, tensors={name: mode.from_tensor(tensor).to(device) for name, tensor in each.tensors.items()}
            )
            for each in batch
        ]


def _generate(run: Run) -> None:
    """Two tokens: a step that reads the prompt, and one that reads keys and values from the cache."""
    placed = model_in_training(run)
    engine = engine_of_every_rank(placed, length=8, max_requests=1)
    if engine is not None:
        with run.evaluating():
            engine.generate([Request(id="text", prompt=(1, 2, 3), max_tokens=2)])


def _plan_save(run: Run, recorder: Recorder) -> SavePlan:
    """What this rank would write, and a copy of it in main memory, as for ``--async-save``."""
    mesh = run.context.mesh
    views = sharded_views(chain(run.model_state(), run.optimizer.entries()), mesh)
    planner, staging = SavePlanner(mesh, views), Staging()
    plan: SavePlan = planner.create_local_plan()
    elsewhere = {name: view.device.type for name, view in views.items() if view.device.type != DEVICE_TYPE}
    settings = run.config.optimizer  # with remainders, wide masters exist in main memory alone, for the save
    kept_there = "optimizer." if settings.optimizer_cpu_offload or settings.use_precision_aware_optimizer else ()
    recorder.refused += [
        f"a checkpoint's {name} is on the {device}"
        for name, device in elsewhere.items()
        if not name.startswith(kept_there)
    ]
    for item in plan.items:
        if item.index.fqn not in elsewhere:
            planner.resolve_data(item)
    for name in views.keys() - elsewhere.keys():
        views[name].copied(staging, name)
    return plan


@contextmanager
def _answers(config: RunConfig, train_spec: TrainSpec) -> Iterator[None]:
    """In the block, the other ranks say what this one would say in their place."""
    stages = range(config.parallel.pipeline_model_parallel_size)

    def world(mesh: Mesh, by_stage: Sequence[Any]) -> list[Any]:
        return [by_stage[mesh.dense.coordinates(rank)["pp"]] for rank in range(mesh.world_size)]

    def held_stages(here: Any, mesh: Mesh) -> list[Any]:
        return world(mesh, [stages_here(config, _at_stage(config, stage)) for stage in stages])

    def tied_names(here: Collection[str], mesh: Mesh) -> list[Any]:
        tied = [
            {sharding.tied for model in models for _, _, sharding in sharded_parameters(model) if sharding.tied}
            for models in (stage_models(config, train_spec, pipeline_rank=stage) for stage in stages)
        ]
        if here != tied[mesh.rank("pp")]:  # of frozen parameters alone
            tied = [{name for name in names if name not in config.optimizer.trained} for names in tied]
        return world(mesh, tied)

    def alike(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    with (
        mock.patch.object(agreement, "gather_objects", held_stages),
        mock.patch.object(buffers, "gather_objects", tied_names),
        mock.patch.object(dist, "all_gather_object", alike),
    ):
        yield


def _at_stage(config: RunConfig, stage: int) -> ParallelContext:
    """The context of the first rank of a pipeline stage."""
    grid = mesh_of(config.parallel, world_size=config.world_size, rank=0).dense
    rank = next(rank for rank in range(config.world_size) if grid.coordinates(rank)["pp"] == stage)
    mesh = mesh_of(config.parallel, world_size=config.world_size, rank=rank)
    return dataclasses.replace(ParallelContext.single(), mesh=mesh)


def _rows_at_once(
    shape: tuple[int, ...], start: int, stop: int, drawn: object, *, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Initial weights in one block, as none is drawn."""
    yield start, torch.empty(stop - start, *shape[1:])
