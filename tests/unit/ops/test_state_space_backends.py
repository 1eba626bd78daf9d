"""Which backend computes scans, and how mamba-ssm's kernels are called, by a stand-in with its releases' signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.ops import state_space
from megatron.core.ops.state_space import ScanInputs, mamba_ssm
from megatron.errors import ConfigError
from tests.attention_stubs import signatures
from tests.harness.sentences import check_sentence, expect_error

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def computed(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the kernels document: the state restarts where ``seq_idx`` changes, and only document 0 continues the
    initial one. One token at a time.
    """
    x, dt, a, B, C = (given[name] for name in ("x", "dt", "A", "B", "C"))
    state, documents = given["initial_states"], given["seq_idx"]
    assert documents is None or documents.dtype == torch.int32
    assert given["return_final_states"] and not given["dt_softplus"] and given["dt_bias"] is None is given["D"]
    repeats = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(repeats, dim=2), C.repeat_interleave(repeats, dim=2)
    state = x.new_zeros(*x[:, 0].shape, B.shape[3]) if state is None else state
    rows, before = [], torch.zeros(len(x), dtype=torch.int32)
    for t in range(x.shape[1]):
        own = before if documents is None else documents[:, t]
        state = state * (torch.exp(dt[:, t] * a) * (own == before).unsqueeze(-1))[..., None, None]
        state = state + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        rows.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
        before = own
    return torch.stack(rows, dim=1), state


@pytest.fixture(params=["2.0", "2.2"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package mamba-ssm, of a release."""
    ((name, signature, _),) = signatures(f"mamba_ssm-{request.param}")
    module = ModuleType("ssd_combined")

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return computed(dict(bound.arguments))

    setattr(module, name, call)
    parents = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    for each in parents:
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.triton.ssd_combined", module)
    mamba_ssm._kernels.cache_clear()
    yield
    mamba_ssm._kernels.cache_clear()


@pytest.mark.parametrize("has_initial", [False, True])
def test_kernels_of_mamba_ssm(package: None, has_initial: bool) -> None:
    """Documents may have any numbers, and come back; the kernels want them counted from 0 and in 32 bits, and would
    drop the initial state of a first document that has another number.
    """
    generator = torch.Generator().manual_seed(0)
    x, dt = torch.randn(2, 9, 4, 3, generator=generator), torch.rand(2, 9, 4, generator=generator)
    B, C = torch.randn(2, 2, 9, 2, 5, generator=generator)
    initial = torch.randn(2, 4, 3, 5, generator=generator) if has_initial else None
    ids = torch.tensor([[7, 7, 7, 3, 3, 7, 7, 7, 7], [1, 1, 1, 1, 1, 1, 1, 1, 0]])
    a = -torch.rand(4, generator=generator)
    for documents in (None, ids):
        given = ScanInputs(x, dt, a, B, C, documents)
        found = mamba_ssm.scan(given, initial, chunk_size=4)
        wanted = state_space.scan(given, initial, backend="recurrent")
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_kernels_are_preferred_on_a_gpu(package: None) -> None:
    """A GPU with the package uses its kernels without being asked; fp64 and a CPU never."""
    assert state_space.choose(GPU, torch.bfloat16).name == "mamba-ssm"
    assert state_space.choose(GPU, torch.bfloat16, "chunked").name == "chunked"
    assert state_space.choose(CPU, torch.float32).name == "chunked"
    check_sentence(state_space.choose(GPU, torch.float64).describe(), "chunked", "mamba-ssm", "float64")


def test_backends_that_cannot_be_used_are_refused_by_name() -> None:
    """Never silently another one; a dry run, on tensors without memory, may be on a machine without the package."""
    assert mamba_ssm._kernels() is None
    check_sentence(state_space.choose(GPU, torch.bfloat16).describe(), "chunked", "mamba-ssm")
    with expect_error(ConfigError, "--mamba-scan-backend mamba-ssm", "not installed"):
        state_space.choose(GPU, torch.bfloat16, "mamba-ssm")
    with expect_error(ConfigError, "--mamba-scan-backend mamba-ssm", "GPUs"):
        state_space.choose(CPU, torch.float32, "mamba-ssm")
    with expect_error(ConfigError, "--mamba-scan-backend triton", "auto", "recurrent"):
        state_space.choose(CPU, torch.float32, "triton")
    assert state_space.choose(torch.device("meta"), torch.bfloat16, "mamba-ssm").name == "mamba-ssm"
