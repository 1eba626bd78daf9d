"""Ranks as torchrun, Open MPI's mpirun or Slurm's srun assign them, from environment variables alone."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError, MegatronError

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What terminals, launchers and schedulers (Slurm's ``--signal``) send to the processes of a run that should end."""

_MPI = "OMPI_COMM_WORLD"


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among all: its rank, its rank on the node, and where rank 0 listens (None for a world of one).

    ``may_see_own_device_alone``: the launcher may show each process only its own GPU, as number 0, as Slurm's
    ``--gpus-per-task=1`` does. ``launcher``: process id of a launcher whose end must end this process. ``restarts``:
    the launcher may restart ranks on the store of ranks that have died.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str | None = None
    master_port: int = 29500
    may_see_own_device_alone: bool = False
    launcher: int | None = None
    restarts: bool = False


def launch_environment(variables: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Read the launcher's variables: torchrun's ``RANK …`` first, then those of Open MPI, then those of a Slurm step.

    Raises ConfigError for variables that contradict each other.
    """
    env = os.environ if variables is None else variables
    if "RANK" in env or "WORLD_SIZE" in env:
        found = _from_torchrun(env)
    elif _number(env, f"{_MPI}_SIZE", 1) > 1:
        found = _from_open_mpi(env)
    elif _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1:
        found = _from_slurm(env)
    else:
        return LaunchEnvironment()
    if not 0 <= found.rank < found.world_size:
        raise ConfigError(f"rank {found.rank} does not exist among {found.world_size}: check RANK and WORLD_SIZE")
    return found


def launched_world_size(variables: Mapping[str, str] | None = None) -> int:
    """Number of ranks that a launcher started, 1 without one; for checking settings before anything is launched."""
    env = os.environ if variables is None else variables
    if "WORLD_SIZE" in env:
        return _number(env, "WORLD_SIZE", 1, at_least=1)
    mpi = _number(env, f"{_MPI}_SIZE", 1, at_least=1)  # 1 may be left over from another start
    return mpi if mpi > 1 else _number(env, "SLURM_STEP_NUM_TASKS", 1, at_least=1)


@contextmanager
def errors_once_per_node(variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Report errors from before the processes connect once per node: local rank 0 reports a MegatronError, other ranks
    exit silently.

    Each node reports, as a file may be missing on one of them.
    """
    env = os.environ if variables is None else variables
    try:
        yield
    except MegatronError as error:
        names = ("LOCAL_RANK", "RANK", f"{_MPI}_LOCAL_RANK", "SLURM_LOCALID")
        place = next((env[name] for name in names if name in env), "0")
        if place == "0":
            raise
        sys.exit(error.exit_code)


@dataclass(frozen=True)
class NeededVariable:
    """A variable that CUDA, cuBLAS, NCCL or Transformer Engine reads, and must find as one of ``values``; the first is
    set where there is none. ``newest``: of the GPUs that need it, the highest compute capability, if not all do.
    """

    name: str
    values: tuple[str, ...]
    reason: str
    newest: tuple[int, int] | None = None


_BEFORE_BLACKWELL = (9, 0)


def needed_variables(parallel: ParallelConfig, *, deterministic: bool) -> tuple[NeededVariable, ...]:
    """Environment variables that a run on GPUs needs with these settings."""
    found = []
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--context-parallel-size": parallel.context_parallel_size,
    }
    split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if split:
        reason = f"with {split[0]} communication overlaps only if kernels start in the order in which they are queued"
        found.append(NeededVariable("CUDA_DEVICE_MAX_CONNECTIONS", ("1",), reason, newest=_BEFORE_BLACKWELL))
    if deterministic:
        for name, *values in (
            ("NCCL_ALGO", "Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
            ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", ":16:8"),
            ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
        ):
            reason = "with --deterministic-mode sums must have one order"
            found.append(NeededVariable(name, tuple(values), reason))
    return tuple(found)


def set_missing_variables(needed: Sequence[NeededVariable], variables: MutableMapping[str, str]) -> None:
    """Set those that aren't set, before CUDA starts, which reads some of them once."""
    for each in needed:
        variables.setdefault(each.name, each.values[0])


def check_variables(
    needed: Sequence[NeededVariable], variables: Mapping[str, str], *, capability: tuple[int, int]
) -> None:
    """Raise ConfigError for one with another value, on a GPU of this compute capability that needs it."""
    for each in needed:
        is_needed = each.newest is None or capability <= each.newest
        if is_needed and variables.get(each.name) not in each.values:
            raise ConfigError(
                f"the variable {each.name} is {variables.get(each.name)!r}, and {each.reason}: set it to "
                f"{' or '.join(each.values)}, or unset it"
            )


def _from_torchrun(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size = _number(env, "WORLD_SIZE", 1, at_least=1)
    if world_size > 1 and "RANK" not in env:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} but RANK is not set: start the processes with torchrun or srun, "
            "or unset WORLD_SIZE"
        )
    return LaunchEnvironment(
        rank=_number(env, "RANK", 0),
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK", 0),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
        master_address=env.get("MASTER_ADDR", "127.0.0.1") if world_size > 1 else None,
        master_port=_number(env, "MASTER_PORT", 29500),
        launcher=os.getppid() if "TORCHELASTIC_RUN_ID" in env else None,  # other parents are shells, which may end
        restarts=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_open_mpi(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size, local_world_size = _number(env, f"{_MPI}_SIZE", 1), _number(env, f"{_MPI}_LOCAL_SIZE", 1)
    if "MASTER_ADDR" not in env and local_world_size < world_size:
        raise ConfigError(
            f"mpirun started {world_size} processes on several nodes and MASTER_ADDR is not set: "
            "give mpirun -x MASTER_ADDR=HOST, the host of rank 0"
        )
    return LaunchEnvironment(
        rank=_number(env, f"{_MPI}_RANK", 0),
        world_size=world_size,
        local_rank=_number(env, f"{_MPI}_LOCAL_RANK", 0),
        local_world_size=local_world_size,
        master_address=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", 29500),
    )


def _from_slurm(env: Mapping[str, str]) -> LaunchEnvironment:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    node = _number(env, "SLURM_NODEID", 0)
    return LaunchEnvironment(
        rank=_number(env, "SLURM_PROCID", 0),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS", 1),
        local_rank=_number(env, "SLURM_LOCALID", 0),
        local_world_size=tasks[min(node, len(tasks) - 1)],
        master_address=env.get("MASTER_ADDR") or first_host(nodes),
        # Jobs that share a node get different ports.
        master_port=_number(env, "MASTER_PORT", 20000 + _number(env, "SLURM_JOB_ID", 0) % 10000),
        may_see_own_device_alone=True,
    )


def _number(env: Mapping[str, str], name: str, default: int, *, at_least: int = 0) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"the variable {name} is {text!r}; it must be a number: correct or unset it")
    return int(text)


def tasks_per_node(text: str) -> list[int]:
    """Tasks on each node of a Slurm step, from a list such as ``8(x2),4``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text[:10_000])
    return [int(tasks) for tasks, times in found for _ in range(min(int(times or 1), 100_000))] or [1]


def first_host(nodes: str) -> str:
    """First host of a Slurm node list such as ``gpu[003-004,9],login1``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise ConfigError(f"the Slurm node list {nodes!r} names no host: set MASTER_ADDR to the host of rank 0")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")
