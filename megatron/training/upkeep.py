"""What a long run does between steps besides learning: collect garbage, return memory, compare replicas."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron.config.training import TrainingConfig
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ParallelError


@contextmanager
def deterministic_algorithms(training: TrainingConfig) -> Iterator[None]:
    """With ``--deterministic-mode``, torch refuses kernels whose results depend on timing."""
    if not training.deterministic_mode:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def garbage_on_schedule(training: TrainingConfig) -> Iterator[None]:
    """With ``--manual-gc``, Python collects garbage only when ``after_step`` says so, on all ranks at once."""
    if not training.manual_gc:
        yield
        return
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        gc.enable()


def after_step(training: TrainingConfig, context: ParallelContext, models: list[nn.Module], iteration: int) -> None:
    """Everything that is due after ``iteration``. A collective where weights are compared."""
    if training.manual_gc and training.manual_gc_interval and iteration % training.manual_gc_interval == 0:
        gc.collect()
    if training.empty_unused_memory_level and context.device.type != "cpu":
        torch.get_device_module(context.device).empty_cache()
    interval = training.check_weight_hash_across_dp_replicas_interval
    if interval is not None and iteration % interval == 0:
        check_replicas_agree(models, context, iteration=iteration)


def around_evaluation(training: TrainingConfig) -> None:
    """With ``--manual-gc``, collect garbage before and after an evaluation unless told not to."""
    if training.manual_gc and training.manual_gc_eval:
        gc.collect()


def check_replicas_agree(models: list[nn.Module], context: ParallelContext, *, iteration: int) -> None:
    """Raise ParallelError when data-parallel replicas of a parameter are not bitwise equal. A collective."""
    mine = {name: _digest(p) for model in models for name, p in model.named_parameters()}
    everyone = gather_objects(mine, context.mesh)
    for rank in context.mesh.members("dp", "cp"):
        for name, digest in mine.items():
            if everyone[rank][name] != digest:
                raise ParallelError(
                    f"after iteration {iteration} the weights of rank {rank} differ from those of its replica, rank "
                    f"{context.mesh.world_rank} ({context.mesh.describe()}), first in {name}: a device computes "
                    "wrongly or a reduction went astray; resume from the checkpoint before, on other hardware"
                )


def _digest(parameter: Tensor) -> bytes:
    data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=16).digest()
