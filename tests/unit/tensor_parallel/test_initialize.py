"""Initial weights depend on seed and name, never on the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import Sharding, StackedPart
from megatron.core.tensor_parallel.initialize import Constant, Normal, initialize
from megatron.core.tensor_parallel.layers import make_parameter

SHARDINGS = {
    "columns": Sharding((48, 20), {0: "tp"}),
    "rows": Sharding((20, 48), {1: "tp"}),
    "parts": Sharding((48, 20), {0: "tp"}, parts=(StackedPart(24), StackedPart(8), StackedPart(16, groups=2))),
    "vocabulary": Sharding((67, 20), {0: "tp"}, pad_multiple=8),
    "many draws": Sharding((4, 600_000), {0: "tp"}),
    "replicated": Sharding((30,)),
}


class One(nn.Module):
    """A module with one parameter."""

    def __init__(self, sharding: Sharding, mesh: Mesh, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = make_parameter(sharding, Normal(0.5), replace(ParallelContext.single(dtype=dtype), mesh=mesh))


def logical(sharding: Sharding, tp: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logical tensor that ``tp`` ranks initialize together."""
    whole = torch.full(sharding.shape, float("nan"), dtype=dtype)
    for rank in range(tp):
        mesh = Mesh.of(tp=tp, rank=rank)
        module = One(sharding, mesh, dtype)
        initialize(module, mesh, seed=seed)
        for piece in sharding.pieces(mesh):
            whole[piece.slices(of_local=False)] = module.weight.detach()[piece.slices(of_local=True)]
    return whole


@pytest.mark.parametrize("name", SHARDINGS)
def test_same_at_every_layout(name: str) -> None:
    """A run would start from another model when its layout changes."""
    whole = logical(SHARDINGS[name], tp=1)
    assert not whole.isnan().any()
    for tp in (2, 4):
        assert torch.equal(logical(SHARDINGS[name], tp=tp), whole)


def test_same_in_every_precision() -> None:
    """bf16 and fp64 runs start from the fp32 values, rounded."""
    whole = logical(SHARDINGS["columns"], tp=1)
    assert torch.equal(logical(SHARDINGS["columns"], tp=2, dtype=torch.float64), whole.double())
    assert torch.equal(logical(SHARDINGS["columns"], tp=2, dtype=torch.bfloat16), whole.bfloat16())


def test_distribution_and_seed() -> None:
    """Mean 0 and the asked deviation; other seeds give other weights; rows are not repeats of each other."""
    whole = logical(SHARDINGS["many draws"], tp=1)
    assert whole.mean().item() == pytest.approx(0, abs=2e-3)
    assert whole.std().item() == pytest.approx(0.5, rel=2e-3)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, logical(SHARDINGS["many draws"], tp=1, seed=4))


def test_vocabulary_padding_is_zero() -> None:
    """Padding rows belong to no token."""
    mesh = Mesh.of(tp=2, rank=1)
    module = One(SHARDINGS["vocabulary"], mesh)
    initialize(module, mesh, seed=1)
    assert module.weight.shape == (40, 20)
    assert (module.weight[27:] == 0).all() and (module.weight[:27] != 0).all()


def test_constant() -> None:
    """Norm weights start at one."""
    mesh = Mesh.single()
    module = nn.Module()
    module.weight = make_parameter(Sharding((4,)), Constant(1.0), ParallelContext.single())
    initialize(module, mesh, seed=1)
    assert module.weight.tolist() == [1.0] * 4
