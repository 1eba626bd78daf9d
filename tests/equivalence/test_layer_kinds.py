"""Layers of several kinds, and branches arranged in several ways, at every kind of layout against one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import sharding_of
from megatron.core.parallel.side_losses import SideLosses
from megatron.training.evaluation.parity import parts
from tests.equivalence.families import causal_batch
from tests.equivalence.flags import (
    CP2,
    FULL,
    LLAMA,
    LOOPED,
    PP2,
    SELECTIVE,
    SP,
    TP2,
    VEE,
    ZB_H1,
    ZERO_OVERLAPPED,
)
from tests.equivalence.test_equivalence import check
from tests.equivalence.training import run_of, train_alone, train_at
from tests.tiers import tiers

LAYOUTS: dict[str, str] = {
    "accumulation": "--micro-batch-size 1",
    "recompute in runs of 2": f"{FULL} --recompute-method uniform --recompute-num-layers 2",
    "tp2 sp recompute": f"--world-size 2 {TP2} {SP} {FULL}",
    "cp2 tp2": f"--world-size 4 {TP2} {CP2} {SELECTIVE}",
    "tp2 pp2 dp2 zero": (
        f"--world-size 8 {TP2} {PP2} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 --micro-batch-size 1 {FULL}"
    ),
    "tp2 sp pp2 dp2 zero, zb-h1": (
        f"--world-size 8 {TP2} {SP} {PP2} {ZB_H1} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 --micro-batch-size 1 {FULL}"
    ),
    "tp2 pp2 dp2 zero, zb-v": (
        f"--world-size 8 {TP2} {VEE} {ZERO_OVERLAPPED} --ddp-bucket-size 3000 --micro-batch-size 1 {FULL}"
    ),
    "pp2 interleaved": f"--world-size 2 {LOOPED} --micro-batch-size 1",
}


STACKS: dict[str, str] = {
    "gated": f"gated: {LLAMA} --num-layers 4",
    "arranged": f"arranged: {LLAMA} --num-layers 4",
}


# Of three layouts of the same eight ranks, the one with the hardest schedule is in the default tier.
LEFT = ("tp2 pp2 dp2 zero", "tp2 sp pp2 dp2 zero, zb-h1")


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=[name for name in LAYOUTS if name not in LEFT]))
def test_side_losses_and_their_gradients(layout: str) -> None:
    """A side loss that recomputation counts twice, or a schedule drops, trains another router."""
    check(train_at(STACKS["gated"], LAYOUTS[layout]), [train_alone(STACKS["gated"])])


@pytest.mark.parametrize("name", tiers(["tp2 sp recompute", LEFT[1]], first=["tp2 sp recompute"]))
def test_arrangements_of_branches(name: str) -> None:
    """A norm after a branch works on a part of the sequence under sequence parallelism; its gradient is a sum, too."""
    check(train_at(STACKS["arranged"], LAYOUTS[name]), [train_alone(STACKS["arranged"])])


def test_side_losses_matter() -> None:
    """The loss is reported as a mean over tokens and layers, and its gradient reaches the gate."""
    found = train_alone(STACKS["gated"])
    gate = "decoder.layers.1.gated_mlp.gate.weight"
    assert gate in found.shapes
    assert "decoder.layers.1.self_attention.linear_qkv.weight" not in found.shapes
    assert 1.0 < found.losses["step 1, gate loss"] < 4.0  # 4 * sum of squares of 4 shares


class SideLossesInTheGraph(SideLosses):
    """Keeps each layer's mean, times its coefficient, for autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[Tensor] = []

    @override
    def add(self, hidden: Tensor, name: str, total: Tensor, count: float | Tensor, **options: Any) -> Tensor:
        self.means.append(options["coefficient"] * total / count)
        return hidden


def test_gradient_is_that_of_the_means() -> None:
    """A side loss scaled by microbatches, ranks or the main loss's tokens weighs something else in every run."""
    family, config = run_of(STACKS["gated"])
    context = ModelContext.single(dtype=torch.float64)
    model = family.train_spec.build_model(config.model, (), context, seed=config.training.seed)
    batch, side = causal_batch(0), SideLossesInTheGraph()
    output = model(batch["tokens"], side_losses=side)
    mask = batch["loss_mask"]
    total: Tensor = output.cross_entropy(batch["labels"], mask) + mask.sum() * torch.stack(side.means).sum()
    torch.autograd.backward(total)
    for name, parameter in model.named_parameters():
        found = {part.offsets: part.values for part in train_alone(STACKS["gated"]).gradients[name]}
        assert parameter.grad is not None
        for part in parts(parameter.grad, sharding_of(parameter), Mesh.single()):
            torch.testing.assert_close(found[part.offsets], part.values, rtol=0, atol=1e-9, msg=name)
