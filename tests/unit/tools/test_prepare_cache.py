"""tools/prepare_cache.py: a run finds every index ready, and writes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron.config.parse import parse_run
from megatron.core.datasets import build
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.training.run.data import offline_splits
from tests.harness.sentences import check_line
from tools import prepare_cache

RUN = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 2 --train-iters 30 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 50 --split 8,2,0 --eval-iters 1"
)


@pytest.fixture
def prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two small sources, whose indices are stored nevertheless."""
    monkeypatch.setattr(build, "IndexCache", partial(IndexCache, least_rows=1))
    for name in ("a", "b"):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for document in range(30):
                writer.add_document([document] * 20)
    return [str(tmp_path / name) for name in ("a", "b")]


@pytest.mark.parametrize("more", ["", "--packing best-fit", "--packing padding-free", "--data-order megatron"])
def test_everything_is_ready(
    prefixes: list[str], tmp_path: Path, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a cluster whose nodes see the cache read-only, an index that is missing is built by every rank, every time."""
    cache = tmp_path / "cache"
    flags = f"{RUN} --data-path 1 {prefixes[0]} 2 {prefixes[1]} --data-cache-path {cache} {more}".split()
    prepare_cache.main(flags)
    printed = capsys.readouterr().out
    files = sorted(cache.glob("*.npy"))
    check_line(printed, cache, len(files), hide=[r"\d+ bytes|\d[\d.]* [kM]B"])
    assert "train: 60 samples, " in printed

    def refuse(*_: object) -> None:
        raise AssertionError("an index is missing")

    monkeypatch.setattr("megatron.core.datasets.index_cache._store", refuse)
    splits, _ = offline_splits(parse_run(flags, extra_groups=GPT_GROUPS), GPTSpec())
    for dataset in (splits.train, splits.valid):
        assert dataset is not None
        for index in range(len(dataset)):
            dataset[index]
    assert sorted(cache.glob("*.npy")) == files


def test_of_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples of sentences, whose index is another one than GPT's over the same files."""
    monkeypatch.setattr(build, "IndexCache", partial(IndexCache, least_rows=1))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]) + "\n")
    with IndexedDatasetWriter(tmp_path / "sentences", np.uint16) as writer:
        for document in range(30):
            writer.add_document(*[[document % 8 + 5] * 4] * 3)
    run = RUN.replace("--tokenizer-type NullTokenizer --vocab-size 50", f"--vocab-file {tmp_path}/vocab.txt")
    prepare_cache.main(f"{run} --model-type BERT --data-path {tmp_path}/sentences".split())
    assert "train: 60 samples, " in capsys.readouterr().out
    assert list((tmp_path / "sentences_index_cache").glob("*.npy"))


def test_beside_the_data(prefixes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each folder is named once, though three splits share it."""
    prepare_cache.main(f"{RUN} --data-path {prefixes[0]}".split())
    assert capsys.readouterr().out.count(f"{prefixes[0]}_index_cache: ") == 1
    assert list(Path(f"{prefixes[0]}_index_cache").glob("*.npy"))


def test_validation_sets_with_names(prefixes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """NAME= is no part of a path."""
    flags = f"{RUN} --train-data-path {prefixes[0]} --valid-data-path b={prefixes[1]} --multiple-validation-sets"
    prepare_cache.main(flags.replace("--split 8,2,0 ", "").split())
    printed = capsys.readouterr().out
    check_line(printed, "valid", hide=[r"\S+ s$"])
    assert f"\n{prefixes[1]}_index_cache: 2 files" in printed


def test_small_data(prefixes: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder after a tool that builds indices wants a word."""
    monkeypatch.setattr(build, "IndexCache", IndexCache)
    prepare_cache.main(f"{RUN} --data-path {prefixes[0]}".split())
    check_line(capsys.readouterr().out, f"{prefixes[0]}_index_cache")
