"""Pruning a checkpoint as a user does it: a table at the end, a smaller model that trains on, and sentences."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.conversion.native import read_native
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.loop import train_from_start_to_end
from tests.harness.runs import tiny_config
from tests.harness.sentences import check_sentence, expect_error
from tools.checkpoint.prune import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, and a data set beside it."""
    folder = tmp_path_factory.mktemp("prune") / "run"
    config = tiny_config(f"--mock-data --train-iters 2 --num-layers 3 --save {folder}")
    train_from_start_to_end(config, FAMILIES["gpt"].train_spec, ParallelContext.single(), started=0.0)
    with IndexedDatasetWriter(str(folder.parent / "data"), np.dtype(np.uint16)) as writer:
        writer.add_document(np.random.default_rng(1).integers(0, 50, 200))
    return folder


def pruned(run: Path, made: Path, flags: str, *, reads: bool = True) -> int:
    """The command, with a few sequences of the data."""
    texts = f"--data-path {run.parent / 'data'} --samples 6 --seq-length 16" if reads else ""
    return main(["--load", str(run), "--save", str(made), *texts.split(), *flags.split()])


def test_a_smaller_model_trains_on(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says what is left; the settings are those of the smaller model, and a run takes them from it."""
    made = tmp_path / "made"
    flags = "--target-ffn-hidden-size 40 --target-hidden-size 12 --target-num-layers 2"
    assert pruned(run, made, f"{flags} --tensor-model-parallel-size 2") == 0
    said = capsys.readouterr().out
    rows = {line[:30].strip(): line[30:].split() for line in said.splitlines()}
    assert rows["layers"][:3] == ["3", "2", "without"] and rows["hidden size"][:2] == ["16", "12"]
    assert rows["inner width of MLPs"][:2] == ["64", "40"] and 50 < float(rows["inner width of MLPs"][2]) < 100
    left = read_native(made)
    assert rows["parameters"][1] == f"{left.num_parameters:,}" and left.num_parameters < read_native(run).num_parameters
    assert 3 < float(rows["loss of the texts"][0]) != float(rows["loss of the texts"][1]) < 6
    check_sentence(said.splitlines()[-1].replace(str(made), "MADE").replace(str(run), "RUN"), "MADE", "--teacher-load")
    assert (left.model.num_layers, left.model.hidden_size, left.model.ffn_hidden_size) == (2, 12, 40)
    config = tiny_config(
        f"--mock-data --train-iters 1 --load {made} --finetune --teacher-load {run} "
        f"--num-layers 2 --hidden-size 12 --ffn-hidden-size 40 --kv-channels 8 --save {tmp_path / 'on'}"
    )
    train_from_start_to_end(config, FAMILIES["gpt"].train_spec, ParallelContext.single(), started=0.0)
    assert read_native(tmp_path / "on").model == left.model
    with expect_error(CheckpointError, f"--save {made}"):
        pruned(run, made, "--target-ffn-hidden-size 40")


def test_named_layers_need_no_texts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are counted from 1, as in Megatron-LM."""
    made = tmp_path / "made"
    assert pruned(run, made, "--layers-to-drop 1 2", reads=False) == 0
    assert re.search(r"^layers +3 +1  without 1, 2$", capsys.readouterr().out, re.MULTILINE)
    whole, left = (read_native(each).tensors for each in (run, made))
    name = "decoder.layers.{}.mlp.linear_fc1.weight"
    assert torch.equal(left[name.format(0)].make(), whole[name.format(2)].make())


def test_mistakes(run: Path, tmp_path: Path) -> None:
    """Before any work."""
    for flags, facts in (
        ("", ("--target-ffn-hidden-size",)),
        ("--target-ffn-hidden-size 8", ("--data-path", "--layers-to-drop")),
        ("--target-mamba-num-heads 2", ("--target-mamba-num-heads", "--target-hidden-size")),
        ("--target-num-layers 2 --seq-length 1", ("--seq-length", "2")),
        ("--prune-export-config {}", ("--prune-export-config", "--target-num-layers")),
    ):
        with expect_error(ConfigError, *facts):
            pruned(run, tmp_path / "made", flags, reads=False)
    assert not (tmp_path / "made").exists()
