"""Profiles of chosen iterations on chosen ranks: torch's profiler, CUDA's for nsys, the GPU allocator's history."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import profiler

from megatron.config.rules.profiling import needs_a_gpu
from megatron.config.run import RunConfig
from megatron.core.parallel.activity import Activity
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.reporting.timers import During

logger = logging.getLogger(__name__)

Profiled = Callable[[int], AbstractContextManager[None]]
"""``with profiled(number): …`` around the work of an iteration; numbers start from 1."""

_HISTORY = 100_000  # allocations
_ROWS = 15


def annotated(activity: Activity, config: RunConfig, device: torch.device) -> During:
    """``activity.during`` that also marks the parts of a step in profiles, and in these the schedule's actions.

    Raises ConfigError for flags that need a GPU where there is none.
    """
    if device.type == "cpu" and (sentence := needs_a_gpu(config)):
        raise ConfigError(sentence)
    profiling, during = config.profiling, activity.during
    marks: list[Callable[[str], AbstractContextManager[object]]] = []
    if profiling.profile:
        marks.append(profiler.record_function)
    if profiling.nvtx_ranges:
        marks.append(torch.get_device_module(device).nvtx.range)

    @contextmanager
    def with_marks(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for mark, of in itertools.product(marks, filter(None, (name, activity.action))):
                stack.enter_context(mark(of))
            stack.enter_context(during(name))
            yield

    return with_marks if marks else during


@contextmanager
def profiling(config: RunConfig, context: ParallelContext) -> Iterator[Profiled]:
    """Profile chosen iterations of a ``with`` block; profiles still open at its end, even by an error, are written."""
    settings, rank = config.profiling, context.mesh.world_rank
    if rank not in settings.profile_ranks or not (settings.profile or settings.record_memory_history):
        yield lambda number: nullcontext()
        return
    with ExitStack() as recorded, ExitStack() as running:
        if settings.record_memory_history:
            recorded.enter_context(_memory_history(config, context))

        @contextmanager
        def profiled(number: int) -> Iterator[None]:
            inside = settings.profile and settings.profile_step_start < number <= settings.profile_step_end
            if inside and not started:
                running.enter_context(
                    (_torch_profile if settings.use_pytorch_profiler else _cuda_profile)(config, context)
                )
                started.append(number)
            yield
            if number == settings.profile_step_end:
                running.close()

        started = list[int]()
        yield profiled


@contextmanager
def _torch_profile(config: RunConfig, context: ParallelContext) -> Iterator[None]:
    """Write a trace for Chrome, Perfetto and TensorBoard; the first profiled rank prints the longest operations."""
    settings, rank, on_cpu = config.profiling, context.mesh.world_rank, context.device.type == "cpu"
    folder = str(config.reporting.tensorboard_dir)
    with profiler.profile(
        record_shapes=settings.pytorch_profiler_collect_shapes,
        with_stack=settings.pytorch_profiler_collect_callstack,
        on_trace_ready=profiler.tensorboard_trace_handler(folder, worker_name=f"rank{rank}"),
    ) as profile:
        yield
    if rank == settings.profile_ranks[0]:
        key = "self_cpu_time_total" if on_cpu else "self_device_time_total"
        table = profile.key_averages().table(sort_by=key, row_limit=_ROWS, max_name_column_width=40)
        print(f"profile of rank {rank}, traces in {folder}:\n{table}", flush=True)


@contextmanager
def _cuda_profile(config: RunConfig, context: ParallelContext) -> Iterator[None]:
    """Start CUDA's profiler for the block, for ``nsys profile --capture-range=cudaProfilerApi``."""
    device = torch.get_device_module(context.device)
    device.cudart().cudaProfilerStart()
    shapes = config.profiling.pytorch_profiler_collect_shapes
    try:
        with torch.autograd.profiler.emit_nvtx(record_shapes=shapes):  # type: ignore[no-untyped-call]
            yield
    finally:
        device.cudart().cudaProfilerStop()


@contextmanager
def _memory_history(config: RunConfig, context: ParallelContext) -> Iterator[None]:
    """Record allocations, and write them when the block ends, even by an error."""
    memory, path = torch.get_device_module(context.device).memory, Path(config.profiling.memory_snapshot_path)
    if len(config.profiling.profile_ranks) > 1:
        path = path.with_stem(f"{path.stem}-rank{context.mesh.world_rank}")
    memory._record_memory_history(max_entries=_HISTORY)
    try:
        yield
    finally:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            memory._dump_snapshot(str(path))
        except OSError as error:  # an error of the run itself is the one to raise
            logger.warning("--memory-snapshot-path %s cannot be written: %s", path, error.strerror)
        memory._record_memory_history(enabled=None)
