"""The settings of a rehearsal: those of the run, with mock data and without files."""

from __future__ import annotations

import dataclasses

from megatron.config.run import RunConfig
from megatron.planning.shrinking import without_files


def rehearsed(run: RunConfig, *, vocab_size: int, steps: int) -> RunConfig:
    """The run for ``steps`` steps, and one evaluation of a batch if it evaluates."""
    plain = without_files(run, vocab_size=vocab_size, steps=steps)
    return dataclasses.replace(
        plain,
        model=dataclasses.replace(run.model, vocab_size=vocab_size),
        precision=run.precision,
        optimizer=run.optimizer,
        training=dataclasses.replace(plain.training, eval_iters=min(run.training.eval_iters, 1)),
    )
