"""What a long run does beside learning: deterministic kernels, garbage on a schedule, memory given back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.config.training import TrainingConfig
from megatron.core.parallel.context import ParallelContext


@contextmanager
def deterministic_algorithms(training: TrainingConfig) -> Iterator[None]:
    """With ``--deterministic-mode``, torch refuses kernels whose results depend on timing."""
    if not training.deterministic_mode:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses cuBLAS altogether
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def garbage_on_schedule(training: TrainingConfig) -> Iterator[None]:
    """With ``--manual-gc``, Python collects garbage only when ``collect_garbage`` says so, on all ranks at once."""
    if not training.manual_gc:
        yield
        return
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        gc.enable()


def collect_garbage(training: TrainingConfig, *, iteration: int) -> None:
    """With ``--manual-gc-interval``, collect garbage when it is due after ``iteration``."""
    if training.manual_gc and training.manual_gc_interval and iteration % training.manual_gc_interval == 0:
        gc.collect()


def collect_garbage_around_evaluation(training: TrainingConfig) -> None:
    """With ``--manual-gc``, collect garbage before and after an evaluation unless told not to."""
    if training.manual_gc and training.manual_gc_eval:
        gc.collect()


def release_memory(training: TrainingConfig, context: ParallelContext, *, level: int) -> None:
    """Give cached device memory back where ``--empty-unused-memory-level`` is at least ``level``."""
    if training.empty_unused_memory_level >= level and context.device.type != "cpu":
        torch.get_device_module(context.device).empty_cache()
