"""Losses that layers report beside hidden states: what is reported, and which gradient starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.recompute import recomputed
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses, update_from_layer_metrics, updated_from_counts
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedules import one_f_one_b
from megatron.errors import ConfigError
from megatron.training.loss_sums import global_loss
from tests.harness.sentences import expect_error

SINGLE = ParallelContext.single()
NOTHING: Mapping[str, TensorSpec] = {}


def test_counts_in_half_precision_are_exact() -> None:
    """Forty layers of 4,097 tokens counted 163,840 in bf16 and infinitely many in fp16."""
    for dtype in (torch.float16, torch.bfloat16):
        side, hidden = SideLosses(), torch.ones(2, dtype=dtype)
        for _ in range(40):
            side.add(hidden, "gate", torch.tensor(0.5, dtype=dtype), 4097, context=SINGLE)
        assert side.take()[0]["gate"].tolist() == [20.0, 40 * 4097]


def test_gradient_has_every_factor() -> None:
    """Without the loss scale an fp16 router would hardly learn; the hidden states' gradient is left as it is."""
    weights = {"gate": torch.tensor(3.0)}
    side = SideLosses(backward_scale=1024.0, weights=weights)
    hidden, gate = torch.ones(2, dtype=torch.float16, requires_grad=True), torch.ones((), requires_grad=True)
    torch.autograd.backward(side.add(hidden, "gate", 2 * gate, 1, context=SINGLE, coefficient=0.5).sum())
    assert gate.grad is not None and gate.grad.item() == 0.5 * 1024 * 3 * 2
    assert hidden.grad is not None and hidden.grad.tolist() == [1.0, 1.0]


def test_a_statistic_has_no_gradient() -> None:
    """What is only reported, such as dropped tokens, may be a count."""
    side, hidden = SideLosses(backward_scale=8.0), torch.ones(2, requires_grad=True)
    torch.autograd.backward(side.add(hidden, "dropped", torch.tensor(3), 7, context=SINGLE).sum())
    assert hidden.grad is not None and hidden.grad.tolist() == [1.0, 1.0]
    assert side.take()[0]["dropped"].tolist() == [3.0, 7.0]


class Adjusting(nn.Module):
    """A module with what training changes without a gradient."""

    def update_from_counts(self, counts: torch.Tensor) -> None:
        self.counts = counts.tolist()


class Reporting(Adjusting):
    """One that also says under which name it reports."""

    metric_name = "choices"


def test_a_module_that_adjusts_itself_is_called_or_refused() -> None:
    """One without a metric's name, or that reported nothing, was left as it was: its state never moved."""
    module = Reporting()
    update_from_layer_metrics(updated_from_counts([nn.Sequential(module)]), {"choices": torch.tensor([1, 2])})
    assert module.counts == [1, 2]
    with pytest.raises(AssertionError, match="Adjusting updates itself from counts but has no metric_name"):
        updated_from_counts([Adjusting()])
    with pytest.raises(AssertionError, match="Reporting reported nothing as choices: call add_metric in its forward"):
        update_from_layer_metrics([Reporting()], {})


class Gated:
    """A recomputed layer with a side loss."""

    incoming = NOTHING

    def __init__(self) -> None:
        self.weight = torch.tensor(5.0, requires_grad=True)

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> LossSum:
        """One microbatch."""

        def layer(x: torch.Tensor) -> torch.Tensor:
            gate = (self.weight * x).sin()
            return microbatch.side_losses.add(x, "gate", gate.square(), 1, context=SINGLE).square()

        return LossSum.single("lm loss", recomputed(layer, microbatch.tensors["x"]), torch.tensor(1.0))


def test_microbatches_may_be_used_again() -> None:
    """A second step on the same microbatches reported what recomputation had left of the first."""
    batch = [Microbatch({"x": torch.tensor(2.0, requires_grad=True)}, StreamKey(1))]
    runner, plan = Runner([Gated()]), lower(one_f_one_b(1, 1))[0]
    for _ in range(2):
        loss = runner.step(plan, batch)
        assert loss is not None and loss.parts["gate"][1].item() == 1.0


def test_a_loss_that_the_train_spec_does_not_name_is_refused() -> None:
    """It was trained with a weight of 1 instead of its mean's, and never logged."""
    loss = dataclasses.replace(LossSum.single("lm loss", torch.ones(()), torch.ones(())), parts={"gate": torch.ones(2)})
    with expect_error(ConfigError, "loss_names()"):
        global_loss(loss, ["lm loss"], SINGLE)
