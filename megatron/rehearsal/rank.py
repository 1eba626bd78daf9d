"""One rank of a run, from its model to some steps and an evaluation, on a pretended accelerator."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.launch import DTYPES, mesh_of
from megatron.core.parallel.rng import RngStreams
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.tensor_parallel import initialize
from megatron.rehearsal.accelerator import DEVICE_TYPE, Waits, pretending, register
from megatron.rehearsal.experts import balanced
from megatron.rehearsal.recorder import Memory, Operation, Recorder
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.run.data import TrainingData
from megatron.training.run.run import build_run
from megatron.training.step import train_step

Exchange = Callable[[Any], list[Any]]
"""Gives every rank's value, by world rank, for this rank's."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What a rank did. ``operations``: of the whole rehearsal, and of its last step. ``waits``: in the last step, by
    place in the program. ``states``, ``highest``: bytes that are held between steps, and at most in one.
    """

    rank: int
    operations: Sequence[Operation]
    last_step: Sequence[Operation]
    refused: Sequence[str]
    waits: Counter[str]
    states: int
    highest: int


def rehearse(
    config: RunConfig,
    train_spec: TrainSpec,
    *,
    rank: int,
    steps: int,
    memory: int,
    exchange: Exchange,
    failed: Callable[[Exception], None],
) -> Rehearsed:
    """Take ``steps`` steps as rank number ``rank``, and evaluate once if the run does; with 0 only build the model.

    ``memory``: bytes of the device. ``exchange``: for small objects that ranks tell each other. ``failed``: told of an
    error in a backward pass, which ends the process. Uses up this process: torch knows one such device and world.
    """
    device = register(memory=memory)
    store = FakeStore()
    dist.init_process_group(f"cpu:fake,{DEVICE_TYPE}:fake", store=store, rank=rank, world_size=config.world_size)
    waits, recorder, held = Waits(), Recorder(rank), Memory()
    with (
        ExitStack() as stack,
        pretending(waits, failed) as mode,
        held,
        recorder.recording(),
        mock.patch.object(dist, "all_gather_object", _answered_by(exchange)),
        mock.patch.object(initialize, "_normal_rows", _rows_at_once),
    ):
        context = _context(config, device, rank)
        stack.enter_context(balanced(context.mesh, waits))
        run = build_run(config, train_spec, context)
        with unset_fake_temporarily():
            data = TrainingData(run.config, train_spec, _on_cpu(context), run.tokenizer)
        batches = _on_device(mode, device, data.training_batches(0))
        states, begun = held.held, 0
        for _ in range(steps):
            microbatches = next(batches)
            waits.places.clear()
            begun = len(recorder.operations)
            train_step(run, microbatches)
            del microbatches
            states = held.held
        of_step, in_step, highest = recorder.operations[begun:], Counter(waits.places), held.highest
        if steps and run.config.training.eval_iters:
            for name in data.evaluated("valid")[:1]:
                evaluate(run, _on_device(mode, device, data.evaluation_batches("valid", evaluation=0, name=name)))
    return Rehearsed(
        rank=rank,
        operations=[dataclasses.replace(each) for each in recorder.operations],
        last_step=of_step,
        refused=recorder.refused,
        waits=in_step,
        states=states,
        highest=highest,
    )


def _context(config: RunConfig, device: torch.device, rank: int) -> ParallelContext:
    parallel = config.parallel
    mesh = mesh_of(parallel, world_size=config.world_size, rank=rank)
    return ParallelContext(
        mesh=mesh,
        rng=RngStreams(config.training.seed, mesh, device),
        device=device,
        dtype=DTYPES[config.precision.params_dtype],
        sequence_parallel=parallel.sequence_parallel,
        cp_comm_types=parallel.cp_comm_type,
        cp_sizes=parallel.hierarchical_context_parallel_sizes or (),
    )


def _on_cpu(context: ParallelContext) -> ParallelContext:
    return dataclasses.replace(context, device=torch.device("cpu"))


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


def _answered_by(exchange: Exchange) -> Callable[..., None]:
    def gather(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = exchange(value)

    return gather


def _rows_at_once(
    shape: tuple[int, ...], start: int, stop: int, *, std: float, seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Initial weights in one block, as none is drawn."""
    yield start, torch.empty(stop - start, *shape[1:])
