"""Memory in use: the device's allocator on an accelerator, the resident set on CPU, each under its own name."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

_MB = 1024 * 1024


def memory_use(device: torch.device) -> dict[str, int]:
    """Bytes by kind, current and highest: allocator figures of the device, or the resident set of this process."""
    if device.type == "cpu":
        resident = _resident_bytes()
        return {"resident": resident, "max resident": max(resident, _max_resident_bytes())}
    accelerator = torch.get_device_module(device)
    return {
        "allocated": accelerator.memory_allocated(device),
        "max allocated": accelerator.max_memory_allocated(device),
        "reserved": accelerator.memory_reserved(device),
        "max reserved": accelerator.max_memory_reserved(device),
    }


def memory_line(use: Mapping[str, float], *, rank: int, iteration: int) -> str:
    """Megatron's memory line; on CPU its fields say ``resident`` (all of the process) instead of ``allocated``."""
    fields = " | ".join(f"{kind}: {size / _MB:.1f}" for kind, size in use.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {fields}"


def memory_scalars(device: torch.device) -> dict[str, int]:
    """TensorBoard values: Megatron's four names on an accelerator; on CPU others, as they mean something else."""
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


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():  # no procfs (macOS): the highest value is the only one at hand
        return _max_resident_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def _max_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
