"""Ranks come and go between the starts of a run, and its losses are those of a fixed number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.loop import train_from_start_to_end
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.run import Run
from tests.harness import run_ranks
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error

FLAGS = "--mock-data --tokenizer-type NullTokenizer --elastic --micro-batch-size 4 --global-batch-size 12"
DETERMINISTIC = "--hidden-dropout 0 --attention-dropout 0"


def test_microbatches_follow_the_ranks_and_the_batch_stays() -> None:
    """torchrun starts whatever nodes there are; a smaller batch would be another learning rate."""
    sizes = {ranks: tiny_config(FLAGS, ranks=ranks).training for ranks in (1, 2, 3, 4, 6, 12)}
    assert {each.global_batch_size for each in sizes.values()} == {12}
    assert {ranks: each.micro_batch_size for ranks, each in sizes.items()} == {1: 4, 2: 3, 3: 4, 4: 3, 6: 2, 12: 1}
    with_tensor = tiny_config(f"{FLAGS} --tensor-model-parallel-size 2", ranks=6)
    assert (with_tensor.replicas, with_tensor.training.micro_batch_size) == (3, 4)
    with expect_error(ConfigError, "--global-batch-size 12", "5", "4", "6"):
        tiny_config(FLAGS, ranks=5)


def leg(context: ParallelContext, flags: str) -> dict[int, float]:
    """The losses of one start of a run, by iteration."""
    found: dict[int, float] = {}

    def noted(record: StepRecord) -> None:
        found[record.iteration] = record.losses["lm loss"]

    def built(run: Run) -> None:
        run.after_step.append(noted)

    config = tiny_config(flags, ranks=context.mesh.world_size)
    train_from_start_to_end(config, GPTSpec(), context, started=0.0, built=built)
    return found


@pytest.mark.slow(reason="five worlds; the default tier proves that any checkpoint loads at any layout")
@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer", "--tensor-model-parallel-size 2"])
def test_four_three_two_and_four_ranks_are_one_run(more: str, tmp_path: Path) -> None:
    """The curve of a run that loses nodes must be that of one that doesn't."""
    flags = f"{FLAGS} {DETERMINISTIC} {more} --train-iters 8 --save-interval 2"
    tp = 2 if "tensor" in more else 1
    whole = run_ranks(leg, f"{flags} --save {tmp_path}/whole", tp=tp, dp=4, dtype=torch.float64)[0]
    found: dict[int, float] = {}
    for ranks, last in ((4, 2), (3, 4), (2, 6), (4, 8)):
        saving = f"--save {tmp_path}/parts --load {tmp_path}/parts --exit-interval {last}"
        found |= run_ranks(leg, f"{flags} {saving}", tp=tp, dp=ranks, dtype=torch.float64, reuse=False)[0]
    assert found == pytest.approx(whole, rel=1e-9)
    assert [*found] == [*range(1, 9)]
