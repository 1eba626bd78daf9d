"""The one runner: executes any list of actions, for training, accumulation and evaluation alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.chunk import Chunk, LossSum, Microbatch


class Runner:
    """Runs a rank's plan over its chunks.

    ``before_last_backward`` is told a chunk's index just before the backward pass that completes its gradients, so
    that their reduction may start while it runs.
    """

    def __init__(
        self, chunks: Sequence[Chunk], *, before_last_backward: Callable[[int], None] = lambda chunk: None
    ) -> None:
        self._chunks = chunks
        self._before_last_backward = before_last_backward

    def step(
        self, plan: Sequence[Action], microbatches: Sequence[Microbatch], *, gradient_seed: float = 1.0
    ) -> LossSum:
        """Execute ``plan``; gradients of ``gradient_seed`` times the loss sum are accumulated into the parameters.

        Returns the loss of all microbatches together, without a graph.
        """
        last_backward = {action.chunk: action for action in plan if action.kind == "B"}
        losses: dict[int, LossSum] = {}
        total: LossSum | None = None
        with torch.set_grad_enabled(bool(last_backward)):
            for action in plan:
                if action.kind == "F":
                    output = self._chunks[action.chunk]({}, microbatches[action.microbatch])
                    assert isinstance(output, LossSum), "a chunk without a successor returns the loss"
                    losses[action.microbatch] = output
                    total = output.detached() if total is None else total.plus(output.detached())
                else:
                    if action is last_backward[action.chunk]:
                        self._before_last_backward(action.chunk)
                    loss = losses[action.microbatch].sum
                    torch.autograd.backward(loss, torch.full_like(loss, gradient_seed))
                if action.kind == "B" or not last_backward:
                    del losses[action.microbatch]
        assert total is not None, "a plan runs at least one microbatch"
        return total
