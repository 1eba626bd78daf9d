"""Activations that wait in main memory for their backward pass."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.core.parallel import activation_offload
from megatron.core.parallel.activation_offload import Offload
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.transformer.block import RecomputePlan
from tests.unit.planning.test_estimate import ARCHITECTURES, run_with, train_spec

CPU = torch.device("cpu")
PLANS = {
    "all layers": RecomputePlan(offloaded=9, least_offloaded=1),
    "first layers": RecomputePlan(offloaded=2, least_offloaded=1),
    "large tensors": RecomputePlan(offloaded=9, least_offloaded=40_000),
    "recomputed": RecomputePlan("full", offloaded=9, least_offloaded=1),
    "recomputed in runs": RecomputePlan("full", "uniform", 2, offloaded=1, least_offloaded=1),
    "some recomputed": RecomputePlan("full", "block", 2, offloaded=3, least_offloaded=1),
    "scores recomputed": RecomputePlan("selective", modules=("core_attn", "mlp"), offloaded=3, least_offloaded=1),
}
NAMES = ("gpt2", "attention dropout", "head norms, rotary, grouped", "parallel, one norm", "latent attention")


def gradients(name: str, plan: RecomputePlan, *, bf16: bool = True) -> tuple[list[Tensor], list[int]]:
    """Gradients of a model's weights, and bytes of the groups that its forward pass sent to main memory."""
    run = run_with(ARCHITECTURES[name], {"bf16": bf16})
    context = ModelContext.single(dtype=torch.bfloat16 if bf16 else torch.float32)
    model = train_spec(run).build_model(run.model, run.extra, context, recompute=plan).train()
    generator = torch.Generator().manual_seed(1)
    for each in model.parameters():
        nn.init.normal_(each, std=0.05, generator=generator)
    tokens = torch.randint(99, (2, run.data.seq_length), generator=generator)
    sent: list[int] = []

    class Noting(activation_offload._Group):
        @override
        def leave(self, stream: Any) -> None:
            super().leave(stream)
            sent.append(sum(each.there.numel() for each in self._leaving if each.there is not None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "_Group", Noting)
        loss = model(tokens, rng_key=StreamKey(0)).cross_entropy(tokens, torch.ones(tokens.shape))
    torch.autograd.backward(loss)
    return [each.grad for each in model.parameters() if each.grad is not None], sent


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_the_same_bits(name: str, plan: str) -> None:
    """Whatever goes away and comes back."""
    want, nothing = gradients(name, dataclasses.replace(PLANS[plan], offloaded=0))
    got, sent = gradients(name, PLANS[plan])
    assert not nothing and sum(sent) > 0
    assert len(want) == len(got) and all(torch.equal(one, other) for one, other in zip(want, got))


def test_a_group_comes_back_when_the_run_after_it_begins_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither at once, which would hold all groups, nor when it is needed, which would wait for the copy."""
    said: list[str] = []
    numbers = itertools.count()

    class Said(activation_offload._Group):
        name = ""

        @override
        def leave(self, stream: Any) -> None:
            self.name = f"group {next(numbers)}"
            super().leave(stream)

        @override
        def left(self) -> None:
            super().left()
            said.append(f"{self.name} has left")

        @override
        def return_(self) -> None:
            if not self._returns:
                said.append(f"{self.name} returns")
            super().return_()

    monkeypatch.setattr(activation_offload, "_Group", Said)

    class Layer(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
            said.append(f"forward {number}")
            ctx.number = number
            ctx.save_for_backward(x * number)
            return x * number

        @staticmethod
        @override
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (saved,) = ctx.saved_tensors
            assert torch.equal(saved, torch.full((4,), float(ctx.number)))
            said.append(f"backward {ctx.number}")
            return grad, None

    x = torch.ones(4, requires_grad=True)
    offload, y = Offload(CPU, least=1, kept=[x]), x
    for number in range(3):
        with offload.group():
            y = Layer.apply(torch.ones_like(x) + 0 * y, number)  # type: ignore[no-untyped-call]
        offload.follow(y, grouped=True)
    for number in (3, 4):
        y = Layer.apply(torch.ones_like(x) + 0 * y, number)  # type: ignore[no-untyped-call]
        offload.follow(y, grouped=False)
    torch.autograd.backward(y.sum())
    assert said == [
        *("forward 0", "forward 1", "group 0 has left", "forward 2", "group 1 has left", "forward 3"),
        *("group 2 has left", "forward 4", "backward 4", "group 2 returns", "backward 3", "group 1 returns"),
        *("backward 2", "group 0 returns", "backward 1", "backward 0"),
    ]


def test_what_others_hold_stays() -> None:
    """Weights, tables of all layers and the leaf of a stage: copies of them would free nothing."""
    weight, table = torch.ones(100, requires_grad=True), torch.ones(100)
    offload = Offload(CPU, least=10, kept=[weight, table])
    with offload.group():
        y = (weight[:50] * table[:50]) * (weight[50:] * 2)
    (leaving,) = [offload._leaving]
    assert leaving is not None
    offload.finish()
    torch.autograd.backward(y.sum())
    assert weight.grad is not None and leaving._members and len(leaving._members) == 2  # the two products
    with offload.group():
        z = torch.ones(9, requires_grad=True) * torch.ones(9)  # too small
    offload.finish()
    assert z.grad_fn is not None


def queues(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What events say that streams on a GPU set and wait for, as it happens."""
    said: list[str] = []
    queue = ["kernels"]
    streams = iter(["out", "back"])

    class Queue:
        def __init__(self, device: torch.device) -> None:
            self.name = next(streams)

        @contextmanager
        def used(self) -> Iterator[None]:
            queue.append(self.name)
            yield
            queue.pop()

    class Place:
        def __init__(self) -> None:
            self.recorded = ""

        def record(self) -> None:
            self.recorded = queue[-1]
            said.append(f"{queue[-1]} set")

        def wait(self) -> None:
            said.append(f"{queue[-1]} wait for {self.recorded}")

        def synchronize(self) -> None:
            raise AssertionError("the host waits")

    monkeypatch.setattr(activation_offload, "Stream", Queue)
    monkeypatch.setattr(activation_offload, "event", lambda device: Place())
    return said


def test_kernels_wait_for_copies_and_copies_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the three queues meet at events alone, and the host at none."""
    said = queues(monkeypatch)
    x = torch.ones(9, requires_grad=True)
    offload = Offload(CPU, least=1, kept=[])
    with offload.group():
        y = (x * 2).sin().cos()
    offload.follow(y, grouped=True)
    offload.finish()
    said.append("loss")
    torch.autograd.backward(y.sum())
    leaves = ["kernels set", "out wait for kernels", "out set", "kernels wait for out"]
    returns = ["kernels set", "back wait for kernels", "back set", "kernels wait for back"]
    assert said == [*leaves, "loss", *returns]


def test_memory_is_let_go_after_kernels_wait_for_the_copy_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of what no kernel reads: else the copy would write into the next tensor at this place."""
    said = queues(monkeypatch)

    class Layer(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1)
            return x * 1

        @staticmethod
        @override
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad  # without a look at what was saved

    x = torch.ones(9, requires_grad=True)
    offload = Offload(CPU, least=1, kept=[])
    with offload.group():
        y = Layer.apply(x)  # type: ignore[no-untyped-call]
    assert offload._leaving is not None
    (away,) = offload._leaving._members
    offload.follow(y, grouped=True)
    z = y * 2
    offload.follow(z, grouped=False)
    said.clear()
    torch.autograd.backward(z.sum())
    said.append("released" if away() is None else "held")
    del y, z, offload
    gc.collect()
    said.append("released" if away() is None else "held")
    assert said == ["kernels set", "back wait for kernels", "back set", "held", "kernels wait for back", "released"]
