"""The runner: accumulation, evaluation, and the announcement of the last backward pass."""

from __future__ import annotations

import torch

from megatron.core.parallel.rng import StreamKey
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, Wires
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedules import forward_only, one_f_one_b

BATCHES = [Microbatch({"x": torch.tensor(float(value))}, StreamKey(value)) for value in (1, 2, 3)]


class Scale:
    """loss = weight · x"""

    def __init__(self) -> None:
        self.weight = torch.tensor(5.0, requires_grad=True)
        self.events: list[str] = []

    def __call__(self, wires: Wires, microbatch: Microbatch) -> LossSum:
        """One microbatch."""
        self.events.append(f"F{microbatch.key.sample}")
        return LossSum.single("loss", self.weight * microbatch.tensors["x"], torch.tensor(2.0))


def test_accumulates_and_announces_the_last_backward() -> None:
    """Gradients add up over microbatches; reduction may start with the last one only."""
    chunk = Scale()
    runner = Runner([chunk], before_last_backward=lambda index: chunk.events.append(f"last of {index}"))
    loss = runner.step(one_f_one_b(0, 1, 3), BATCHES, gradient_seed=10.0)
    assert chunk.weight.grad is not None and chunk.weight.grad.item() == 60.0
    assert loss.sum.item() == 30.0 and loss.count.item() == 6.0 and not loss.sum.requires_grad
    assert loss.parts["loss"].tolist() == [30.0, 6.0]
    assert chunk.events == ["F1", "F2", "F3", "last of 0"]


def test_evaluation_builds_no_graph() -> None:
    """Evaluation would otherwise hold every microbatch's activations."""
    chunk = Scale()
    loss = Runner([chunk]).step(forward_only(3), BATCHES)
    assert loss.sum.item() == 30.0 and chunk.weight.grad is None
