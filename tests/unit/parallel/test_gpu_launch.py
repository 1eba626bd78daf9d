"""What is asked of torch on a GPU when ranks join, by stubs."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from megatron.config.parallel import ParallelConfig
from megatron.core.device import describe, without_tf32
from megatron.core.parallel import launch
from megatron.core.parallel.collectives import barrier
from megatron.core.parallel.environment import (
    LaunchEnvironment,
    check_variables,
    needed_variables,
    set_missing_variables,
)
from megatron.core.parallel.liveness import Patience
from megatron.core.parallel.mesh import GROUPS
from megatron.errors import ConfigError
from tests.harness.sentences import check_sentence, expect_error


@pytest.mark.parametrize(("device", "backend"), [("cuda:3", "nccl"), ("cpu", "gloo")])
def test_groups_can_be_made_by_their_members_alone(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device NCCL would split the communicator of all ranks for each group: runs would hang where only some
    ranks make one, as stages do.
    """
    asked: dict[str, Any] = {}

    def init_process_group(name: str, **given: Any) -> None:
        asked.update(given, name=name)

    monkeypatch.setattr(launch, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    wait = timedelta(minutes=31)
    launch._join(LaunchEnvironment(world_size=2, local_rank=3), torch.device(device), timeout=wait)
    assert asked["name"] == backend
    assert asked.get("device_id") is None


def test_a_first_step_has_ten_minutes_and_its_end_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles and connects; NCCL's own end after its time-out names no rank."""
    timeouts: list[timedelta] = []
    patience: list[Patience] = []

    def watched(store: Any, mesh: Any, given: Patience) -> Any:
        patience.append(given)
        return nullcontext()

    monkeypatch.setattr(launch, "_join", lambda *_, timeout: timeouts.append(timeout))
    monkeypatch.setattr(launch, "watched", watched)
    monkeypatch.setattr(launch, "barrier", lambda _: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", HashStore)
    monkeypatch.setattr(HashStore, "clone", lambda store: store)
    ranks = LaunchEnvironment(rank=0, world_size=2, local_rank=0, local_world_size=2)
    with launch.parallel_context(ParallelConfig(), ranks, params_dtype="fp32", seed=1) as context:
        assert context.mesh.timeout == timeouts[0]
    assert timeouts[0].total_seconds() >= patience[0].stall + 30 and patience[0].stall >= 600


@pytest.mark.parametrize(("backend", "devices"), [("nccl", [3]), ("gloo", None)])
def test_a_barrier_runs_on_the_ranks_own_gpu(
    backend: str, devices: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL otherwise guesses one from the rank, and torch warns."""
    asked: list[Any] = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "barrier", lambda *, device_ids: asked.append(device_ids))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    barrier(launch.mesh_of(ParallelConfig(), world_size=2, rank=0))
    assert asked == [devices]


def test_variables_are_set_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads them once; a user's own values stay."""
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(name, "")  # so that it is unset again after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seen: list[str | None] = []

    def gpu(number: int) -> torch.device:
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return torch.device("cuda", number)

    monkeypatch.setattr(launch, "gpus", lambda: 4)
    monkeypatch.setattr(launch, "gpu", gpu)
    monkeypatch.setattr(launch, "capability", lambda _: (9, 0))
    torch.set_float32_matmul_precision("high")
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    device = launch.prepared_device(parallel, LaunchEnvironment(local_rank=1), deterministic=True)
    assert (device, seen) == (torch.device("cuda", 1), ["1"])
    assert torch.get_float32_matmul_precision() == "highest"
    names = ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    assert [os.environ[name] for name in names] == ["Ring", ":16:8", "0"]


@pytest.mark.parametrize(
    ("variable", "settings", "deterministic", "fact"),
    [
        (
            ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
            {"context_parallel_size": 2},
            False,
            "--context-parallel-size 2",
        ),
        (
            ("NCCL_ALGO", "Tree"),
            {},
            True,
            "--deterministic-mode",
        ),
        (
            ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
            {},
            True,
            "--deterministic-mode",
        ),
    ],
)
def test_variables_that_contradict_the_settings(
    variable: tuple[str, str], settings: dict[str, int], deterministic: bool, fact: str
) -> None:
    """A run would be slow, or its results differ from run to run, without a word."""
    needed = needed_variables(ParallelConfig(**settings), deterministic=deterministic)  # type: ignore[arg-type]
    variables = dict([variable])
    set_missing_variables(needed, variables)
    with expect_error(ConfigError, fact):
        check_variables(needed, variables, capability=(9, 0))


def test_variables_that_newer_gpus_or_other_settings_do_not_need() -> None:
    """Blackwell starts kernels in order with any number of connections; without splits nothing overlaps."""
    split = needed_variables(ParallelConfig(tensor_model_parallel_size=2), deterministic=False)
    check_variables(split, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, capability=(10, 0))
    assert needed_variables(ParallelConfig(), deterministic=False) == ()


def test_groups_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have streams of their own, also where their members are all ranks; others share the group of all ranks."""

    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    made: list[tuple[list[int], Any]] = []

    def new_group(
        ranks: list[int], *, timeout: timedelta | None, use_local_synchronization: bool, pg_options: Any
    ) -> str:
        assert timeout == timedelta(minutes=31) and use_local_synchronization
        made.append((ranks, getattr(pg_options, "is_high_priority_stream", None)))
        return f"group {ranks}"

    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("NCCL", (), {"Options": Options}), raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(type(dist.group), "WORLD", property(lambda _: "everyone"))
    for urgent, expected in (("dp", [([0, 2], True), ([0, 1], None)]), ("dp_cp", [([0, 2], True), ([0, 1], None)])):
        made.clear()
        parallel = ParallelConfig(tensor_model_parallel_size=2, high_priority_stream_groups=(urgent,))  # type: ignore[arg-type]
        mesh = launch.mesh_of(parallel, world_size=4, rank=0)
        mesh.timeout = timedelta(minutes=31)
        mesh.urgent = frozenset(mesh.members(*GROUPS[name]) for name in parallel.high_priority_stream_groups)
        mesh.group("dp", "cp")
        mesh.group("tp")
        assert str(mesh.group("dp", "cp", "tp")) == "everyone"
        assert made == expected
    made.clear()
    whole = launch.mesh_of(ParallelConfig(), world_size=2, rank=0)
    whole.urgent, whole.timeout = frozenset([(0, 1)]), timedelta(minutes=31)
    whole.group("dp")
    assert made == [([0, 1], True)]


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"high_priority_stream_groups": ("dp_cp",)}, "--high-priority-stream-groups dp_cp"),
        ({"use_nccl_ub": True}, "--use-nccl-ub"),
    ],
)
def test_what_nccl_alone_has_is_refused_on_cpus(settings: dict[str, Any], flag: str) -> None:
    """gloo has no streams and no registered memory; a run that was to be fast would be slow without a word."""
    parallel = ParallelConfig(distributed_backend="gloo", **settings)
    with expect_error(ConfigError, flag, "GPUs", "CPUs"):
        launch.prepared_device(parallel, LaunchEnvironment(), deterministic=False)


def test_the_report_says_how_fp32_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 has 10 bits, and whether it is on depends on torch's version and on other libraries."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    without_tf32()
    check_sentence(describe(torch.device("cuda", 0)), "NVIDIA", "H100", "9.0", "fp32", "TF32")


def test_which_gpu_a_rank_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun may show each rank its own GPU alone, as number 0; torchrun shows every rank all of the node."""
    second = LaunchEnvironment(rank=5, world_size=8, local_rank=1, local_world_size=4)
    monkeypatch.setattr(launch, "gpu", lambda number: torch.device("cuda", number))
    for shown, launched, index in (
        (4, second, 1),
        (4, replace(second, may_see_own_device_alone=True), 1),
        (1, replace(second, may_see_own_device_alone=True), 0),
    ):
        monkeypatch.setattr(launch, "gpus", lambda shown=shown: shown)
        assert launch.choose_device(None, launched) == torch.device("cuda", index)
        assert launch.choose_device("gloo", launched) == torch.device("cpu")
    monkeypatch.setattr(launch, "gpus", lambda: 1)
    with expect_error(ConfigError, "5", "1", "GPUs"):
        launch.choose_device(None, second)
    monkeypatch.setattr(launch, "gpus", lambda: 0)
    assert launch.choose_device(None, second) == torch.device("cpu")
    with expect_error(ConfigError, "GPU"):
        launch.choose_device("nccl", second)
