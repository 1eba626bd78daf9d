"""Means of checkpoints and moving averages of weights, as a user makes them, trains on from them and exports them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megatron
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.saving import Saver
from megatron.training.loop import train_from_start_to_end
from tests.end_to_end.commands import tensors
from tests.harness import run_ranks
from tests.harness.runs import axes_of, tiny_config, tiny_run
from tests.harness.sentences import expect_error
from tests.tiers import tiers
from tools.checkpoint.average import main
from tools.checkpoint.convert import main as convert

NAME = "model.decoder.layers.0.mlp.linear_fc1.weight"


def train(flags: str) -> None:
    """Run a command's flags on one rank, from start to end."""
    train_here(ParallelContext.single(dtype=torch.bfloat16 if "--bf16" in flags else torch.float32), flags)


def train_here(context: ParallelContext, flags: str) -> None:
    """The same on this rank of several."""
    config = tiny_config(f"--mock-data --save-interval 1 {flags}", ranks=context.mesh.world_size)
    train_from_start_to_end(config, FAMILIES["gpt"].train_spec, context, started=0.0)


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


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bf16, whose average is wider than its weights; and the average that it has exported itself."""
    folder = tmp_path_factory.mktemp("narrow")
    train(f"--bf16 --save {folder / 'run'} --train-iters 3 --ema-decay 0.5 --save-hf {folder / 'hf'} --save-hf-ema")
    return folder


def test_exports_are_of_the_average(narrow: Path, tmp_path: Path) -> None:
    """An export of a run with --ema-decay took the weights of its last step, and nothing could say otherwise."""
    kept = weights(narrow / "run")
    convert(
        ["--from", "megatron", "--to", "hf", "--load", str(narrow / "run"), "--save", f"{tmp_path}/hf", "--load-ema"]
    )
    for folder in (narrow / "hf", tmp_path / "hf"):
        found = read_huggingface(folder)
        assert found.dtype == torch.bfloat16
        for name, tensor in found.tensors.items():
            assert torch.equal(tensor.make(), kept[f"optimizer.ema.{name}"].bfloat16()), f"{name} in {folder.name}"
    assert not torch.equal(kept[NAME.replace("model", "optimizer.ema")].bfloat16(), kept[NAME]), "else nothing is shown"
    opened = megatron.load(narrow / "run", ema=True).state_dict()
    assert torch.equal(opened[NAME], kept[NAME.replace("model", "optimizer.ema")].bfloat16())


LAYOUTS = [
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer",
    "--tensor-model-parallel-size 2 --zero-stage 3",
    "--diloco-workers 2 --diloco-sync-interval 2 --use-distributed-optimizer",
]


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=LAYOUTS[:1]))
def test_exports_gather_the_average(layout: str, tmp_path: Path) -> None:
    """Shards of the average were taken for the whole, or an export at this layout fell back to the last weights."""
    flags = f"--save {tmp_path / 'run'} --ema-decay 0.5 --save-hf {tmp_path / 'hf'} --save-hf-ema {layout}"
    run_ranks(train_here, flags, **axes_of(tiny_config(f"--mock-data {flags}", ranks=4)))
    kept = weights(tmp_path / "run")
    for name, tensor in read_huggingface(tmp_path / "hf").tensors.items():
        assert torch.equal(tensor.make(), kept[f"optimizer.ema.{name}"]), name


def test_there_is_no_average_before_a_step(tmp_path: Path) -> None:
    """A run that had no step left to take wrote an average of nothing: a model of zeros."""
    train(f"--save {tmp_path / 'run'} --train-iters 1")
    again = f"--load {tmp_path / 'run'} --save {tmp_path / 'again'} --train-iters 1 --ema-decay 0.5"
    with expect_error(CheckpointError, "--save-hf-ema", "1"):
        train(f"{again} --save-hf {tmp_path / 'hf'} --save-hf-ema")
    Saver(tiny_run(ParallelContext.single(), f"--mock-data --ema-decay 0.5 --save {tmp_path / 'fresh'}")).save()
    for folder in ("run", "fresh"):
        with expect_error(CheckpointError, "ema=True", "--ema-decay"):
            megatron.load(tmp_path / folder, ema=True)
    with expect_error(CheckpointError, "--load-ema", "--ema-decay"):
        convert(f"--from megatron --to hf --load {tmp_path / 'run'} --save {tmp_path / 'hf'} --load-ema".split())
    with expect_error(ConfigError, "--load-ema", "--from megatron"):
        convert(f"--from hf --to megatron --load {tmp_path} --save {tmp_path / 'hf'} --load-ema".split())
