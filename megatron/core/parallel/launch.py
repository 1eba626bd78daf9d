"""From environment to ParallelContext: process group, device, mesh. CPU and gloo or GPU and NCCL, by what is there."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.config.parallel import ParallelConfig
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import LaunchEnvironment
from megatron.core.parallel.launcher import leaving_with_launcher, store_of_this_attempt
from megatron.core.parallel.liveness import Patience, watched
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams
from megatron.errors import ConfigError, ParallelError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@contextmanager
def parallel_context(
    parallel: ParallelConfig, launch: LaunchEnvironment, *, params_dtype: str, seed: int
) -> Iterator[ParallelContext]:
    """Join the other ranks for the length of a ``with`` block; whichever fails or stalls in it ends all of them.

    Raises ConfigError when the asked backend has no device here, ParallelError when the ranks can't meet.
    """
    with leaving_with_launcher(launch), _joined(parallel, launch, params_dtype=params_dtype, seed=seed) as context:
        yield context


@contextmanager
def _joined(
    parallel: ParallelConfig, launch: LaunchEnvironment, *, params_dtype: str, seed: int
) -> Iterator[ParallelContext]:
    device = choose_device(parallel.distributed_backend, launch)
    if launch.world_size > 1:
        _join(parallel, launch, "nccl" if device.type == "cuda" else "gloo")
    mesh = mesh_of(parallel, world_size=launch.world_size, rank=launch.rank)
    context = ParallelContext(
        mesh=mesh,
        rng=RngStreams(seed, mesh, device),
        device=device,
        dtype=DTYPES[params_dtype],
        sequence_parallel=parallel.sequence_parallel,
        cp_comm_types=parallel.cp_comm_type,
        cp_sizes=parallel.hierarchical_context_parallel_sizes or (),
    )
    # The goodbye is not said after an error: ranks that still wait for this one would make it hang.
    with _watched(parallel, mesh):
        yield context
        if dist.is_initialized():
            dist.barrier()
    if dist.is_initialized():
        mesh.forget_groups()
        dist.destroy_process_group()


def mesh_of(parallel: ParallelConfig, *, world_size: int, rank: int) -> Mesh:
    """The mesh that the settings describe; data parallelism takes the ranks that the other axes leave."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp = parallel.pipeline_model_parallel_size
    return Mesh.of(
        tp=tp, cp=cp, pp=pp, dp=world_size // (tp * cp * pp), rank=rank, pp_before_dp=not parallel.use_tp_pp_dp_mapping
    )


def _watched(parallel: ParallelConfig, mesh: Mesh) -> AbstractContextManager[None]:
    if not dist.is_initialized():
        return nullcontext()
    # A connection of its own, for a thread of its own.
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return watched(store, mesh, Patience(stall=60.0 * parallel.distributed_timeout_minutes))


def choose_device(backend: str | None, launch: LaunchEnvironment) -> torch.device:
    """The rank's device: its node-local GPU when there is one and ``backend`` isn't gloo, else the CPU."""
    available = torch.cuda.is_available()
    if backend == "nccl" and not available:
        raise ConfigError(
            "--distributed-backend nccl needs a GPU and this machine has none: leave it out, or give gloo"
        )
    if backend == "gloo" or not available:
        return torch.device("cpu")
    alone = launch.may_see_own_device_alone and torch.cuda.device_count() == 1
    index = 0 if alone else launch.local_rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {launch.rank} is number {launch.local_rank} on its node of {torch.cuda.device_count()} GPUs: "
            "start at most that many processes a node"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _join(parallel: ParallelConfig, launch: LaunchEnvironment, backend: str) -> None:
    os.environ.setdefault("MASTER_ADDR", launch.master_address or "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(launch.master_port))
    # A minute more than a stall may last, so that it is explained before the backend gives up.
    timeout = datetime.timedelta(minutes=parallel.distributed_timeout_minutes + 1)
    try:
        store, *_ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
        if launch.restarts:
            store = store_of_this_attempt(store, launch, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    except (RuntimeError, ValueError, dist.DistNetworkError) as error:
        raise ParallelError(
            f"rank {launch.rank} could not join the {launch.world_size} ranks at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({error}): check that every rank was started and that the port is free"
        ) from error


def describe_device(device: torch.device) -> str:
    """Name of the device for reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads a rank"
