"""pretrain_bert.py as a user runs it: from sentences to updated weights, on several ranks, stopped and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import losses, run, tensors
from tests.end_to_end.sentences import assert_two_halves_are_the_whole, make_sentences
from tests.harness.sentences import check_line
from tests.tiers import tiers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a data set that tools/preprocess_data.py made of documents of short sentences."""
    return make_sentences(tmp_path_factory.mktemp("bert"))


TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-2 --log-interval 1 --eval-iters 1 --num-workers 0 --train-iters 6"
)


def test_two_ranks_train_both_losses(data: str, tmp_path: Path) -> None:
    """Both losses are logged and evaluated, and every weight of the model moves, on two tensor-parallel ranks."""
    flags = f"{TINY} {data} --tensor-model-parallel-size 2 --sequence-parallel --save-interval 1 --exit-interval 2"
    log = run("pretrain_bert.py", flags, "--save", str(tmp_path), ranks=2)
    assert len(losses(log)) == 2
    assert re.search(r"lm loss: \S+ \| sop loss: \S+ \|", log)
    one, two = (tensors(tmp_path / f"iter_000000{n}") for n in (1, 2))
    still = [name for name in one if name.startswith("model.") and torch.equal(one[name], two[name])]
    assert still == []
    assert any(name.startswith("model.pooler") for name in one)


@pytest.mark.parametrize(
    "layout",
    tiers(["--pipeline-model-parallel-size 2", "--use-distributed-optimizer"], first=["--use-distributed-optimizer"]),
)
def test_resume_is_bitwise(layout: str, data: str, tmp_path: Path) -> None:
    """A run that was stopped would go on with other samples, masks or dropout."""
    assert_two_halves_are_the_whole("pretrain_bert.py", f"{TINY} {data} {layout}", tmp_path)


def test_another_layout_goes_on_from_a_checkpoint(data: str, tmp_path: Path) -> None:
    """A BERT saved by two stages loads on one rank, without the flags that its checkpoint knows."""
    flags = f"{TINY} {data} --pipeline-model-parallel-size 2 --save-interval 3 --exit-interval 3"
    run("pretrain_bert.py", flags, "--save", str(tmp_path), ranks=2)
    log = run("pretrain_bert.py", f"{TINY} {data}", "--load", str(tmp_path))
    assert list(losses(log)) == [4, 5, 6]
    refused = run("pretrain_bert.py", f"{TINY} {data} --bert-no-binary-head", "--load", str(tmp_path), expect=2)
    check_line(refused, "--bert-binary-head")


def test_without_binary_head(data: str) -> None:
    """One loss, samples of single texts."""
    log = run("pretrain_bert.py", f"{TINY} {data} --bert-no-binary-head --train-iters 2")
    assert len(losses(log)) == 2 and "sop loss" not in log


def test_dry_run(data: str) -> None:
    """A configuration for many GPUs is checked on a laptop, parameters and memory included."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --dry-run --world-size 8"
    report = run("pretrain_bert.py", f"{TINY} {data} {layout}")
    assert "vocabulary of 33" in report and "on pipeline rank 1" in report
