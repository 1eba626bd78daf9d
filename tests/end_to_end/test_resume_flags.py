"""What a resumed run takes from its checkpoint and what from its flags, when the two differ."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError
from megatron.training.pretrain import pretrain
from tests.end_to_end.commands import losses
from tests.harness.sentences import expect_error

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-style constant --vocab-size 50 --log-interval 1 "
    "--eval-iters 0 --num-workers 0 --save-interval 100 --tokenizer-type NullTokenizer"
)


class Commands:
    """Runs of ``pretrain_gpt.py`` in this process, on data whose samples are all the same.

    So that losses depend on weights and dropout alone: --seed also shuffles the data.
    """

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.saved, self._capsys = folder / "saved", capsys
        self._data = str(folder / "data")
        with IndexedDatasetWriter(self._data, np.uint16) as writer:
            writer.add_document([7] * 1000)

    def run(self, flags: str) -> str:
        """What the command printed."""
        argv = f"{FLAGS} --data-path {self._data} --split 1,0,0 {flags}".split()
        assert pretrain(FAMILIES["gpt"], argv, prog="pretrain_gpt.py") == 0
        return self._capsys.readouterr().out

    def save_halfway(self, flags: str = "") -> str:
        """A run that ends after two iterations with a checkpoint."""
        return self.run(f"--exit-interval 2 --save {self.saved} {flags}")

    def resume(self, flags: str) -> str:
        """The other two iterations."""
        log = self.run(f"--load {self.saved} {flags}")
        assert list(losses(log)) == [3, 4]
        return log


@pytest.fixture
def commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(tmp_path, capsys)


def learning_rates(log: str) -> list[float]:
    return [float(rate) for rate in re.findall(r"learning rate: (\S+)", log)]


def test_which_schedule_a_resumed_run_follows(commands: Commands) -> None:
    """A changed --lr is refused, unless a flag says whose counts: silently either would surprise somebody."""
    assert learning_rates(commands.save_halfway()) == [1e-2, 1e-2]
    with expect_error(ConfigError, "max_lr", "0.005", "--lr", hide=[r"(?<=  ).*(?= --override-opt)"]):
        commands.resume("--lr 5e-3")
    kept = commands.resume("--lr 5e-3 --use-checkpoint-opt_param-scheduler")
    assert learning_rates(kept) == [1e-2, 1e-2]
    changed = commands.resume("--lr 5e-3 --override-opt_param-scheduler")
    assert learning_rates(changed) == [5e-3, 5e-3]
    same = commands.resume("")
    assert losses(kept) == losses(same)
    assert losses(changed)[4] != losses(same)[4]  # the rate that is printed is the rate that is used


def test_which_seed_a_resumed_run_draws_dropout_from(commands: Commands) -> None:
    """The checkpoint's, so that it is the same run whatever --seed says; with --no-load-rng the flag's."""
    whole = losses(commands.run("--seed 1"))
    assert losses(commands.save_halfway("--seed 1")) == {1: whole[1], 2: whole[2]}
    second_half = {3: whole[3], 4: whole[4]}
    assert losses(commands.resume("--seed 2")) == second_half
    assert losses(commands.resume("--seed 1 --no-load-rng")) == second_half
    own = losses(commands.resume("--seed 2 --no-load-rng"))
    assert own[3] != whole[3]
    assert own != losses(commands.resume("--seed 3 --no-load-rng"))
    assert losses(commands.resume("--seed 2 --no-load-rng --hidden-dropout 0 --attention-dropout 0")) == losses(
        commands.resume("--seed 3 --no-load-rng --hidden-dropout 0 --attention-dropout 0")
    )


def test_a_checkpoint_without_a_seed_leaves_the_flags(commands: Commands) -> None:
    """--no-save-rng is --no-load-rng, said beforehand."""
    commands.save_halfway("--seed 1 --no-save-rng")
    assert losses(commands.resume("--seed 2")) == losses(commands.resume("--seed 2 --no-load-rng"))
    assert losses(commands.resume("--seed 2")) != losses(commands.resume("--seed 1"))
