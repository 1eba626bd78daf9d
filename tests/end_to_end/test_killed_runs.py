"""A training job killed again and again, at any moment, ends with the weights of one that was left alone."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.files.remote_path import path_of
from megatron.core.models.registry import FAMILIES
from megatron.training import loop
from megatron.training.pretrain import main
from megatron.training.reporting.metrics import StepRecord
from megatron.training.step import train_step
from tests.end_to_end.commands import TINY, assert_same_tensors, losses
from tests.harness import bucket
from tests.harness.ports import free_ports
from tests.harness.ranks import fork_server

KILLS = 4
"""Of a run. ``TEST_KILLS=100`` asks for as many of each kind of save, in several runs."""
RUNS = -(-int(os.environ.get("TEST_KILLS", KILLS)) // KILLS)
ITERATIONS = 12 * KILLS
FLAGS = f"{TINY} --train-iters {ITERATIONS} --save-interval 1 --keep-last-checkpoints 3"

EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --recompute-granularity selective "
    "--recompute-modules moe"
)
"""Biases that no gradient moves must be saved, and choices that are recomputed counted once."""


ZERO_3_WITH_MUON = "--optimizer muon --data-parallel-sharding-strategy optim_grads_params"
"""Ranks save parts of matrices whose update needs whole ones."""


def train(flags: list[str], log: str, seconds: float | None, variables: dict[str, str]) -> None:
    """Train in this process, whose output goes to a file. The kernel kills it ``seconds`` after its first step, however
    late others run on a busy machine.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)

    def step(*args: Any) -> StepRecord:
        done = train_step(*args)
        if seconds is not None and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        return done

    sys.argv = ["pretrain_gpt.py", *flags]
    with mock.patch.object(loop, "train_step", step):
        main(FAMILIES["gpt"])


def run(flags: list[str], log: Path, *, seconds: Sequence[float | None]) -> list[int | None]:
    """The exit codes of a training run, each rank in a process forked from one that has loaded torch; None of a rank
    that doesn't end.

    ``seconds``: of each rank, after its first step, until it is killed.
    """
    launcher = {"WORLD_SIZE": len(seconds), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    processes = []
    for rank, until in enumerate(seconds):
        variables = {name: str(value) for name, value in (launcher | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        given = (flags, str(log), until, variables if len(seconds) > 1 else {})
        processes.append(fork_server().Process(target=train, args=given, daemon=True))
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    ended = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return ended


@pytest.mark.parametrize("seed", range(RUNS))
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param("", 1, id="sync"),
        pytest.param("--async-save", 1, id="async", marks=pytest.mark.slow),
        # As many starts and steps as the first, of a model that takes longer.
        pytest.param(EXPERTS, 1, id="experts with biases", marks=pytest.mark.slow),
        pytest.param("object storage", 1, id="object storage", marks=pytest.mark.slow),
        pytest.param(ZERO_3_WITH_MUON, 2, id="two ranks, ZeRO 3, Muon", marks=pytest.mark.slow),
    ],
)
def test_killed_job_ends_as_one_that_was_left_alone(kind: str, ranks: int, seed: int, tmp_path: Path) -> None:
    """A run would lose steps it had called saved, or not start again, or go on differently."""
    draw = random.Random(seed)
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    if kind == "object storage":
        killed = bucket.url(tmp_path / "killed")
    flags = [*FLAGS.split(), *(kind.split() if kind.startswith("--") else [])]
    ended = run([*flags, f"--save={whole}"], tmp_path / "whole.log", seconds=[None] * ranks)
    assert not any(ended), (tmp_path / "whole.log").read_text()

    announced, num_killed = 0, 0
    seen: dict[int, str] = {}
    for number in range(KILLS + 1):
        log = tmp_path / f"{number}.log"
        seconds: list[float | None] = [None] * ranks
        if number < KILLS:  # any of the ranks, or several: the others end since they have lost it
            for rank in draw.sample(range(ranks), draw.randint(1, ranks)):
                seconds[rank] = draw.uniform(0.001, 0.12)
        ended = run([*flags, f"--save={killed}", f"--load={killed}"], log, seconds=seconds)
        num_killed += -signal.SIGALRM in ended
        assert None not in ended, "a rank waits for one that was killed"
        text = log.read_text()
        assert "Traceback" not in text
        resumed = re.search(r"successfully loaded checkpoint from .* at iteration (\d+)", text)
        assert (int(resumed[1]) if resumed else 0) >= announced, "an iteration that was called saved is lost"
        announced = max(
            [announced, *map(int, re.findall(r"successfully saved checkpoint from iteration +(\d+)", text))]
        )
        for iteration, loss in losses(text).items():
            assert seen.setdefault(iteration, loss) == loss
    assert announced == ITERATIONS
    assert num_killed == KILLS, "a run ended before it was killed: there is too little to do"
    assert seen == losses((tmp_path / "whole.log").read_text())
    assert_same_tensors(*(find_checkpoint(path_of(root)).path for root in (whole, killed)))
