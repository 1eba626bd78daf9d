"""Memory in use: the allocator's figures on an accelerator, the resident set on a CPU, each under its own name."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron.config.report import count, gigabytes
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import launch_environment
from megatron.errors import RESTART_CANNOT_HELP, RESTART_MAY_HELP, ConfigError
from megatron.planning.estimate import rank_memory, rank_parameters
from megatron.planning.fitting import check_units

_MB = 1024 * 1024


def memory_use(device: torch.device) -> dict[str, int]:
    """Bytes by kind, current and highest: allocator figures of the device, or the resident set of this process."""
    if device.type == "cpu":
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        statm = Path("/proc/self/statm")
        # Without procfs (macOS) only the highest value is known.
        resident = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else highest
        return {"resident": resident, "max resident": max(resident, highest)}
    accelerator = torch.get_device_module(device)
    return {
        "allocated": accelerator.memory_allocated(device),
        "max allocated": accelerator.max_memory_allocated(device),
        "reserved": accelerator.memory_reserved(device),
        "max reserved": accelerator.max_memory_reserved(device),
    }


def total_memory(device: torch.device) -> int:
    """Bytes of the device's memory; on a CPU, of the machine's, divided by the ranks that share it."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // launch_environment().local_world_size
    free_and_total: tuple[int, int] = torch.get_device_module(device).mem_get_info(device)
    return free_and_total[1]


def check_memory(config: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> None:
    """Raise ConfigError, before anything is allocated, when this rank's part of the model exceeds the device's memory.

    The size of activations is an estimate, so a microbatch is refused only above twice the device's memory.
    """
    total, per_node = total_memory(context.device), config.command.ranks_per_node
    check_units(config, train_spec, device_bytes=total, ranks_per_node=per_node)
    needed = rank_memory(config, train_spec, context.mesh.rank("pp"))
    if needed.states > total or needed.total > 2 * total:
        raise ConfigError(_too_large(config, train_spec, context))


@contextmanager
def sized_allocations(config: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> Iterator[None]:
    """Raise ConfigError when the block runs out of memory: the allocator's reason, and what the rank needs and has.

    In a process's first iteration a restart would fail in the same way; later, it may help.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        code = RESTART_MAY_HELP if context.mesh.activity.steps else RESTART_CANNOT_HELP
        where = context.mesh.activity.progress
        message = f"out of memory at {where} ({reason.rstrip('.')}): {_too_large(config, train_spec, context)}"
        raise ConfigError(message, exit_code=code) from error


def _too_large(config: RunConfig, train_spec: TrainSpec, context: ParallelContext) -> str:
    rank = context.mesh.rank("pp")
    needed, parameters = rank_memory(config, train_spec, rank), rank_parameters(config, train_spec, pipeline_rank=rank)
    return (
        f"this rank holds {count(parameters.total)} parameters, which take {gigabytes(needed.states)} with gradients "
        f"and optimizer state, --micro-batch-size {config.training.micro_batch_size} of --seq-length "
        f"{config.data.seq_length} needs about {gigabytes(needed.total - needed.states)} more, and its "
        f"{context.device.type} has {gigabytes(total_memory(context.device))}: use a smaller model, micro batch or "
        "sequence, or more ranks; --dry-run says what would fit"
    )


def memory_line(use: Mapping[str, float], *, rank: int, iteration: int) -> str:
    """Megatron's memory line; on a CPU its fields are ``resident`` (of the process) instead of ``allocated``."""
    fields = " | ".join(f"{kind}: {size / _MB:.1f}" for kind, size in use.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {fields}"


def memory_scalars(device: torch.device) -> dict[str, int]:
    """Values for curves: Megatron's four names on an accelerator; other names on a CPU, for other figures."""
    use = memory_use(device)
    if device.type == "cpu":
        return {"mem-resident-bytes": use["resident"], "mem-max-resident-bytes": use["max resident"]}
    statistics: Mapping[str, int] = torch.get_device_module(device).memory_stats(device)
    return {
        "mem-reserved-bytes": use["reserved"],
        "mem-allocated-bytes": use["allocated"],
        "mem-max-allocated-bytes": use["max allocated"],
        "mem-allocated-count": statistics.get("allocation.all.current", 0),
    }
