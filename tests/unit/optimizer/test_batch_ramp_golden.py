"""Batch-size ramp-up: Megatron-LM's sizes, sample for sample."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.config.batch_ramp import BatchRamp

GOLDEN: list[list[int]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "rampup_v012.json").read_text(encoding="utf-8")
)
MICRO_BATCH, DATA_PARALLEL = 2, 2


def test_sizes_equal_megatron() -> None:
    """A run with --rampup-batch-size would take other batches than the same command does there."""
    ramp = BatchRamp.growing(start=8, increment=8, samples=100, full=32)
    for consumed, size, microbatches in GOLDEN:
        assert ramp.size_at(consumed) == size
        assert size // (MICRO_BATCH * DATA_PARALLEL) == microbatches


def test_steps_follow_the_recorded_run() -> None:
    """The number of iterations of --train-samples would not be the number of steps that are taken."""
    ramp = BatchRamp.growing(start=8, increment=8, samples=100, full=32)
    for steps, (consumed, _, _) in enumerate(GOLDEN):
        assert ramp.iterations(consumed) == steps
        assert ramp.samples_after(steps) == consumed
