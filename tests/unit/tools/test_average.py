"""Means of checkpoints, as a user makes them and trains on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.loop import train_from_start_to_end
from tests.end_to_end.commands import tensors
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error
from tools.checkpoint.average import main

NAME = "model.decoder.layers.0.mlp.linear_fc1.weight"


def train(flags: str) -> None:
    """Run a command's flags on one rank, from start to end."""
    config = tiny_config(f"--mock-data --save-interval 1 {flags}")
    train_from_start_to_end(config, FAMILIES["gpt"].train_spec, ParallelContext.single(), started=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints and a moving average."""
    folder = tmp_path_factory.mktemp("averages") / "run"
    train(f"--save {folder} --train-iters 3 --ema-decay 0.5")
    return folder


def weights(folder: Path, *, step: int | None = None) -> dict[str, torch.Tensor]:
    return tensors(Path(str(find_checkpoint(folder, step=step).path)))


def test_the_mean_is_weighted_and_trains_on(run: Path, tmp_path: Path) -> None:
    """A mean that took a checkpoint twice, or left its weight out, is a worse model that nothing shows."""
    main(["--load", str(run), "--ckpt-steps", "1", "3", "--weights", "1", "3", "--save", str(tmp_path / "mean")])
    expected = 0.25 * weights(run, step=1)[NAME] + 0.75 * weights(run, step=3)[NAME]
    torch.testing.assert_close(weights(tmp_path / "mean")[NAME], expected)
    main(["--load", str(run), "--last", "2", "--save", str(tmp_path / "last")])
    expected = (weights(run, step=2)[NAME] + weights(run, step=3)[NAME]) / 2
    torch.testing.assert_close(weights(tmp_path / "last")[NAME], expected)
    train(f"--load {tmp_path / 'last'} --finetune --train-iters 1")


def test_the_moving_average_becomes_a_checkpoint(run: Path, tmp_path: Path) -> None:
    """For programs that know nothing of averages, such as a conversion."""
    main(["--load", str(run), "--load-ema", "--save", str(tmp_path / "ema")])
    assert torch.equal(weights(tmp_path / "ema")[NAME], weights(run)[NAME.replace("model", "optimizer.ema")])


def test_models_that_differ_are_refused(run: Path, tmp_path: Path) -> None:
    """Of two models the mean is neither; and a moving average is of a run that kept one."""
    train(f"--save {tmp_path / 'other'} --train-iters 1 --qk-layernorm")
    there = str(tmp_path / "mean")
    with expect_error(CheckpointError, "--qk-layernorm", str(run), str(tmp_path / "other")):
        main(["--load", str(run), str(tmp_path / "other"), "--save", there])
    with expect_error(CheckpointError, "--load-ema", "--ema-decay"):
        main(["--load", str(tmp_path / "other"), "--load-ema", "--save", there])
    with expect_error(CheckpointError, "--load-ema", "--ema-decay"):
        train(f"--load {tmp_path / 'other'} --load-ema --finetune --qk-layernorm --train-iters 1")
    with expect_error(ConfigError, "--weights", "2"):
        main(["--load", str(run), "--last", "2", "--weights", "1", "--save", there])
    with expect_error(ConfigError, "--last 9", "3"):
        main(["--load", str(run), "--last", "9", "--save", there])
