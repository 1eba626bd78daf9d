"""What one rank of a rehearsal is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class Task:
    """A rank to rehearse, for ``steps`` steps on a device of ``memory`` bytes."""

    config: RunConfig
    train_spec: TrainSpec
    rank: int
    steps: int
    memory: int
