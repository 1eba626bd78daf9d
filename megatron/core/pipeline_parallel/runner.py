"""The one runner: executes any plan, for training, accumulation and evaluation, with pipeline stages or without.

Of a microbatch it keeps the graph and what autograd saved between forward and backward pass, and not the output: the
message that carries the output frees it when it has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.parallel.activity import Activity
from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.operands import Operands
from megatron.core.parallel.transport import Transport
from megatron.core.parallel.weight_gradients import WeightGradients, Work
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.chunk import Chunk, LossSum, Microbatch, StageInputs, TensorSpec, has_gradient
from megatron.core.pipeline_parallel.lower import Finish, HandOver, Message, Plan, Receive, Send
from megatron.errors import ParallelError

Key = tuple[int, int]
"""Chunk and microbatch."""


@dataclass
class _Kept:
    """A microbatch in a chunk between forward and backward pass.

    ``inputs``: leaves of the graph. ``loss``: on the last stage. ``ends``: the last node of each output's graph,
    without the output's data; ``outputs``: shapes and types of the outputs that have a gradient.
    """

    inputs: StageInputs
    loss: Tensor | None = None
    ends: StageInputs = field(default_factory=dict)
    outputs: dict[str, TensorSpec] = field(default_factory=dict)


@dataclass
class _Step:
    """The state of a step. ``stage_inputs`` and ``gradients`` are about to be used or sent."""

    microbatches: Sequence[Microbatch]
    trains: bool
    stage_inputs: dict[Key, StageInputs] = field(default_factory=dict)
    gradients: dict[Key, StageInputs] = field(default_factory=dict)
    kept: dict[Key, _Kept] = field(default_factory=dict)
    weight_work: dict[Key, list[Work]] = field(default_factory=dict)
    transfers: dict[Message, Handle[Sequence[Tensor]]] = field(default_factory=dict)
    loss: LossSum | None = None

    def report(self, loss: LossSum) -> None:
        """Add a loss, or parts of one, to what the step returns."""
        self.loss = loss if self.loss is None else self.loss.plus(loss)


class Runner:
    """Runs a rank's plan over its chunks.

    ``transport``: to the ranks that hold other stages. ``last_backward``: entered with a chunk's number around each
    backward pass that computes some parameters' last gradients of the step, so that their reduction may start.
    ``weight_gradients``: those of the rank's context, for plans that split backward passes. ``low_precision``,
    ``operands``: those of the context, for what layers keep during a step. ``activity``: where the running action is
    noted. ``around``: entered with each action while it runs, to time it.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        transport: Transport | None = None,
        last_backward: Callable[[int], AbstractContextManager[Any]] = nullcontext,
        weight_gradients: WeightGradients | None = None,
        low_precision: LowPrecision | None = None,
        operands: Operands | None = None,
        device: torch.device | None = None,
        activity: Activity | None = None,
        around: Callable[[Action], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._chunks, self._transport = chunks, transport
        self._last_backward, self._weight_gradients = last_backward, weight_gradients
        self._low_precision, self._operands = low_precision or LowPrecision(), operands or Operands()
        self._device = device or torch.device("cpu")
        self._activity, self._around = activity or Activity(), around

    def step(self, plan: Plan, microbatches: Sequence[Microbatch]) -> LossSum | None:
        """Execute ``plan``; gradients of the loss sum times each ``backward_scale`` accumulate in the parameters.

        Returns the loss of all microbatches together, without a graph: on ranks without the last stage only parts that
        their layers reported, or None.
        Raises ParallelError, which names stages and microbatch, when a message is not transferred.
        """
        last = {(action.chunk, action.kind): action for action in plan if isinstance(action, Action)}
        step = _Step(microbatches, trains=any(kind != "F" for _, kind in last))
        of_products = self._low_precision.step(trains=step.trains)
        with torch.set_grad_enabled(step.trains), of_products, self._operands.step():
            for instruction in plan:
                if isinstance(instruction, Action):
                    self._activity.action = instruction.words
                    with self._around(instruction):
                        self._run(step, instruction, is_last=instruction == last[instruction.chunk, instruction.kind])
                else:
                    self._move(step, instruction)
        self._activity.action = ""
        return step.loss

    def _run(self, step: _Step, action: Action, *, is_last: bool) -> None:
        key = (action.chunk, action.microbatch)
        if action.kind == "F":
            self._forward(step, key)
            return
        with self._last_backward(action.chunk) if is_last else nullcontext():
            if action.kind == "B":
                self._backward(step, key)
            elif action.kind == "I":
                assert self._weight_gradients is not None, "a plan that splits backward passes needs weight_gradients"
                with self._weight_gradients.left_for_later() as work:
                    self._backward(step, key)
                step.weight_work[key] = work
            else:
                for each in step.weight_work.pop(key):
                    each()

    def _forward(self, step: _Step, key: Key) -> None:
        chunk, microbatch = self._chunks[key[0]], step.microbatches[key[1]]
        stage_inputs = step.stage_inputs.pop(key, {})
        if step.trains:
            stage_inputs = {
                name: tensor.requires_grad_(has_gradient(name, tensor)) for name, tensor in stage_inputs.items()
            }
        output = chunk(stage_inputs, microbatch)
        kept = _Kept(stage_inputs)
        if isinstance(output, LossSum):
            kept.loss = output.sum
            step.report(output.detached())
        else:
            floating = {name: tensor for name, tensor in output.items() if has_gradient(name, tensor)}
            kept.outputs = {name: TensorSpec.of(tensor) for name, tensor in floating.items()}
            kept.ends = {name: _EndOfGraph.apply(tensor) for name, tensor in floating.items() if tensor.requires_grad}  # type: ignore[no-untyped-call]
            step.stage_inputs[key] = {name: tensor.detach() for name, tensor in output.items()}
        reported = microbatch.side_losses.take()
        if any(reported):
            step.report(LossSum.reported(*reported, device=self._device))
        if step.trains:
            step.kept[key] = kept

    def _backward(self, step: _Step, key: Key) -> None:
        kept, microbatch = step.kept.pop(key), step.microbatches[key[1]]
        if kept.loss is not None:
            torch.autograd.backward(kept.loss, torch.full_like(kept.loss, microbatch.backward_scale))
        else:
            received = step.gradients.pop(key)
            torch.autograd.backward([*kept.ends.values()], [received[name] for name in kept.ends])
        microbatch.side_losses.take()  # layers that were recomputed have reported theirs again
        step.gradients[key] = {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in kept.inputs.items()
            if tensor.requires_grad
        }

    def _move(self, step: _Step, instruction: Send | Receive | Finish | HandOver) -> None:
        message = instruction.message
        source, target = (message.source.chunk, message.microbatch), (message.target.chunk, message.microbatch)
        on_the_way = step.stage_inputs if message.content == "stage_inputs" else step.gradients
        if isinstance(instruction, HandOver):
            on_the_way[target] = on_the_way.pop(source)
            return
        try:
            if isinstance(instruction, Finish):
                step.transfers.pop(message).wait()
                return
            assert self._transport is not None, "a plan with messages needs a transport"
            if isinstance(instruction, Send):
                tensors = _in_order(on_the_way.pop(source))
                step.transfers[message] = self._transport.send(tensors, message.target.rank)
                return
            expected: Mapping[str, TensorSpec] = self._chunks[message.target.chunk].incoming
            if message.content == "gradients":
                expected = step.kept[target].outputs
            on_the_way[target] = {name: spec.empty(self._device) for name, spec in expected.items()}
            buffers = _in_order(on_the_way[target])
            step.transfers[message] = self._transport.receive(buffers, message.source.rank)
        except RuntimeError as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ParallelError(
                f"{message} did not come through, from pipeline rank {message.source.rank} to {message.target.rank}: "
                f"the other one failed or hangs ({first_line})"
            ) from error


def _in_order(stage_inputs: StageInputs) -> list[Tensor]:
    """The tensors in the order in which both ends move them."""
    return [stage_inputs[name] for name in sorted(stage_inputs)]


class _EndOfGraph(torch.autograd.Function):
    """A tensor with the shape and the graph of another, but a single element of memory."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
