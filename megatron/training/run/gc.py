"""Garbage collection on a schedule, release of device memory, deterministic kernels."""

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
    """With ``--deterministic-mode``, make torch refuse nondeterministic kernels."""
    if not training.deterministic_mode:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses cuBLAS without it
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def garbage_on_schedule(training: TrainingConfig) -> Iterator[None]:
    """With ``--manual-gc``, Python collects garbage only in ``collect_garbage``, on all ranks at once."""
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
    """With ``--manual-gc``, collect garbage before and after an evaluation, unless ``--no-manual-gc-eval`` is given."""
    if training.manual_gc and training.manual_gc_eval:
        gc.collect()


def release_memory(training: TrainingConfig, context: ParallelContext, *, level: int) -> None:
    """Release cached device memory if ``--empty-unused-memory-level`` is at least ``level``."""
    if training.empty_unused_memory_level >= level and context.device.type != "cpu":
        torch.get_device_module(context.device).empty_cache()
