"""Iterations that pass over their data: what follows is as if the data before had been shorter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.training.loop import train_and_save
from megatron.training.run.run import Run
from tests.harness.runs import tiny_run

FLAGS = "--mock-data --lr-decay-style constant --log-interval 1"


def trained(flags: str, *, iteration: int = 0, consumed: int = 0) -> Run:
    """A run after its last iteration; it begins after ``iteration`` with ``consumed`` samples."""
    run = tiny_run(ParallelContext.single(), f"{FLAGS} {flags}")
    run.progress.iteration, run.progress.consumed_samples = iteration, consumed
    assert train_and_save(run)
    return run


@pytest.mark.parametrize("spelling", ["--iterations-to-skip 1 2", "--skip-train-iteration-range 1-2"])
def test_data_are_passed_over(spelling: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To get past data that spoil training, as Megatron-LM and BigScience's fork do; both were refused."""
    skipping = trained(f"--train-iters 3 {spelling}")
    assert "passed over without a step" in capsys.readouterr().out
    later = trained("--train-iters 3", iteration=2, consumed=16)
    assert vars(skipping.progress) == {"iteration": 3, "consumed_samples": 24, "scheduled_samples": 8}
    for one, other in zip(skipping.model_state(), later.model_state(), strict=True):
        assert torch.equal(one.tensor, other.tensor)


def test_a_run_may_end_with_skipped_iterations(tmp_path: Path) -> None:
    """The last checkpoint is saved, and nothing has moved since the last step."""
    run = trained(f"--train-iters 3 --iterations-to-skip 2-3 --save {tmp_path} --save-interval 10")
    assert vars(run.progress) == {"iteration": 3, "consumed_samples": 24, "scheduled_samples": 8}
    assert (tmp_path / "iter_0000003").is_dir()
