"""The runner on one rank: accumulation, evaluation, several chunks, split backward passes, what it keeps."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.pipeline_parallel.actions import Placement
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedules import forward_only, interleaved, one_f_one_b
from megatron.core.pipeline_parallel.zero_bubble import zb_h1, zb_v
from megatron.core.tensor_parallel.linear import linear

BATCHES = [Microbatch({"x": torch.tensor(float(value))}, StreamKey(value)) for value in (1, 2, 3)]
NOTHING: Mapping[str, TensorSpec] = {}


class Scale:
    """loss = weight · x"""

    incoming = NOTHING

    def __init__(self) -> None:
        self.weight = torch.tensor(5.0, requires_grad=True)
        self.events: list[str] = []

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> LossSum:
        """One microbatch."""
        self.events.append(f"F{microbatch.rng_key.sample}")
        return LossSum.single("loss", self.weight * microbatch.tensors["x"], torch.tensor(2.0))


def test_accumulates_and_announces_the_last_backward() -> None:
    """Gradients add up over microbatches; reduction may start with the last one only."""
    chunk = Scale()

    @contextmanager
    def last_backward(index: int) -> Iterator[None]:
        assert chunk.weight.grad is not None and chunk.weight.grad.item() == 30.0
        yield
        chunk.events.append(f"last of {index}")
        assert chunk.weight.grad.item() == 60.0

    seeded = [dataclasses.replace(each, backward_scale=10.0) for each in BATCHES]
    loss = Runner([chunk], last_backward=last_backward).step(lower(one_f_one_b(1, 3))[0], seeded)
    assert loss is not None and not loss.sum.requires_grad
    assert loss.sum.item() == 30.0 and loss.count.item() == 6.0
    assert loss.parts["loss"].tolist() == [30.0, 6.0]
    assert chunk.events == ["F1", "F2", "F3", "last of 0"]


def test_evaluation_builds_no_graph() -> None:
    """Evaluation would otherwise hold every microbatch's activations."""
    chunk = Scale()
    loss = Runner([chunk]).step(lower(forward_only(Placement.looped(1), 3))[0], BATCHES)
    assert loss is not None and loss.sum.item() == 30.0 and chunk.weight.grad is None


class Link:
    """One matrix product of a chain; hands an integer tensor and an untouched one through beside the hidden state."""

    def __init__(self, place: str, context: ModelContext) -> None:
        generator = torch.Generator().manual_seed(len(place))
        self.weight = torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_()
        self.place, self.context = place, context
        self.incoming = NOTHING
        self.outputs: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive_later = 0

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
        """One microbatch."""
        x, number = stage_inputs.get("x", microbatch.tensors.get("x")), microbatch.tensors["number"]
        assert x is not None
        first, hidden = stage_inputs.get("first", x), torch.tanh(linear(x, self.weight, None, self.context))
        if self.place == "last":
            assert int(stage_inputs["number"]) == int(number)
            return LossSum.single("loss", (hidden * first).sum(), torch.tensor(1.0))
        out = hidden + first
        self.alive_later += sum(each() is not None for each in self.outputs)
        self.outputs = [weakref.ref(out.untyped_storage())]
        return {"x": out, "first": first, "number": number}


def chain_gradients(schedule: str) -> tuple[list[Tensor], float]:
    """Gradients of two chained products under a schedule, and the loss."""
    context = ModelContext.single(dtype=torch.float64)
    context = dataclasses.replace(context, weight_gradients=WeightGradients(may_wait=schedule.startswith("zb")))
    links = [Link("first", context), Link("last", context)]
    generator = torch.Generator().manual_seed(1)
    batches = [
        Microbatch(
            {"x": torch.randn(2, 4, generator=generator, dtype=torch.float64), "number": torch.tensor(each)},
            StreamKey(each),
        )
        for each in range(4)
    ]
    if schedule == "by hand":
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            middle = links[0]({}, batch)
            assert isinstance(middle, dict)
            loss = links[1](middle, batch)
            assert isinstance(loss, LossSum)
            total = total + loss.sum
        total.backward()  # type: ignore[no-untyped-call]
    else:
        plan = lower(zb_v(1, 4) if schedule == "zb-v" else interleaved(1, 4, 2))[0]
        found = Runner(links, weight_gradients=context.weight_gradients).step(plan, batches)
        assert found is not None
        total = found.sum
    grads = [link.weight.grad for link in links]
    return [grad for grad in grads if grad is not None], total.item()


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_chunks_of_one_rank_hand_over(schedule: str) -> None:
    """A tensor handed through unchanged, or one of integers, must neither lose its gradient nor need one."""
    (expected, loss), (found, same) = chain_gradients("by hand"), chain_gradients(schedule)
    assert same == pytest.approx(loss, abs=1e-12)
    for one, other in zip(expected, found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert len(found) == 2


def test_weights_wait_for_their_own_action() -> None:
    """Zero-bubble schedules would fill no bubble if the whole backward pass ran at once."""
    context = ModelContext.single(dtype=torch.float64)
    context = dataclasses.replace(context, weight_gradients=WeightGradients(may_wait=True))
    weight = torch.ones(2, 2, requires_grad=True)
    seen: list[str] = []

    class Product:
        incoming = NOTHING

        def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> LossSum:
            bias = torch.zeros(2, requires_grad=True)
            bias.register_hook(lambda grad: seen.append("bias"))  # type: ignore[no-untyped-call]
            x = torch.full((1, 2), float(microbatch.rng_key.sample))
            return LossSum.single("loss", linear(x, weight, bias, context).sum(), torch.tensor(1.0))

    weight.register_post_accumulate_grad_hook(lambda _: seen.append("weight"))  # type: ignore[no-untyped-call]

    @contextmanager
    def last_backward(chunk: int) -> Iterator[None]:
        seen.append("last:")
        yield

    runner = Runner([Product()], weight_gradients=context.weight_gradients, last_backward=last_backward)
    plan = lower(zb_h1(2, 3))[1]  # F0 I0 F1 I1 W0 F2 I2 W1 W2; the messages are left out
    runner.step(tuple(each for each in plan if type(each).__name__ == "Action"), BATCHES)
    assert seen == ["bias", "bias", "weight", "last:", "bias", "weight", "last:", "weight"]
    assert weight.grad is not None and weight.grad.tolist() == [[6.0, 6.0], [6.0, 6.0]]


def test_outputs_are_freed_once_they_are_handed_on() -> None:
    """A stage would keep every output it has sent until the backward pass: as much again as its inputs."""
    context = ModelContext.single()

    class Adder(Link):
        @override
        def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
            if self.place == "last":
                return LossSum.single("loss", stage_inputs["x"].sum(), torch.tensor(1.0))
            self.alive_later += sum(each() is not None for each in self.outputs)
            out = microbatch.tensors["x"] + self.weight.sum()
            self.outputs.append(weakref.ref(out.untyped_storage()))
            return {"x": out}

    links = [Adder("first", context), Adder("last", context)]
    # The receiving chunk of the same rank keeps its input only while its graph needs it, which a sum doesn't.
    Runner(links).step(lower(interleaved(1, 3, 2, group_size=1))[0], BATCHES)
    assert len(links[0].outputs) == 3 and links[0].alive_later == 0
