"""Generation on several ranks: rank 0 decides what is computed, all ranks compute it.

Rank 0 sends every plan to all ranks in one message. A rank runs its stage of the plan as soon as it has what the stage
before hands on; the last stage's logits go to rank 0, which alone samples tokens and knows requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron.core.inference.step_plan import ModelRunner, ModelStage, RunnerLimits, RunningStep, StepPlan
from megatron.core.parallel.collectives import Handle, broadcast
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.messages import Messages
from megatron.core.parallel.transport import Transport
from megatron.core.pipeline_parallel.actions import Placement

_END = -1  # in place of a model's number


class Leader:
    """Rank 0's runner (see ``ModelRunner``) of model ``number`` of those that the other ranks ``follow``."""

    def __init__(self, stage: ModelStage, mesh: Mesh, messages: Messages, *, number: int = 0) -> None:
        self.limits: RunnerLimits = stage.limits
        self.depth = mesh.size("pp")
        self._place, self._messages, self._number = _PipelinePlace(stage, mesh), messages, number

    @property
    def failure(self) -> Exception | None:
        """The loss of a rank."""
        return self._messages.failure

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> RunningStep:
        """Send the plan to the other ranks and compute this rank's stage of it; ParallelError for a lost rank."""
        self._messages.send([self._number, *plan.to_array().tolist()])
        return RunningStep(self._place.logits(plan, self._place.run(plan)))

    def close(self) -> None:
        """Let the other ranks return from ``follow``."""
        if self.failure is None:
            self._messages.send([_END])
            self._messages.close()


class LeaderOfAll:
    """Rank 0's runner where the ranks' ``runner`` computes each plan as a collective; the others ``follow_runner``."""

    def __init__(self, runner: ModelRunner, messages: Messages) -> None:
        self.limits, self.depth = runner.limits, runner.depth
        self._runner, self._messages = runner, messages

    @property
    def failure(self) -> Exception | None:
        """The loss of a rank."""
        return self._messages.failure

    def start(self, plan: StepPlan) -> RunningStep:
        """Send the plan to the other ranks and compute it with them; ParallelError for a lost rank."""
        self._messages.send([0, *plan.to_array().tolist()])
        return self._runner.start(plan)

    def close(self) -> None:
        """Let the other ranks return from ``follow_runner``."""
        if self.failure is None:
            self._messages.send([_END])
            self._messages.close()


def follow_runner(runner: ModelRunner, mesh: Mesh, messages: Messages) -> None:
    """Compute the plans of rank 0's ``LeaderOfAll`` on another rank, as ``follow`` does."""
    _follow([runner.start], mesh, messages)


@torch.inference_mode()
def follow(stages: Sequence[ModelStage], mesh: Mesh, messages: Messages) -> None:
    """Compute the plans of rank 0's runners on another rank, by number, until rank 0 closes.

    Waits for ever while there are no requests. Raises ParallelError when rank 0 is lost.
    """
    _follow([_PipelinePlace(stage, mesh).run for stage in stages], mesh, messages)


def _follow(computations: Sequence[Callable[[StepPlan], object]], mesh: Mesh, messages: Messages) -> None:
    while True:
        with mesh.activity.during("waiting for requests"):
            number, *numbers = messages.receive()
        if number == _END:
            messages.close()
            return
        with mesh.activity.during("generation"):
            computations[number](StepPlan.from_array(np.array(numbers, dtype=np.int64)))


class EveryRanksRunner:
    """A ``ModelRunner`` on every rank, whose engines all get the same requests, so that ranks needn't exchange plans.

    ``stages``: of this rank, by chunk of ``placement``. ``start`` is a collective of a pipeline's ranks, which all get
    the logits.
    """

    depth = 1
    failure = None

    def __init__(self, stages: Sequence[ModelStage], mesh: Mesh, placement: Placement) -> None:
        self.limits: RunnerLimits = stages[0].limits
        self._stages, self._mesh, self._locations = stages, mesh, placement.locations
        between = [(location.rank, following.rank) for location, following in pairwise(placement.locations)]
        routes = [(source, target) for source, target in between if source != target]
        self._transport = Transport(mesh, stages[0].device, routes=routes)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> RunningStep:
        """Compute this rank's stages of a plan, and get the last stage's logits."""
        here, sending, result = self._mesh.rank("pp"), list[Handle[Sequence[Tensor]]](), list[Tensor]()
        for number, location in enumerate(self._locations):
            if location.rank != here:
                continue
            stage = self._stages[location.chunk]
            if number and (source := self._locations[number - 1].rank) != here:
                result = list(self._transport.receive(stage.buffers(plan), source).wait())
            result = stage.run(plan, result)
            if location is not self._locations[-1] and (target := self._locations[number + 1].rank) != here:
                sending.append(self._transport.send(result, target))
        for handle in sending:
            handle.wait()
        last = self._locations[-1].rank
        if here != last:
            shape, first = (plan.num_logits, self.limits.vocabulary), self._stages[0]
            result = [torch.empty(shape, dtype=first.logits_dtype, device=first.device)]
        return RunningStep(Handle([broadcast(result[0].contiguous(), self._mesh, "pp", src=last)]))

    def close(self) -> None:
        """Does nothing: no rank waits for plans."""


class _PipelinePlace:
    """A rank's stage between those before and after it."""

    def __init__(self, stage: ModelStage, mesh: Mesh) -> None:
        self._stage, self._rank, self._last = stage, mesh.rank("pp"), mesh.size("pp") - 1
        self._sends_logits = self._rank == self._last and mesh.rank("tp") == 0
        routes = [(rank, rank + 1) for rank in range(self._last)]
        routes += [(self._last, 0)] * (self._last > 0)
        self._transport = Transport(mesh, stage.device, routes=routes)
        self._sending: Handle[Sequence[Tensor]] = Handle(())

    def run(self, plan: StepPlan) -> list[Tensor]:
        """Compute the stage's part of a plan, and send what it hands on."""
        received: Sequence[Tensor] = ()
        if self._rank > 0:
            received = self._transport.receive(self._stage.buffers(plan), self._rank - 1).wait()
        result = self._stage.run(plan, received)
        self._sending.wait()
        if self._rank < self._last:
            self._sending = self._transport.send(result, self._rank + 1)
        elif self._sends_logits and self._last > 0 and plan.num_logits:
            self._sending = self._transport.send(result, 0)
        return result

    def logits(self, plan: StepPlan, own: Sequence[Tensor]) -> Handle[Sequence[Tensor]]:
        """The logits on rank 0 of the plan that was just run; ``own`` without a pipeline.

        The receive starts here, in the order of plans: those of a draft model are waited for before earlier ones.
        """
        if self._last == 0:
            return Handle(own)
        shape = (plan.num_logits, self._stage.limits.vocabulary)
        buffer = torch.empty(shape, dtype=self._stage.logits_dtype, device=self._stage.device)
        return self._transport.receive([buffer], self._last) if plan.num_logits else Handle([buffer])
