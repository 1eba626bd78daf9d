"""``--freeze`` where the parameters that match are on other ranks, and where a resumed run has other patterns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.sharding import ShardedState
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.reporting.startup import startup_report
from megatron.training.run.agreement import check_parameter_count
from megatron.training.run.run import startup_facts
from tests.end_to_end.commands import tensors
from tests.harness import run_ranks
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_line, expect_error
from tests.parallel.test_resume import CUT, Runs
from tests.tiers import tiers

TWO_STAGES = "--pipeline-model-parallel-size 2 --mock-data --tokenizer-type NullTokenizer"
FC1 = "decoder.layers.{}.mlp.linear_fc1.weight"


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def trained_here(context: ParallelContext, flags: str) -> set[str] | str:
    """Names of the parameters that this rank has gradients of, or why the run can't be."""
    try:
        run = tiny_run(context, f"{TWO_STAGES} {flags}")
    except ConfigError as error:
        return str(error)
    return {entry.name for buffer in run.buffers for entry in buffer.entries}


def test_all_ranks_agree_on_what_patterns_mean() -> None:
    """A rank without the layer would call the pattern a mistake, or one with it would train alone into a hang."""
    first, last = run_ranks(trained_here, "--freeze embedding.* decoder.layers.0.* *.bias", pp=2)
    assert first == set()
    assert last and {name.rpartition(".")[0].rpartition(".")[0] for name in last} <= {
        "decoder",
        *(f"decoder.layers.1{part}" for part in ("", ".self_attention", ".mlp")),
    }
    for patterns, complaint in {
        "layers.0.*": "--freeze layers.0.* matches no parameter of the model; close patterns that do: "
        "decoder.layers.0.*, decoder.layers.1.*",
        "embedding.* Decoder.*": "--freeze Decoder.* matches no parameter of the model; close patterns that do: "
        "decoder.*",
        "zzz": "--freeze zzz matches no parameter of the model; these do: decoder.*, embedding.*",
        "embedding.* d*": "--freeze embedding.* d* freezes all 28 parameter tensors of the model",
        "embedding.* --lr-multipliers dec*=2 layers.0.*=3": "--lr-multipliers layers.0.* matches no parameter of the "
        "model; close patterns that do: decoder.layers.0.*, decoder.layers.1.*",
        "embedding.* --lr-multipliers embed*=0.5": "--lr-multipliers embed*=0.5 has no effect: --freeze names all "
        "its parameters; leave it out",
        "embedding.* --lr-multipliers dec*=2 *.bias=3": "--lr-multipliers *.bias=3 has no effect: earlier "
        "pairs match all its parameters; move it before them",
    }.items():
        for said in run_ranks(trained_here, f"--freeze {patterns}", pp=2):
            assert isinstance(said, str) and said.startswith(complaint), said


def start_up(context: ParallelContext, flags: str) -> tuple[str, float]:
    """The report at the start, and the norm of the weights."""
    run = tiny_run(context, f"--mock-data --tokenizer-type NullTokenizer {flags}")
    facts = startup_facts(run, parameters=check_parameter_count(run.config, run.train_spec, run.layout(), context))
    return startup_report(run.config, facts), run.optimizer.parameter_norm()


def test_counts_and_norms_know_each_frozen_parameter_once() -> None:
    """A pattern that means more or less than its author thought shows nowhere but in the report; a tied copy, a
    replica or the vocabulary's padding that counted would change with the layout, and the norm at a resume.
    """
    _, norm = start_up(ParallelContext.single(), "")
    split = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    worlds: dict[str, dict[str, Any]] = {"": {}, f"{split} --use-distributed-optimizer": {"tp": 2, "pp": 2, "dp": 2}}
    for flags, world in worlds.items():
        for report, same_norm in run_ranks(start_up, f"--freeze embedding.* *layernorm* {flags}", **world):
            assert "; 1.23 k frozen, 6.43 k trained" in report
            assert same_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("dtype", tiers([torch.float32, torch.bfloat16], first=[torch.bfloat16]))
def test_a_resume_may_freeze_others(dtype: torch.dtype, runs: Runs) -> None:
    """Optimizer state that isn't there stopped the run, or, as loudly needed, nothing said that it starts anew."""
    bf16: str = "--bf16" if dtype == torch.bfloat16 else ""
    runs.run(f"{bf16} --freeze embedding.* --exit-interval {CUT}", save="first", world={"dtype": dtype})
    split: dict[str, Any] = {"pp": 2, "dp": 2, "dtype": dtype}
    flags = f"{bf16} --pipeline-model-parallel-size 2 --use-distributed-optimizer --freeze decoder.layers.0.*"
    second = runs.run(f"{flags} --exit-interval {CUT + 1}", save="second", load="first", world=split)
    check_line(second.log, "frozen", "12 parameter tensors")
    check_line(
        second.log, "2 parameter tensors", "embedding.position_embeddings.weight", "embedding.word_embeddings.weight"
    )
    first_state, second_state = tensors(runs.last("first")), tensors(runs.last("second"))
    words = "embedding.word_embeddings.weight"
    assert f"optimizer.exp_avg.{words}" in second_state.keys() - first_state.keys()
    assert f"optimizer.exp_avg.{FC1.format(0)}" in first_state.keys() - second_state.keys()
    frozen, trained = f"model.{FC1.format(0)}", f"model.{FC1.format(1)}"
    assert torch.equal(first_state[frozen], second_state[frozen])
    assert not torch.equal(first_state[trained], second_state[trained])
    assert runs.state("second")["optimizer"]["trained_since"] == dict.fromkeys(
        ("embedding.position_embeddings.weight", words), CUT
    )
    # Adam's first step is the rate times the gradient's sign, whatever the number of the run's step.
    rate = 1e-2 * (1 - CUT / 8)
    exact = f"optimizer.fp32_param.{words}" if bf16 else f"model.{words}"
    moved = (second_state[exact] - first_state[f"model.{words}"]).abs().max().item()
    assert moved == pytest.approx(rate, rel=1e-2)

    third = runs.run(f"{bf16} --exit-interval {CUT + 2}", save="third", load="second", world={"dtype": dtype})
    assert "trained now: 12 parameter tensors" in third.log and "frozen since" not in third.log
    again = runs.run(bf16, save="third", load="third", world={"dtype": dtype})
    assert "optimizer state" not in again.log and sorted(again.steps) == [6, 7, 8]


def test_state_that_a_checkpoint_should_have_is_missed(tmp_path: Path) -> None:
    """A damaged checkpoint would be taken for one of a run that had frozen the parameter."""
    entries, context = Optimizer.entries, ParallelContext.single()
    missing = f"optimizer.exp_avg.{FC1.format(1)}"

    def fewer(optimizer: Optimizer, **options: Any) -> Iterator[ShardedState]:
        return (entry for entry in entries(optimizer, **options) if entry.name != missing)

    with mock.patch.object(Optimizer, "entries", fewer):
        Saver(tiny_run(context, f"--mock-data --save {tmp_path} --save-interval 1 --freeze embedding.*")).save()
    for patterns in ("", "--freeze embedding.*", "--freeze decoder.layers.0.*"):
        with expect_error(CheckpointError, missing):
            load(tiny_run(context, f"--mock-data --load {tmp_path} {patterns}"))
    load(tiny_run(context, f"--mock-data --load {tmp_path} --freeze decoder.layers.1.*"))
