"""Steps that are computed again: whose fault a bad result is, and the exit codes that say so."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.parallel.context import ParallelContext
from megatron.errors import RESULT_REFUSED, RUN_ELSEWHERE
from megatron.training.checkpoints.loading import load
from megatron.training.guards.guard import ResultError
from megatron.training.guards.injection import flip_bit
from megatron.training.guards.results import checksum
from megatron.training.guards.suspect import SUSPECT, rejected_iterations
from megatron.training.loop import train_and_save
from megatron.training.run.run import Run
from tests.harness import run_ranks
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_sentence, expect_error, refusal

FLAGS = "--mock-data --lr-decay-style constant --log-interval 1 --train-iters 6 --hidden-dropout 0.1"
VALIDATE = "--rerun-mode validate_results"


def trained(flags: str, *, context: ParallelContext | None = None, host: str = "n1") -> Run:
    """A run after its last iteration, on a host of this name."""
    run = tiny_run(context or ParallelContext.single(), f"{FLAGS} {flags}")
    load(run)
    with mock.patch("socket.gethostname", return_value=host):
        train_and_save(run)
    return run


def trained_on_ranks(context: ParallelContext, flags: str) -> tuple[list[float], str]:
    """Sums of the weights at the end, and what the rank has printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = trained(flags, context=context, host=f"n{context.mesh.world_rank}")
    return [float(each.tensor.double().sum()) for each in run.model_state()], said.getvalue()


def test_any_flipped_bit_changes_a_checksum() -> None:
    """Of every type that gradients have."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.linspace(-1, 1, 100, dtype=dtype)
        before = int(checksum(x))
        for bit in range(8 * dtype.itemsize):
            flipped = x.clone()
            flip_bit(flipped, bit)
            assert int(checksum(flipped)) != before
        flip_bit(flipped := x.clone(), None)
        assert not flipped.abs().max() < 1e30


def test_transient_fault_costs_nothing_and_names_its_rank() -> None:
    """A flipped bit in one rank's gradient would be in all weights after the next sum."""
    (clean, _), _ = run_ranks(trained_on_ranks, "", dp=2)
    # An infinite gradient is seen at any step; a low bit only where a step is computed twice anyway.
    flips = "--inject-bit-flip gradient:1:3 gradient:1:4:0"
    flipped = run_ranks(trained_on_ranks, f"{VALIDATE} --check-replay-interval 4 {flips}", dp=2)
    assert [weights for weights, _ in flipped] == [clean, clean]
    lines = re.findall(r"guard: iteration \d+: .*", flipped[1][1])  # the last rank prints
    assert [line.split(":")[1] for line in lines] == [" iteration 3", " iteration 4"]
    for line in lines:
        assert "rank 1 (n1)" in line
        assert "transient" in line
        assert "rank 0" not in line


def test_result_that_stays_is_told_from_a_device_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first start leaves it to one on other nodes (16), where it is another result, or the same (17)."""
    for kind in ("persistent_error", "correct_result"):
        folder, tracker = tmp_path / kind, tmp_path / f"{kind}.jsonl"
        flags = (
            f"{VALIDATE} --error-injection-type {kind} --save {folder} --load {folder} --save-interval 2 "
            f"--result-rejected-tracker-filename {tracker}"
        )
        spoiled = f"{flags} --error-injection-rate 2"
        for _ in range(2):  # the second time on the same node, which tells nothing
            with expect_error(ResultError, "iteration 2", "--iterations-to-skip 2", exit_code=RUN_ELSEWHERE):
                trained(spoiled)
            assert (folder / SUSPECT).exists()
        if kind == "persistent_error":
            capsys.readouterr()
            moved = trained(spoiled, host="n2")
            assert "persistent fault of n1" in capsys.readouterr().out
            assert moved.progress.iteration == 6
        else:
            with expect_error(ResultError, "iteration 2", exit_code=RESULT_REFUSED):
                trained(spoiled, host="n2")
            assert rejected_iterations(str(tracker)) == [2]
            assert trained(spoiled, host="n2").progress.scheduled_samples == 5 * 8  # the second is passed over
        assert not (folder / SUSPECT).exists()


def test_statistics_say_that_a_cpu_computes_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout and scales of FP8 must be those of the first time."""
    trained("--rerun-mode report_stats --bf16 --fp8-format hybrid --fp8-recipe delayed --log-interval 3")
    assert capsys.readouterr().out.count("3 steps computed twice; other bits in 0 of them") == 2


@pytest.mark.slow(reason="a second world; the default tier proves how one rank is named")
def test_replica_with_a_flipped_weight_is_named() -> None:
    """The loss is another one on all ranks, and the same when it is computed again."""
    flags = f"{VALIDATE} --inject-bit-flip weight:2:4 --global-batch-size 6"
    said = run_ranks(refusal, trained_on_ranks, flags, dp=3)
    for sentence in said:
        check_sentence(sentence, "ParallelError", "rank 2", "iteration 3")
