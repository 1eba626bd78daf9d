"""--use-nccl-ub: weights and gradients in memory that NCCL allocates and registers with the group that reduces them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Backend

from megatron.core.distributed.buffers import build_buffers
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import registered_zeros
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.sharding import Sharding, sharded_parameter
from megatron.errors import ConfigError
from tests.harness.sentences import check_line, expect_error

CPU = torch.device("cpu")


class Nccl:
    """Stands in for a group of GPUs, and for its backend. ``done``: what it was asked for."""

    def __init__(self, has_multicast: bool = True) -> None:
        self.has_multicast = has_multicast
        self.done: list[object] = []
        self.memory: list[Tensor] = []

    def _get_backend(self, _: torch.device) -> Nccl:
        return self

    def supports_tensor_alloc(self, _: torch.device) -> bool:
        return self.has_multicast

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.done.append((size, dtype))
        self.memory.append(torch.full((size,), float("nan"), dtype=dtype, device=device))
        return self.memory[-1]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """As if every group of several ranks were this one, of GPUs."""
    nccl = Nccl()
    monkeypatch.setattr(collectives, "is_gpu", lambda _: True)
    monkeypatch.setattr(Mesh, "group_of", lambda _, ranks: nccl if len(ranks) > 1 else None)

    def all_reduce(x: Tensor, mesh: Mesh, *axes: Any) -> Tensor:
        nccl.done.append(f"all-reduce over {mesh.size(*axes)}")
        return x

    monkeypatch.setattr(collectives, "all_reduce", all_reduce)
    return nccl


def test_weights_and_gradients_lie_in_registered_memory(gpus: Nccl) -> None:
    """NCCL's memory holds anything at first, and a communicator exists from a group's first collective on."""
    mesh = Mesh.of(dp=2)
    context = ParallelContext(mesh=mesh, rng=RngStreams(1, mesh, CPU), device=CPU, dtype=torch.bfloat16)
    parameter: nn.Parameter = sharded_parameter(Sharding((8, 8)), mesh, dtype=torch.bfloat16, device=CPU)
    nn.init.ones_(parameter)
    (buffer,) = build_buffers([("p", parameter)], context, grad_dtype=torch.float32, registers=True)
    reduced = "all-reduce over 2"
    assert gpus.done == [reduced, (128, torch.bfloat16), reduced, (128, torch.float32)]
    assert [buffer.params.data_ptr(), buffer.grads.data_ptr()] == [each.data_ptr() for each in gpus.memory]
    assert parameter.sum() == buffer.params.sum() == 64 and not buffer.grads.any()
    gpus.done.clear()
    build_buffers([("p", parameter)], context, grad_dtype=torch.float32)
    assert not gpus.done


def test_memory_of_one_rank_and_of_cpus_is_the_usual(gpus: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nobody to send to, and gloo registers nothing."""
    zeros = torch.zeros(3)
    assert torch.equal(registered_zeros(3, dtype=torch.float32, device=CPU, mesh=Mesh.of(), axes=("dp", "cp")), zeros)
    monkeypatch.setattr(collectives, "is_gpu", lambda _: False)
    found = registered_zeros(3, dtype=torch.float32, device=CPU, mesh=Mesh.of(dp=2), axes=("dp", "cp"))
    assert torch.equal(found, zeros) and gpus.done == []


def test_gpus_without_multicast_are_refused(gpus: Nccl) -> None:
    """torch would end in an error of its own, or memory would not be registered without a word."""
    gpus.has_multicast = False
    with expect_error(ConfigError, "--use-nccl-ub", "GPUs", "NVLink"):
        registered_zeros(3, dtype=torch.float32, device=CPU, mesh=Mesh.of(dp=2), axes=("dp", "cp"))


def test_torch_allocates_by_these_names() -> None:
    """The stand-in above is called as torch's own backends are."""
    assert "size: typing.SupportsInt" in str(Backend.allocate_tensor.__doc__)
    check_line(str(Backend.allocate_tensor.__doc__), "torch.dtype", "torch.device", "torch.Tensor")
    assert "device: torch.device) -> bool" in str(Backend.supports_tensor_alloc.__doc__)
