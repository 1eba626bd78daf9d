"""Evaluation measures the model without changing it or the training around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.training import loop
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.loss_sums import GlobalLoss
from megatron.training.run.run import Run
from megatron.training.step import train_step
from tests.harness.runs import tiny_config, tiny_run

DRAWING = "--mock-data --hidden-dropout 0.5 --attention-dropout 0.5 --eval-iters 2 --eval-interval 1"


def build(flags: str = DRAWING) -> Run:
    return tiny_run(ParallelContext.single(dtype=torch.float64), flags)


def valid_loss(run: Run, *, evaluation: int = 0) -> float:
    return evaluate(run, run.data.evaluation_batches("valid", evaluation=evaluation)).means["lm loss"]


def test_dropout_is_off() -> None:
    """A validation loss with dropout on is too high, and noise makes it useless for choosing a checkpoint."""
    run, without = build(), build(DRAWING.replace("0.5", "0"))
    loss = valid_loss(run)
    assert loss == valid_loss(run)
    assert loss == valid_loss(without)
    assert loss != valid_loss(run, evaluation=1)


def test_the_loss_is_the_mean_over_all_batches() -> None:
    """An evaluation that reports only its last batch is as noisy as that."""
    run = build()
    each = [
        evaluate(run, iter([batch])).means["lm loss"] for batch in run.data.evaluation_batches("valid", evaluation=0)
    ]
    assert len(set(each)) == 2
    assert valid_loss(run) == pytest.approx(sum(each) / 2, abs=1e-12)


def test_models_train_afterwards() -> None:
    """A model left in evaluation mode goes on training without dropout, and overfits."""
    run = build()
    valid_loss(run)
    assert all(module.training for model in run.models for module in model.modules())
    assert not any(p.grad is not None and p.grad.any() for model in run.models for p in model.parameters())


def training_losses(*, evaluates: bool) -> list[float]:
    run = build()
    batches = run.data.training_batches(0)
    losses = []
    for step in range(3):
        losses.append(train_step(run, next(batches)).losses["lm loss"])
        if evaluates:
            valid_loss(run, evaluation=step)
    return losses


def test_training_is_the_same_with_and_without_evaluations() -> None:
    """Otherwise --eval-interval would change the trained model."""
    assert training_losses(evaluates=True) == training_losses(evaluates=False)


def test_no_activations_are_kept() -> None:
    """Kept for a backward pass that never comes, they could take more memory than training does."""
    run, graphs = build(), []
    run.models[0].register_forward_hook(lambda module, inputs, output: graphs.append(output.hidden.requires_grad))
    valid_loss(run)
    assert graphs == [False] * 8


def samples(batches: Iterator[list[Microbatch]]) -> list[int]:
    return [microbatch.rng_key.sample for batch in batches for microbatch in batch]


def test_an_evaluation_reads_on_where_the_one_before_ended() -> None:
    """Evaluating on the same few batches again and again measures those, not the validation set."""
    run, longer = build(), build(DRAWING.replace("--eval-iters 2", "--eval-iters 4"))
    evaluations = [list(run.data.evaluation_batches("valid", evaluation=number)) for number in (0, 1)]
    assert [samples(iter(batches)) for batches in evaluations] == [list(range(0, 16, 2)), list(range(16, 32, 2))]
    read = [batch for batches in evaluations for batch in batches]
    for batch, expected in zip(read, longer.data.evaluation_batches("valid", evaluation=0)):
        for microbatch, wanted in zip(batch, expected):
            assert torch.equal(microbatch.tensors["tokens"], wanted.tensors["tokens"])
            assert microbatch.rng_key == wanted.rng_key
            assert microbatch.rng_key.split == "valid"


@pytest.mark.parametrize("resumed_at", [0, 4])
def test_the_loop_numbers_evaluations_by_iteration(resumed_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run evaluates on the samples that the uninterrupted one would have had; the last one reads on, too."""
    seen: list[tuple[str, int]] = []

    def record(run: Run, batches: Iterator[list[Microbatch]]) -> GlobalLoss:
        keys = [microbatch.rng_key for batch in batches for microbatch in batch]
        seen.append((keys[0].split, keys[0].sample))
        return GlobalLoss({"lm loss": (1.0, 1.0)}, 1.0)

    def load(run: Run) -> None:
        run.progress.iteration, run.progress.consumed_samples = resumed_at, 8 * resumed_at

    monkeypatch.setattr(loop, "evaluate", record)
    monkeypatch.setattr(loop, "load", load)
    config = tiny_config("--mock-data --train-iters 6 --eval-interval 2 --eval-iters 1")
    loop.train_from_start_to_end(config, GPTSpec(), ParallelContext.single(), started=0.0)
    regular = [("valid", sample) for iteration, sample in ((2, 0), (4, 8), (6, 16)) if iteration > resumed_at]
    assert seen == [*regular, ("valid", 24), ("test", 0)]


def test_evaluation_ends() -> None:
    """Validation data are an endless stream; --eval-iters says how much of it is one evaluation."""
    batches = build().data.evaluation_batches("valid", evaluation=0)
    assert [len(batch) for batch in itertools.islice(batches, 3)] == [4, 4]
