"""Generation at any layout: the model reads the whole text for every token."""

from __future__ import annotations

import numpy as np

from megatron.core.inference.scoring import Sample
from megatron.core.inference.step_plan import RunnerLimits, RunningStep, StepPlan
from megatron.core.parallel.collectives import Handle
from megatron.training.checkpoints.trained_model import PlacedModel
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.metrics import Logits

_BLOCK_SIZE = 64


class WholeTextRunner:
    """A ``ModelRunner`` for models and layouts that can't generate with a cache; its blocks hold token ids.

    Every rank has one and starts the same plans: ``start`` is a collective, and all ranks get all logits. ``length``:
    of the longest text; None: that of training's sequences.
    """

    depth = 1
    failure = None

    def __init__(self, evaluator: Evaluator[PlacedModel], *, max_requests: int, length: int | None = None) -> None:
        config = evaluator.trained.config
        length, vocabulary = length or config.data.seq_length, config.model.vocab_size
        assert vocabulary is not None, "a tokenizer has set it"
        self.limits = RunnerLimits(
            num_blocks=1 + max_requests * -(-length // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            max_requests=max_requests,
            max_length=length,
            vocabulary=vocabulary,
        )
        self._evaluator = evaluator
        self._tokens = np.zeros((self.limits.num_blocks, _BLOCK_SIZE), dtype=np.int64)

    def start(self, plan: StepPlan) -> RunningStep:
        """Compute a step. A collective."""
        samples = []
        for row in plan.rows:
            end = row.start + len(row.tokens)
            blocks = np.array(row.blocks)
            positions = np.arange(row.start, end)
            self._tokens[blocks[positions // _BLOCK_SIZE], positions % _BLOCK_SIZE] = row.tokens
            text = self._tokens[blocks].reshape(-1)
            for last in range(row.start + row.logits_from, end):
                # The label of the last position is unknown; Logits doesn't read it.
                samples.append(Sample(np.append(text[: last + 1], 0), first_scored=last))
        return RunningStep(Handle([self._evaluator.evaluate(samples, Logits())]))

    def close(self) -> None:
        """Do nothing: no rank waits for plans."""
