"""Ctrl-C during training: one line says which checkpoint is kept and what is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.core.parallel.context import ParallelContext
from megatron.training import loop
from megatron.training.checkpoints.loading import load
from megatron.training.run.run import Run
from megatron.training.step import train_step
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_sentence


def interrupted(monkeypatch: pytest.MonkeyPatch, flags: str, *, after: int) -> str:
    """What a run says that is interrupted in the step after iteration ``after``."""
    run = tiny_run(ParallelContext.single(), f"--mock-data {flags}")

    def interrupted_step(run: Run, microbatches: Any) -> Any:
        if run.progress.iteration == after:
            raise KeyboardInterrupt
        return train_step(run, microbatches)

    monkeypatch.setattr(loop, "train_step", interrupted_step)
    load(run)
    with pytest.raises(KeyboardInterrupt) as caught:
        loop.train_and_save(run)
    monkeypatch.undo()
    return str(caught.value)


def test_what_is_kept_and_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checkpoint of this run, of the run it goes on from, none yet, and none asked for."""
    save = f"--save {tmp_path}/run --load {tmp_path}/run --train-iters 9 --save-interval"
    said = interrupted(monkeypatch, f"{save} 5", after=2)
    check_sentence(said, f"{tmp_path}/run", "2")
    kept = f"the checkpoint of iteration 2 is kept in {tmp_path}/run; iterations lost: {{}}"
    assert interrupted(monkeypatch, f"{save} 2", after=3) == kept.format(1)
    assert interrupted(monkeypatch, f"{save} 8", after=6) == kept.format(4)
    check_sentence(interrupted(monkeypatch, "", after=1), "--save", "1")
