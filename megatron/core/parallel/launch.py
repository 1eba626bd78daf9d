"""Start of a rank, from environment to ParallelContext: process group, device, mesh.

NCCL on GPUs if there are any, else gloo on CPU.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.config.parallel import ParallelConfig
from megatron.core.device import capability, gpu, gpus, is_gpu, without_tf32
from megatron.core.parallel.collectives import barrier
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import (
    LaunchEnvironment,
    check_variables,
    needed_variables,
    set_missing_variables,
)
from megatron.core.parallel.liveness import Patience, watched
from megatron.core.parallel.mesh import GROUPS, Mesh
from megatron.core.parallel.rng import RngStreams
from megatron.errors import ConfigError, ParallelError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@contextmanager
def parallel_context(
    parallel: ParallelConfig, launch: LaunchEnvironment, *, params_dtype: str, seed: int, deterministic: bool = False
) -> Iterator[ParallelContext]:
    """Join the other ranks for the length of a ``with`` block; if a rank fails or stalls in it, all ranks end.

    Raises ConfigError when the asked backend has no device here or a variable contradicts the settings, ParallelError
    when the ranks can't connect.
    """
    with leaving_with_launcher(launch):
        device = prepared_device(parallel, launch, deterministic=deterministic)
        watch: AbstractContextManager[None] = nullcontext()
        mesh = mesh_of(parallel, world_size=launch.world_size, rank=launch.rank)
        urgent = [GROUPS[name] for name in parallel.high_priority_stream_groups]
        mesh.urgent = frozenset(mesh.members(*each) for axes in urgent for each in (axes, *mesh.levels(axes)))
        # A minute more than a stall may last, so that liveness reports it before the backend times out.
        mesh.timeout = timedelta(minutes=parallel.distributed_timeout_minutes + 1)
        if launch.world_size > 1:
            _join(launch, device, timeout=mesh.timeout)
        if dist.is_initialized():
            # A connection of its own, for a thread of its own.
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            # A launcher of one node serves the store itself, and ends all ranks when one has failed.
            lingers = not (launch.restarts and launch.local_world_size == launch.world_size)
            patience = Patience(stall=60.0 * parallel.distributed_timeout_minutes, lingers=lingers)
            watch = watched(store, mesh, patience)
        with watch:
            rng = RngStreams(seed, mesh, device)
            yield ParallelContext.of(parallel, mesh=mesh, rng=rng, device=device, dtype=DTYPES[params_dtype])
            barrier(mesh)  # not after an error: ranks that still wait for this one would make it hang
        if dist.is_initialized():
            mesh.forget_groups()
            dist.destroy_process_group()


def mesh_of(parallel: ParallelConfig, *, world_size: int, rank: int) -> Mesh:
    """The mesh that the settings describe; data parallelism takes the ranks that the other axes leave."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, dc = parallel.pipeline_model_parallel_size, parallel.num_workers
    return Mesh.of(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=world_size // (dc * tp * cp * pp),
        dc=dc,
        copies=parallel.num_distributed_optimizer_instances,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
        rank=rank,
        pp_before_dp=not parallel.use_tp_pp_dp_mapping,
    )


def prepared_device(parallel: ParallelConfig, launch: LaunchEnvironment, *, deterministic: bool) -> torch.device:
    """The rank's device, and what must be set before its first kernel: variables, and products in fp32 as written."""
    needed = needed_variables(parallel, deterministic=deterministic)
    if gpus() and parallel.distributed_backend != "gloo":
        set_missing_variables(needed, os.environ)
    device = choose_device(parallel.distributed_backend, launch)
    if found := capability(device):
        check_variables(needed, os.environ, capability=found)
    else:
        groups = " ".join(parallel.high_priority_stream_groups)
        flags = [f"--high-priority-stream-groups {groups}"] if groups else []
        flags += ["--use-nccl-ub"] if parallel.use_nccl_ub else []
        if flags:
            raise ConfigError(f"{flags[0]} is for GPUs, and this run is on CPUs; leave it out")
    without_tf32()
    return device


def choose_device(backend: str | None, launch: LaunchEnvironment) -> torch.device:
    """The rank's device: its node-local GPU when there is one and ``backend`` isn't gloo, else the CPU."""
    available = gpus()
    if backend == "nccl" and available == 0:
        raise ConfigError(
            "--distributed-backend nccl needs a GPU and this machine has none: leave it out, or give gloo"
        )
    if backend == "gloo" or available == 0:
        return torch.device("cpu")
    alone = launch.may_see_own_device_alone and available == 1
    index = 0 if alone else launch.local_rank
    if index >= available:
        raise ConfigError(
            f"rank {launch.rank} is number {launch.local_rank} on its node of {available} GPUs: "
            "start at most that many processes a node"
        )
    return gpu(index)


def _join(launch: LaunchEnvironment, device: torch.device, *, timeout: timedelta) -> None:
    """No ``device_id``: with one, NCCL makes a group by splitting the communicator of all ranks, which waits for every
    rank, and groups are made by their members alone.
    """
    os.environ.setdefault("MASTER_ADDR", launch.master_address or "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(launch.master_port))
    try:
        store, *_ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
        if launch.restarts:
            store = store_of_this_attempt(store, launch, timeout=timeout)
        dist.init_process_group(
            "nccl" if is_gpu(device) else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, dist.DistNetworkError) as error:
        raise ParallelError(
            f"rank {launch.rank} could not join the {launch.world_size} ranks at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({error}): check that every rank was started and that the port is free"
        ) from error


def store_of_this_attempt(store: Store, launch: LaunchEnvironment, *, timeout: timedelta) -> Store:
    """``store`` with a key prefix that only ranks of this attempt use. A collective of all ranks.

    torchrun restarts ranks on the store of the attempt before, which still holds the addresses of dead ranks. The
    prefix is not TORCHELASTIC_RESTART_COUNT: nodes whose own ranks didn't fail count differently. Rank 0 draws it; the
    others accept it once rank 0 has answered with the number that they have just drawn, which a dead rank can't do.

    Raises torch's DistStoreError when ranks don't join within ``timeout``.
    """
    store.set_timeout(timeout)
    own = uuid.uuid4().hex
    if launch.rank == 0:
        store.set("attempt", own)
        for rank in range(1, launch.world_size):
            store.set(f"{own}/seen {rank}", store.get(f"{own}/joined {rank}").decode())
        return dist.PrefixStore(own, store)  # type: ignore[attr-defined]
    deadline, asked = time.monotonic() + timeout.total_seconds(), ""
    while time.monotonic() < deadline:
        name = store.get("attempt").decode()
        if name != asked:
            store.set(f"{name}/joined {launch.rank}", own)
            asked = name
        seen = f"{name}/seen {launch.rank}"
        if store.check([seen]) and store.get(seen).decode() == own:
            return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        time.sleep(0.02)
    raise dist.DistStoreError("rank 0 did not start")


@contextmanager
def leaving_with_launcher(launch: LaunchEnvironment, *, poll: float = 1.0) -> Iterator[None]:
    """In the block, end this process within ``poll`` seconds of its launcher's death. A killed launcher can't end its
    ranks, and they would wait for each other until their time-outs.
    """
    if launch.launcher is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        while os.getppid() == launch.launcher:
            if done.wait(poll):
                return
        if launch.local_rank == 0:
            sys.stderr.write(f"error: the launcher, process {launch.launcher}, was killed; ending its ranks\n")
            sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        done.set()
