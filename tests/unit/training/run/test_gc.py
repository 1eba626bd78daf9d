"""What a run does beside learning: flags that change no number, so that nobody would notice one that does nothing."""

from __future__ import annotations

import dataclasses
import gc
from unittest import mock

import pytest
import torch

from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.training import loop, step
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run import gc as run_gc
from megatron.training.run.run import Run
from tests.harness.runs import tiny_config

FLAGS = "--mock-data --tokenizer-type NullTokenizer"


def train(flags: str) -> list[tuple[bool, bool]]:
    """A whole run of three steps: in each, whether kernels are deterministic and Python collects by itself."""
    seen = []

    def observed(run: Run, *batch: list[object]) -> StepRecord:
        seen.append((torch.are_deterministic_algorithms_enabled(), gc.isenabled()))
        return step.train_step(run, *batch)  # type: ignore[arg-type]

    with mock.patch.object(loop, "train_step", observed):
        loop.train_from_start_to_end(tiny_config(f"{FLAGS} {flags}"), GPTSpec(), ParallelContext.single(), started=0.0)
    assert (torch.are_deterministic_algorithms_enabled(), gc.isenabled()) == (False, True), "as it was before"
    return seen


@pytest.mark.parametrize(
    ("flags", "during"),
    [("", (False, True)), ("--deterministic-mode", (True, True)), ("--manual-gc", (False, False))],
)
def test_flags_hold_while_training(flags: str, during: tuple[bool, bool]) -> None:
    assert train(flags) == [during] * 3


@pytest.mark.parametrize(
    ("flags", "collections"),
    [
        ("", 0),
        ("--manual-gc", 1),
        ("--manual-gc --manual-gc-interval 2", 2),
        ("--manual-gc --eval-iters 1 --eval-interval 3 --train-iters 3", 1 + 3 * 2),
        ("--manual-gc --eval-iters 1 --eval-interval 3 --train-iters 3 --no-manual-gc-eval", 1),
    ],
)
def test_garbage_is_collected_when_it_is_due(flags: str, collections: int) -> None:
    """At the start, at the interval, and around each evaluation: at iteration 3, at the end, and on the test set."""
    with mock.patch.object(gc, "collect") as collect:
        train(flags)
    assert collect.call_count == collections


@pytest.mark.parametrize(("level", "releases"), [(0, []), (1, [1]), (2, [1, 2])])
def test_memory_is_given_back_at_the_levels_asked_for(level: int, releases: list[int]) -> None:
    """1: after each step; 2: before each update, too. Nothing on a CPU, which has no such cache."""
    training = tiny_config(f"{FLAGS} --empty-unused-memory-level {level}").training
    context = ParallelContext.single()
    accelerator = dataclasses.replace(context, device=torch.device("meta"))
    for where in (1, 2):
        with mock.patch.object(torch, "get_device_module") as module:
            run_gc.release_memory(training, context, level=where)
            assert not module.called
            run_gc.release_memory(training, accelerator, level=where)
            assert module.return_value.empty_cache.called == (where in releases)
