"""Files that the code of a step runs through."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from megatron.core.parallel.context import ParallelContext
from megatron.training.step import train_step
from tests.harness.runs import tiny_run

REPOSITORY = Path(__file__).parents[3]


def files_of_a_step(flags: str) -> set[str]:
    """The files of the package that a run's second step enters."""
    run = tiny_run(ParallelContext.single(), f"--mock-data {flags}")
    batches, seen = run.data.training_batches(0), set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        seen.add(frame.f_code.co_filename)

    train_step(run, next(batches))
    batch = next(batches)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        train_step(run, batch)
    finally:
        sys.setprofile(before)
    return {str(Path(name).relative_to(REPOSITORY)) for name in seen if name.startswith(str(REPOSITORY / "megatron"))}


@pytest.mark.parametrize("flags", ["", "--recompute-granularity full --log-params-norm"])
def test_a_dense_step_enters_no_file_of_experts(flags: str) -> None:
    """Whoever followed a batch through the code met experts, flags and their rules at every step of a model without
    any.
    """
    entered = files_of_a_step(flags)
    assert "megatron/core/transformer/mlp.py" in entered
    assert not [name for name in entered if "/moe" in name]
    settings = [name for name in entered if name.startswith("megatron/config/")]
    assert set(settings) <= {
        "megatron/config/run.py",
        "megatron/config/batch_ramp.py",
        "megatron/config/fp8.py",
        "megatron/config/activation.py",
        "megatron/config/attention.py",
        "megatron/config/model.py",
        "megatron/config/training.py",
    }, "settings are read, not derived again"


def test_a_step_with_experts_enters_theirs() -> None:
    """Else the above would hold of a test that sees nothing."""
    entered = files_of_a_step("--num-experts 4")
    assert {"megatron/core/moe/router.py", "megatron/core/moe/experts.py"} <= entered
