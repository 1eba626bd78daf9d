"""A run starts from a converted checkpoint as from its own: weights, settings, position; the optimizer is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.native import read_native, write_native
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError
from megatron.training.checkpoints.loading import load
from megatron.training.run.run import Run
from tests.harness.ranks import run_ranks
from tests.harness.runs import tiny_run
from tests.harness.sentences import expect_error
from tests.unit.conversion.megatron_checkpoints import CLASSIC, portable, random_tensors, write_torch

VALUES = random_tensors(ModelConfig(**CLASSIC))
SAME = (
    "--mock-data --num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --vocab-size 100"
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From Megatron-LM, iteration 500."""
    folder = tmp_path_factory.mktemp("converted")
    write_torch(folder / "theirs", CLASSIC, VALUES, style="core", tp=2)
    convert(Conversion("megatron-lm", folder / "theirs", "megatron", folder / "ours"), lambda words: None)
    return folder / "ours"


def started(context: ParallelContext, folder: Path, more: str) -> Run:
    run = tiny_run(context, f"{SAME} --load {folder} {more}")
    load(run)
    return run


def weight_sums(context: ParallelContext, folder: Path) -> list[float]:
    """Sum of every local tensor of a rank of a run that starts from the folder."""
    run = started(context, folder, f"--finetune --tensor-model-parallel-size {context.mesh.size('tp')}")
    return [entry.tensor.double().sum().item() for entry in run.model_state() if len(entry.sharding.split)]


def test_weights_arrive(converted: Path) -> None:
    run = started(ParallelContext.single(), converted, "--finetune")
    assert run.progress.iteration == 0
    for name, value in VALUES.items():
        parameter = run.models[0].get_parameter(name).detach()
        assert torch.equal(parameter[: value.shape[0]], value), name


def test_weights_arrive_on_two_ranks(converted: Path) -> None:
    """The parts of two tensor-parallel ranks add up to the whole."""
    whole = weight_sums(ParallelContext.single(), converted)
    parts = run_ranks(weight_sums, converted, tp=2)
    assert [sum(pair) for pair in zip(*parts)] == pytest.approx(whole)


def test_a_run_may_go_on_with_a_fresh_optimizer(converted: Path) -> None:
    """From where Megatron-LM's run was; without a word about the optimizer, that is a mistake."""
    run = started(ParallelContext.single(), converted, "--no-load-optim")
    assert (run.progress.iteration, run.progress.consumed_samples) == (500, 4000)
    with expect_error(CheckpointError):
        started(ParallelContext.single(), converted, "")


def test_a_tokenizer_that_is_not_known_may_be_any(tmp_path: Path) -> None:
    """The files of Megatron-LM's tokenizer were not at hand; a run names its own, and the sizes still have to fit."""
    flags: dict[str, Any] = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "gone.json", "merge_file": "gone.txt"}
    write_torch(tmp_path / "theirs", CLASSIC, VALUES, style="core", **flags)
    job = Conversion("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", true_vocab_size=101)
    convert(job, lambda words: None)
    run = started(ParallelContext.single(), tmp_path / "ours", "--finetune")
    assert run.loaded_from == str(tmp_path / "ours" / "iter_0000500")
    assert run.config.tokenizer.tokenizer_type == "NullTokenizer"
    for name, value in VALUES.items():
        assert torch.equal(run.models[0].get_parameter(name).detach()[: value.shape[0]], value), name


def test_a_model_without_its_tokenizer_is_the_same_model(tmp_path: Path) -> None:
    """What is read back is what was written, settings included."""
    model = ModelConfig(**CLASSIC)
    write_native(portable(model, VALUES), tmp_path / "ours", final=tmp_path / "ours")
    assert read_native(tmp_path / "ours").model == model
