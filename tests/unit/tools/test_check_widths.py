"""The coordinate check of muP, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tools.check_widths import growth, main

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 50 "
    "--tokenizer-type NullTokenizer --micro-batch-size 4 --global-batch-size 4 --train-iters 9 --lr 3e-2 "
    "--lr-decay-style constant --eval-iters 0 --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --steps 3"
)


def test_activations_grow_without_mup_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The check said flat of a model whose learning rates did not follow its width, and a long run diverged."""
    assert main([*FLAGS.split(), "--widths", "16", "128", "--output", str(tmp_path / "widths.svg")]) == 0
    with_mup, without = capsys.readouterr().out.split("without muP")
    for place in ("self attention", "mlp"):
        last = [next(line for line in text.splitlines() if place in line).split()[-1] for text in (with_mup, without)]
        assert float(last[0]) < 1.3 < 1.8 < float(last[1])
    assert (tmp_path / "widths.svg").exists()


def test_growth_is_that_of_a_doubling() -> None:
    """Widths are not always twice the one before."""
    assert growth({64: 1.0, 256: 16.0, 512: 64.0}) == pytest.approx(4.0)


def test_widths_are_multiples_of_the_base() -> None:
    """Heads and MLPs as wide as the base model's times a fraction would be of another shape."""
    with expect_error(ConfigError, "--widths 24", "--hidden-size 16"):
        main([*FLAGS.split(), "--widths", "24"])
