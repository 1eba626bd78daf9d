"""Samples of a model in training: the same at every layout, and training doesn't notice them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.evaluation.samples import Samples
from megatron.training.evaluation.whole_text_runner import WholeTextRunner
from megatron.training.loop import train_and_save
from megatron.training.reporting.metrics import StepRecord
from tests.harness.ranks import run_ranks
from tests.harness.runs import tiny_config, tiny_run
from tests.harness.sentences import expect_error
from tests.tiers import tiers

FLAGS = "--mock-data --num-layers 4 --train-iters 4"
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
SAMPLES = "--generate-samples-interval 2 --generate-samples-prompts 5 7 --generate-samples-tokens 9"
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp and sp": ("--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2, "sequence_parallel": True}),
    "pp": ("--pipeline-model-parallel-size 2", {"pp": 2}),
    "interleaved": ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", {"pp": 2}),
    "zero-bubble V": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v", {"pp": 2}),
    "cp": ("--context-parallel-size 2", {"cp": 2}),
    "tp, sp and cp": (
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
        {"tp": 2, "cp": 2, "sequence_parallel": True},
    ),
    "dp": ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", {"dp": 2}),
}
Sampled = list[tuple[int, Sequence[tuple[str, str]]]]


def trained(context: ParallelContext, flags: str) -> tuple[list[Any], Sampled]:
    """Losses and gradient norms of all steps, and the samples."""
    run = tiny_run(context, f"{FLAGS} {flags}")
    steps, samples = list[Any](), Sampled()

    def step(record: StepRecord) -> None:
        steps.append((record.losses, record.grad_norm))

    def report(continued: Sequence[tuple[str, str]], *, iteration: int) -> None:
        samples.append((iteration, continued))

    run.reporter.step, run.reporter.samples = step, report  # type: ignore[method-assign,assignment]
    assert train_and_save(run)
    return steps, samples


def with_and_without(context: ParallelContext, flags: str) -> list[tuple[list[Any], Sampled]]:
    """Whatever the layout, no token reads the whole text again."""
    with mock.patch.object(WholeTextRunner, "start", side_effect=AssertionError("each token reads the whole text")):
        return [trained(context, f"{flags} {more}") for more in (SAMPLES, "", f"{NO_DROPOUT} {SAMPLES}")]


@functools.cache
def sampled_alone() -> Sampled:
    """What one rank samples, without dropout."""
    return trained(replace(ParallelContext.single(), dtype=torch.float64), f"{NO_DROPOUT} {SAMPLES}")[1]


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=("pp",)))
def test_training_is_the_same_bit_for_bit(layout: str) -> None:
    """With dropout, whose masks samples must not shift; every rank has the samples of one rank."""
    flags, sizes = LAYOUTS[layout]
    alone = sampled_alone()
    assert [iteration for iteration, _ in alone] == [2, 4]
    assert [[prompt for prompt, _ in continued] for _, continued in alone] == [["5", "7"]] * 2
    for sampled, plain, without_dropout in run_ranks(with_and_without, flags, dtype=torch.float64, **sizes):
        assert sampled[0] == plain[0] and len(plain[0]) == 4
        assert len(sampled[1]) == 2 and plain[1] == []
        assert without_dropout[1] == alone


def test_a_model_without_a_cache_reads_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of a user's own may have none."""
    expected = trained(ParallelContext.single(), SAMPLES)[1]
    monkeypatch.setattr("megatron.training.evaluation.samples.engine_of_every_rank", lambda *_, **__: None)
    assert trained(ParallelContext.single(), SAMPLES)[1] == expected


def test_log_line_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log quotes prompt and continuation, one line each; TensorBoard shows the whole text at its iteration."""
    run = tiny_run(ParallelContext.single(), f"{FLAGS} {SAMPLES} --tensorboard-dir {tmp_path}")
    train_and_save(run)
    run.reporter.close()
    found = re.findall(
        r'samples at iteration (\d+):\n   "5" -> "([\d ]*)"\n   "7" -> "([\d ]*)"\n', capsys.readouterr().out
    )
    assert [int(iteration) for iteration, *_ in found] == [2, 4]
    written = EventAccumulator(str(tmp_path)).Reload().Tensors("sample 2/text_summary")
    assert [(event.step, event.tensor_proto.string_val[0].decode()) for event in written] == [
        (int(iteration), f"7{text}") for iteration, _, text in found
    ]


def test_begins_a_document_without_prompts() -> None:
    _, samples = trained(ParallelContext.single(), "--generate-samples-interval 3 --generate-samples-temperature 0")
    [(iteration, [(prompt, text)])] = samples
    assert (iteration, prompt) == (3, "") and text


def test_refused_before_training() -> None:
    """Each is a sentence, not a failure at the first interval."""
    with expect_error(ConfigError, "--generate-samples-tokens", "--generate-samples-interval"):
        tiny_config("--mock-data --generate-samples-tokens 3")
    run = tiny_run(ParallelContext.single(), f"--mock-data {SAMPLES}")
    long = replace(run.config.reporting, generate_samples_prompts=(" ".join(["5"] * 16),))
    run.config = replace(run.config, reporting=long)
    with expect_error(ConfigError, "16 tokens", "--seq-length 16"):
        Samples(run)
    with expect_error(ConfigError):
        Samples(tiny_run(ParallelContext.single(), f"--mock-data {SAMPLES}", family=FAMILIES["bert"]))
