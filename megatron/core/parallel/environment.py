"""Who started this process: torchrun, Slurm's srun, or nobody. Reads environment variables only."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.errors import ParallelError


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among all: its rank, its rank on the node, and where rank 0 listens (None for a world of one)."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str | None = None
    master_port: int = 29500


def launch_environment(variables: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the launcher's variables: torchrun's ``RANK …`` first, then those of a Slurm step.

    Raises ParallelError for variables that contradict each other.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env or "WORLD_SIZE" in env:
        return _checked(_from_torchrun(env))
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _checked(_from_slurm(env))
    return LaunchEnvironment()


def launched_world_size(variables: Mapping[str, str] | None = None) -> int | None:
    """Number of ranks that a launcher started, or None; for checking settings before anything is launched."""
    env = os.environ if variables is None else variables
    if "WORLD_SIZE" in env:
        return int(env["WORLD_SIZE"])
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    return tasks if tasks > 1 else None


def _from_torchrun(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size = int(env.get("WORLD_SIZE", "1"))
    if world_size > 1 and "RANK" not in env:
        raise ParallelError(
            f"WORLD_SIZE is {world_size} but RANK is not set: start the processes with torchrun or srun, "
            "or unset WORLD_SIZE"
        )
    return LaunchEnvironment(
        rank=int(env.get("RANK", "0")),
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", "0")),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", str(world_size))),
        master_address=env.get("MASTER_ADDR", "127.0.0.1") if world_size > 1 else None,
        master_port=int(env.get("MASTER_PORT", "29500")),
    )


def _from_slurm(env: Mapping[str, str]) -> LaunchEnvironment:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    tasks_here = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return LaunchEnvironment(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=int(tasks_here.group()) if tasks_here else 1,
        master_address=env.get("MASTER_ADDR") or first_host(nodes),
        # Jobs that share a node get different ports.
        master_port=int(env.get("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 10000))),
    )


def first_host(nodes: str) -> str:
    """First host of a Slurm node list such as ``gpu[003-004,9],login1``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ParallelError(f"the Slurm node list {nodes!r} names no host: set MASTER_ADDR to the host of rank 0")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def _checked(found: LaunchEnvironment) -> LaunchEnvironment:
    if not 0 <= found.rank < found.world_size:
        raise ParallelError(f"rank {found.rank} does not exist among {found.world_size}: check RANK and WORLD_SIZE")
    return found
