"""Ranks that don't run the same thing are told apart before they train, and replicas that drift while they do."""

from __future__ import annotations

from unittest import mock

import torch

from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.training import loop
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run import agreement
from megatron.training.run.run import Run
from megatron.training.step import train_step
from tests.harness import run_ranks
from tests.harness.runs import tiny_config
from tests.harness.sentences import check_refusals, check_sentence, refusal

FLAGS = "--mock-data --tokenizer-type NullTokenizer"


def train(context: ParallelContext, flags_by_rank: list[str]) -> None:
    """A whole run, each rank with flags of its own."""
    config = tiny_config(f"{FLAGS} {flags_by_rank[context.mesh.world_rank]}", ranks=context.mesh.world_size)
    loop.train_from_start_to_end(config, GPTSpec(), context, started=0.0)


def train_with_other_code(context: ParallelContext) -> None:
    """Rank 1 has another version of the package."""
    digest = {0: "0" * 64, 1: "f" * 64}[context.mesh.world_rank]
    with mock.patch.object(agreement, "code_digest", return_value=digest):
        train(context, ["", ""])


def train_on_a_broken_device(context: ParallelContext, flags: str) -> None:
    """Rank 1 changes a weight after the second step."""

    def step(run: Run, *batch: list[object]) -> StepRecord:
        record = train_step(run, *batch)  # type: ignore[arg-type]
        if context.mesh.world_rank == 1 and record.iteration == 2:
            with torch.no_grad():
                run.models[0].get_parameter("decoder.final_layernorm.weight").mul_(1.5)
        return record

    with mock.patch.object(loop, "train_step", step):
        train(context, [flags, flags])


def test_ranks_with_other_settings_stop_before_they_train() -> None:
    """A node that reads an old launch script would train another model with the rest."""
    said = run_ranks(refusal, train, ["", "--weight-decay 0.5"], dp=2)
    check_refusals(said, "settings", "rank 0", "rank 1", "1", hide=[r"\b[0-9a-f]{12}\b"])


def test_ranks_with_other_code_stop_before_they_train() -> None:
    """A node whose installation was forgotten."""
    check_refusals(run_ranks(refusal, train_with_other_code, dp=2), "code", "000000000000", "ffffffffffff")


def test_replica_that_drifts_is_found() -> None:
    """Reductions hide a device that computes wrongly: the loss looks fine, and every checkpoint is another model."""
    flags = "--check-weight-hash-across-dp-replicas-interval 2"
    said = run_ranks(refusal, train_on_a_broken_device, flags, dp=2)
    for sentence, other in zip(said, ("rank 1", "rank 0")):
        facts = ("iteration 2", other, "model.decoder.final_layernorm.weight")
        check_sentence(sentence, "ParallelError", *facts, hide=[r"(?<=rank \d )\([^)]*\)"])
