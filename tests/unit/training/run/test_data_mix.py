"""Mixes of a run: changed at a resume, evaluated by name, read in full."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets import loader
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import DataError
from megatron.training.pretrain import pretrain
from megatron.training.run.data import TrainingData
from tests.harness.runs import TINY_RUN, tiny_config
from tests.harness.sentences import check_line, expect_error

NULL = "--tokenizer-type NullTokenizer --seq-length 4 --train-iters 8"
ALL = "--split 1,0,0"


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Two sources whose tokens count on through all documents, so that a sample shows what was read."""
    for number in (0, 1):
        with IndexedDatasetWriter(tmp_path / f"source{number}", np.uint16) as writer:
            for document in range(30):
                writer.add_document([25 * number + document % 25] * 4 + [24 + 25 * number])
    return [str(tmp_path / f"source{number}") for number in (0, 1)]


def data_of(flags: str) -> TrainingData:
    config = tiny_config(f"{NULL} {flags}")
    return TrainingData(config, GPTSpec(), ParallelContext.single(), build_tokenizer(config.tokenizer))


def tokens(data: TrainingData, consumed: int, *, steps: int) -> list[tuple[int, ...]]:
    batches = itertools.islice(data.training_batches(consumed), steps)
    return [tuple(row) for batch in batches for each in batch for row in each.tensors["tokens"].tolist()]


def test_changing_the_mix_neither_skips_nor_repeats(prefixes: list[str]) -> None:
    """Over the change, what is read of each source is its own order, without a gap."""
    first = data_of(f"{ALL} --data-path 3 {prefixes[0]} 1 {prefixes[1]}")
    second = data_of(f"{ALL} --data-path 1 {prefixes[0]} 1 {prefixes[1]}")
    second.resume(first.phases, 16)
    read = tokens(first, 0, steps=2) + tokens(second, 16, steps=3)
    for number, prefix in enumerate(prefixes):
        own = [row for row in read if row[0] // 25 == number]
        alone = tokens(data_of(f"{ALL} --data-path {prefix}"), 0, steps=5)
        assert own == alone[: len(own)]
    assert Counter(row[0] // 25 for row in read) == {0: 12 + 12, 1: 4 + 12}
    assert "mix changed after 16 samples" in second.describe()
    third = data_of(f"{ALL} --data-path 1 {prefixes[0]} 1 {prefixes[1]}")
    third.resume(second.phases, 40)
    assert third.phases == second.phases
    assert tokens(third, 40, steps=1) == tokens(second, 40, steps=1)


@pytest.mark.parametrize("flags", ["--data-order megatron", "--dataloader-type cyclic"])
def test_orders_that_cannot_change(prefixes: list[str], flags: str) -> None:
    """Their samples depend on the whole mix; going on regardless would train twice on some and never on others."""
    first, second = (data_of(f"{ALL} --data-path 1 {prefixes[0]} {weight} {prefixes[1]} {flags}") for weight in (1, 2))
    second.resume(second.phases, 8)
    with expect_error(DataError, flags):
        second.resume(first.phases, 8)


def test_a_checkpoint_carries_the_mixes(
    prefixes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real command: stopped, resumed with other weights, stopped and resumed again."""
    base = f"{TINY_RUN} {NULL} --save {tmp_path / 'saved'} --load {tmp_path / 'saved'} --save-interval 100"
    for weight, exit_interval in ((1, 2), (3, 4), (3, 6)):
        flags = f"{base} {ALL} --data-path {weight} {prefixes[0]} 1 {prefixes[1]} --exit-interval {exit_interval}"
        assert pretrain(FAMILIES["gpt"], flags.split(), prog="pretrain_gpt.py") == 0
    log = capsys.readouterr().out
    assert log.count("   mix changed after 16 samples\n") == 2
    check_line(log, "75.000%", prefixes[0])


def test_validation_sets_are_reported_by_name(prefixes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One number for two kinds of text hides which of them gets worse. Each says which batches it is of: a run's last
    evaluation has other ones than that in training at the same iteration.
    """
    flags = (
        f"{TINY_RUN} --tokenizer-type NullTokenizer --seq-length 4 --train-iters 2 --eval-iters 1 --eval-interval 2 "
        f"--train-data-path {prefixes[0]} --valid-data-path {prefixes[0]} second={prefixes[1]} "
        "--multiple-validation-sets"
    )
    assert pretrain(FAMILIES["gpt"], flags.replace("--eval-iters 0 ", "").split(), prog="pretrain_gpt.py") == 0
    log = capsys.readouterr().out
    for name in ("source0", "second"):
        for where, batch in (("", "1"), (" on validation set", "2, after those in training")):
            said = rf" validation loss at iteration 2{where} \({name}\) \| lm loss value: .*\| batch: {batch} \| \n"
            assert re.search(said, log), log


def test_full_validation_reads_every_sample_once(prefixes: list[str]) -> None:
    """The last batch is filled with samples that count for nothing; no rank runs out before the others."""
    flags = f"--train-data-path {prefixes[0]} --valid-data-path {prefixes[1]} --full-validation --eval-iters 1"
    data = data_of(flags)
    batches = list(data.evaluation_batches("valid", evaluation=3))
    assert all(len(batch) == 4 for batch in batches)
    masks = torch.cat([each.tensors["loss_mask"] for batch in batches for each in batch])
    samples = (30 * 5 - 1) // 4
    assert len(masks) == -(-samples // 8) * 8
    assert masks.any(dim=1).tolist() == [True] * samples + [False] * (len(masks) - samples)


@pytest.mark.parametrize("flags", ["--eval-iters 2", "--eval-iters 1 --full-validation"])
def test_evaluations_keep_their_workers(flags: str, prefixes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes at every evaluation cost more than many evaluations take."""
    loaders: list[int] = []

    def counted(dataset: Any, sampler: MicrobatchSampler, **options: Any) -> Any:
        loaders.append(sampler.consumed)
        return loader.BatchLoader(dataset, sampler, **options)

    monkeypatch.setattr("megatron.training.run.data.BatchLoader", counted)
    flags += f" --train-data-path {prefixes[0]} --valid-data-path {prefixes[1]} --eval-interval 1"

    def evaluated(number: int, data: TrainingData) -> list[tuple[int, list[list[int]]]]:
        batches = data.evaluation_batches("valid", evaluation=number)
        return [(each.rng_key.sample, each.tensors["tokens"].tolist()) for batch in batches for each in batch]

    kept = data_of(flags)
    found = [evaluated(number, kept) for number in range(3)]
    assert loaders == [0]
    assert found == [evaluated(number, data_of(flags)) for number in range(3)]
    assert evaluated(1, kept) == found[1]  # out of turn, as after a resume
