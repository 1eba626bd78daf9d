"""Layers of several kinds, and branches arranged in several ways, at every kind of layout against one rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import sharding_of
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import Observed, parts
from tests.equivalence.families import LENGTH, VOCABULARY, causal_batch, gated_model
from tests.equivalence.test_equivalence import LLAMA, STILL, check, train_at
from tests.equivalence.training import Layout, train
from tests.tiers import tiers

GATED: dict[str, Any] = LLAMA | STILL | {"family": "gated", "num_layers": 4}
FULL = RecomputePlan("full")
EIGHT: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 2, "sharded": True, "overlap": True, "bucket_size": 3000}
LAYOUTS = {
    "accumulation": Layout(micro_batch_size=1),
    "recompute in runs of 2": Layout(recompute=RecomputePlan("full", "uniform", 2)),
    "tp2 sp recompute": Layout(tp=2, sequence_parallel=True, recompute=FULL),
    "cp2 tp2": Layout(cp=2, tp=2, recompute=RecomputePlan("selective")),
    "tp2 pp2 dp2 zero": Layout(**EIGHT, micro_batch_size=1, recompute=FULL),
    "tp2 sp pp2 dp2 zero, zb-h1": Layout(
        **EIGHT, sequence_parallel=True, schedule="zb-h1", micro_batch_size=1, recompute=FULL
    ),
    "tp2 pp2 dp2 zero, zb-v": Layout(**EIGHT, schedule="zb-v", chunks=2, micro_batch_size=1, recompute=FULL),
    "pp2 interleaved": Layout(pp=2, chunks=2, schedule="interleaved", micro_batch_size=1),
}


STACKS = {"gated": GATED, "arranged": LLAMA | STILL | {"family": "arranged", "num_layers": 4}}


@functools.cache
def reference(stack: str = "gated") -> Observed:
    """Three steps on one rank."""
    return train(ParallelContext.single(dtype=torch.float64), STACKS[stack], Layout())


# Of three layouts of the same eight ranks, the one with the hardest schedule is in the default tier.
LEFT = ("tp2 pp2 dp2 zero", "tp2 sp pp2 dp2 zero, zb-h1")


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=[name for name in LAYOUTS if name not in LEFT]))
def test_side_losses_and_their_gradients(layout: str) -> None:
    """A side loss that recomputation counts twice, or a schedule drops, trains another router."""
    check(train_at(GATED, LAYOUTS[layout]), [reference()])


@pytest.mark.parametrize("name", tiers(["tp2 sp recompute", LEFT[1]], first=["tp2 sp recompute"]))
def test_arrangements_of_branches(name: str) -> None:
    """A norm after a branch works on a part of the sequence under sequence parallelism; its gradient is a sum, too."""
    check(train_at(STACKS["arranged"], LAYOUTS[name]), [reference("arranged")])


def test_side_losses_matter() -> None:
    """The loss is reported as a mean over tokens and layers, and its gradient reaches the gate."""
    found = reference()
    gate = "decoder.layers.1.gated_mlp.gate.weight"
    assert gate in found.shapes
    assert "decoder.layers.1.self_attention.linear_qkv.weight" not in found.shapes
    lm_loss, reported, side = found.losses[:3]
    assert lm_loss == reported
    assert 1.0 < side < 4.0  # 4 * sum of squares of 4 shares


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
    settings = {name: value for name, value in GATED.items() if name != "family"}
    config = ModelConfig(max_position_embeddings=LENGTH, vocab_size=VOCABULARY, **settings)
    model = gated_model(config, ParallelContext.single(dtype=torch.float64), seed=7)
    batch, side = causal_batch(0), SideLossesInTheGraph()
    output = model(batch["tokens"], side_losses=side)
    mask = batch["loss_mask"]
    total: Tensor = output.cross_entropy(batch["labels"], mask) + mask.sum() * torch.stack(side.means).sum()
    torch.autograd.backward(total)
    for name, parameter in model.named_parameters():
        found = {part.offsets: part.values for part in reference().gradients[name]}
        assert parameter.grad is not None
        for part in parts(parameter.grad, sharding_of(parameter), Mesh.single()):
            torch.testing.assert_close(found[part.offsets], part.values, rtol=0, atol=1e-9, msg=name)
