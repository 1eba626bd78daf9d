"""From the data flags to the three data sets of a run, or one sentence on why there are none."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.config.data import DataConfig
from megatron.core.datasets import build as build_module
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.index_build import build_megatron
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.metadata import ContentDigests
from megatron.core.datasets.samples import SampleDataset
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import GPTDataset, build_gpt_splits
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import check_sentence, expect_error
from tests.unit.datasets.conftest import FakeTokenizer, WriteDocuments

SIZES = SplitSizes(train=100, valid=20, test=10)
TOKENIZER = FakeTokenizer()


def build(
    sizes: SplitSizes = SIZES, *, seed: int = 1234, tokenizer: FakeTokenizer = TOKENIZER, **data: Any
) -> DatasetSplits:
    config = DataConfig(**{"seq_length": 8, **data})
    return build_gpt_splits(config, seed=seed, sizes=sizes, tokenizer=tokenizer)


def tokens_of(dataset: SampleDataset | None) -> list[list[int]]:
    assert dataset is not None
    return [dataset[index]["tokens"].tolist() for index in range(len(dataset))]


def numbered(first: int, *, documents: int = 10, length: int = 40) -> list[list[int]]:
    """Documents whose tokens say where they are: document d holds its own number."""
    return [[first + document] * length for document in range(documents)]


def test_documents_go_to_their_splits(write_documents: WriteDocuments) -> None:
    """Seven, two and one documents of ten; each split has as many samples as the run asks, over as many epochs."""
    splits = build(data_path=(write_documents(numbered(0)),), split="7,2,1")
    assert {token for tokens in tokens_of(splits.train) for token in tokens} == set(range(7))
    assert {token for tokens in tokens_of(splits.valid) for token in tokens} == {7, 8}
    assert {token for tokens in tokens_of(splits.test) for token in tokens} == {9}
    assert [len(dataset) for dataset in (splits.train, splits.valid, splits.test) if dataset] == [100, 20, 10]


def test_each_split_can_have_its_own_files(write_documents: WriteDocuments) -> None:
    """Per-split paths use whole data sets, and a split without a path has no data."""
    train, valid = (write_documents(numbered(first), f"data{first}") for first in (0, 20))
    splits = build(train_data_path=(train,), valid_data_path=(valid,))
    assert {token for tokens in tokens_of(splits.train) for token in tokens} == set(range(10))
    assert {token for tokens in tokens_of(splits.valid) for token in tokens} <= set(range(20, 30))
    assert splits.test is None


def test_paths_from_files(write_documents: WriteDocuments, tmp_path: Path) -> None:
    """Lists too long for a command line: the same words, in a text file, or by split in JSON."""
    train, valid = (write_documents(numbered(first), f"data{first}") for first in (0, 20))
    listed = tmp_path / "list.txt"
    listed.write_text(f"0.25 {train}\n0.75 {valid}\n")
    sizes = SplitSizes(40, 0, 0)
    by_flag = build(sizes, data_path=("0.25", train, "0.75", valid), split="1,0,0")
    by_file = build(sizes, data_args_path=str(listed), split="1,0,0")
    assert tokens_of(by_file.train) == tokens_of(by_flag.train)
    listed.write_text(json.dumps({"train": ["0.25", train, 0.75, valid], "valid": valid}))
    splits = build(sizes, per_split_data_args_path=str(listed))
    assert {token for tokens in tokens_of(splits.train) for token in tokens} <= {*range(10), *range(20, 30)}
    splits = build(SplitSizes(0, 10, 10), per_split_data_args_path=str(listed))
    assert {token for tokens in tokens_of(splits.valid) for token in tokens} <= set(range(20, 30))
    assert splits.train is splits.test is None


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        '{"train": 5}',
        '{"dev": ["a"]}',
        "{",
    ],
)
def test_damaged_path_files(tmp_path: Path, content: str) -> None:
    listed = tmp_path / "list.json"
    listed.write_text(content)
    with expect_error(DataError):
        build(per_split_data_args_path=str(listed))
    with expect_error(DataError, "--data-args-path nowhere"):
        build(data_args_path="nowhere")
    listed.write_text(" \n")
    with expect_error(DataError):
        build(data_args_path=str(listed))


def test_validation_sets_by_themselves(write_documents: WriteDocuments) -> None:
    """Each under its name; weights, and two sets of one name, would make the report ambiguous."""
    prefixes = [write_documents(numbered(first), f"data{first}") for first in (0, 20)]
    train: dict[str, Any] = {"train_data_path": (prefixes[0],), "multiple_validation_sets": True}
    splits = build(valid_data_path=(prefixes[0], f"other={prefixes[1]}"), **train)
    assert splits.valid is None
    assert list(splits.named("valid")) == ["data0", "other"]
    assert {token for tokens in tokens_of(splits.named("valid")["other"]) for token in tokens} <= set(range(20, 30))
    assert len(splits.named("valid")["data0"]) == SIZES.valid
    with expect_error(ConfigError, "--valid-data-path", "--multiple-validation-sets"):
        build(valid_data_path=("1", prefixes[0], "2", prefixes[1]), **train)
    with expect_error(ConfigError, "data0", "NAME="):
        build(valid_data_path=(prefixes[0], prefixes[0]), **train)
    shared = ("one=" + prefixes[0], "other=" + prefixes[1])
    splits = build(data_path=shared, split="50,50,0", multiple_validation_sets=True)
    assert splits.train is not None
    assert list(splits.named("valid")) == ["one", "other"]


def test_full_validation_is_one_pass(write_documents: WriteDocuments) -> None:
    """Every sample of every source once, however many batches the run asks for."""
    prefixes = tuple(write_documents(numbered(first), f"data{first}") for first in (0, 20))
    splits = build(train_data_path=prefixes, valid_data_path=prefixes, full_validation=True)
    assert splits.valid is not None
    origins = [splits.valid.origin(index) for index in range(len(splits.valid))]
    assert len(set(origins)) == len(origins) == 2 * ((10 * 40 - 1) // 8)


def test_splits_that_nobody_needs(write_documents: WriteDocuments) -> None:
    """Without evaluation a corpus needs no validation tokens; a share of nothing gives nothing."""
    prefix = write_documents(numbered(0, documents=2))
    splits = build(SplitSizes(10, 0, 0), data_path=(prefix,), split="98,1,1")
    assert splits.valid is splits.test is None
    splits = build(data_path=(prefix,), split="1,1,0")
    assert splits.valid is not None
    assert splits.test is None
    splits = build(data_path=(prefix,), split="1,0,0")  # what the sentence for short data says works
    assert splits.train is not None
    assert splits.valid is splits.test is None


def test_short_data_say_how_short(write_documents: WriteDocuments) -> None:
    """The message names the data, the split, what there is, what a sample needs, and what would help."""
    prefix = write_documents([[1, 2, 3]] * 10)
    with pytest.raises(DataError) as caught:
        build(data_path=(prefix,), split="80,10,10")
    check_sentence(
        str(caught.value), prefix, "3 tokens", "1 documents", "9", "--seq-length", "80,10,10", "--split 1,0,0"
    )
    with expect_error(DataError, "30 tokens", "10 documents", "65"):
        build(train_data_path=(prefix,), seq_length=64)


def test_a_small_corpus_is_trained_on_without_evaluation(write_documents: WriteDocuments) -> None:
    """A first try on ten documents ended with "the test split has 0 tokens", of a --split that nobody had given."""
    prefix = write_documents(numbered(0, documents=10))
    splits = build(data_path=(prefix,))
    assert splits.train is not None
    assert splits.valid is splits.test is None
    for split, remark in zip(("valid", "test"), splits.remarks, strict=True):
        assert remark.startswith(f"{split}: nothing is evaluated on {prefix}, as it is too small: ")
    with expect_error(DataError, "9 tokens"):
        build(data_path=(write_documents([[1, 2, 3]] * 3, "less"),), seq_length=9)


def test_small_sources_of_a_blend_are_trained_on_without_evaluation(write_documents: WriteDocuments) -> None:
    """Two tiny sources under the default --split were an error, while one alone trained; a blend with a large source
    is evaluated on that one."""
    tiny = [write_documents(numbered(first, documents=10), f"tiny{first}") for first in (0, 20)]
    large = write_documents([[40] * 30] * 60, "large")
    for path in (tuple(tiny), ("0.5", tiny[0], "0.5", tiny[1])):
        splits = build(data_path=path)
        assert splits.train is not None
        assert splits.valid is splits.test is None
        for split, remark in zip(("valid", "test"), splits.remarks, strict=True):
            assert remark.startswith(
                f"{split}: nothing is evaluated on {tiny[0]} and {tiny[1]}, as they are too small: "
            )
    for path in (("1", tiny[0], "2", large, "1", tiny[1]), (tiny[0], large, tiny[1])):
        for order in ("epoch", "megatron"):
            # without weights, Megatron-LM's order gives one pass, which is 148 samples
            splits = build(SplitSizes(100, 4, 0), data_path=path, data_order=order)
            assert {token for tokens in tokens_of(splits.valid) for token in tokens} == {40}
            assert [remark.partition(", as")[0] for remark in splits.remarks] == [
                f"valid: nothing is evaluated on {tiny[0]} and {tiny[1]}"
            ]
    named = build(data_path=(f"a={tiny[0]}", f"b={large}"), multiple_validation_sets=True)
    assert list(named.valid_sets) == ["b"]
    assert named.remarks[0].startswith(f"valid: nothing is evaluated on {tiny[0]}, as it is too small: ")
    with expect_error(DataError, "40 tokens", "--split"):
        build(data_path=tuple(tiny), split="8,1,1", seq_length=50)


def test_longer_run_keeps_the_prefix(write_documents: WriteDocuments) -> None:
    """In a blend over several epochs, twice the samples begin with the same ones."""
    prefixes = [write_documents(numbered(first), f"data{first}") for first in (0, 20)]
    path = ("0.3", prefixes[0], "0.7", prefixes[1])
    short = build(SplitSizes(150, 0, 0), data_path=path, split="1,0,0")
    long = build(SplitSizes(400, 0, 0), data_path=path, split="1,0,0")
    assert tokens_of(long.train)[:150] == tokens_of(short.train)


def test_samples_do_not_depend_on_paths(write_documents: WriteDocuments, tmp_path: Path) -> None:
    """Moved data train the same run; so do plain reads instead of mapped ones."""
    prefix = write_documents(numbered(0))
    (tmp_path / "elsewhere").mkdir()
    for ending in (".bin", ".idx"):
        (tmp_path / f"elsewhere/other{ending}").write_bytes(Path(prefix + ending).read_bytes())
    here = build(data_path=(prefix,), split="7,2,1")
    there = build(data_path=(str(tmp_path / "elsewhere/other"),), split="7,2,1", mmap_bin_files=False)
    assert tokens_of(here.train) == tokens_of(there.train)
    assert here.digest == there.digest


def test_digest_differs_when_some_rank_would_read_otherwise(write_documents: WriteDocuments) -> None:
    """Another seed, split, data, weight or order on one rank is noticed before training."""
    first, second = (write_documents(numbered(0, documents=count), f"data{count}") for count in (30, 31))
    variants: list[dict[str, Any]] = [
        {"data_path": (first,)},
        {"data_path": (second,)},
        {"data_path": (first,), "seed": 1},
        {"data_path": (first,), "split": "8,1,1"},
        {"data_path": (first,), "data_order": "megatron"},
        {"data_path": (first, second)},
        {"data_path": ("1", first, "2", second)},
        {"data_path": ("1", first, "3", second)},
    ]
    digests = [build(**{"split": "7,2,1", **variant}).digest for variant in variants]
    assert len(set(digests)) == len(variants)
    assert build(data_path=(first,), split="7,2,1").digest == digests[0]


def test_sources_without_weights_count_by_their_size(write_documents: WriteDocuments) -> None:
    """One and three times as much text: a quarter and three quarters of the samples, for as long as the run takes."""
    small = write_documents([[1] * 81], "small")
    large = write_documents([[2] * 241], "large")
    splits = build(SplitSizes(400, 0, 0), data_path=(small, large), split="1,0,0")
    assert isinstance(splits.train, BlendedDataset)
    assert [len(source) for source in splits.train.sources] == [100, 300]


def test_a_source_named_twice_gives_different_samples(write_documents: WriteDocuments) -> None:
    """Repeating a prefix weighs it more; its second use must not repeat the first sample by sample."""
    tokens = iter(range(2000))
    prefix = write_documents([[next(tokens) for _ in range(100)] for _ in range(10)])
    splits = build(
        SplitSizes(100, 0, 0), data_path=(prefix, prefix), split="1,0,0", tokenizer=FakeTokenizer(vocab_size=2000)
    )
    samples = tokens_of(splits.train)
    assert samples[0::2] != samples[1::2]


@pytest.mark.parametrize("weights", [True, False])
def test_cyclic_training_gets_each_sample_once(write_documents: WriteDocuments, weights: bool) -> None:
    """The cyclic loader shuffles one pass over the data, whatever the run's length and the weights."""
    small, large = write_documents([[1] * 81], "small"), write_documents([[2] * 241], "large")
    path = ("5", small, "1", large) if weights else (small, large)
    splits = build(SplitSizes(10**6, 0, 0), data_path=path, split="1,0,0", dataloader_type="cyclic")
    firsts = [tokens[0] for tokens in tokens_of(splits.train)]
    assert (firsts.count(1), firsts.count(2)) == (10, 30)
    alone = build(SplitSizes(10**6, 0, 0), data_path=(small,), split="1,0,0", dataloader_type="cyclic")
    assert len(tokens_of(alone.train)) == 10


def test_another_tokenizers_data_are_refused(write_documents: WriteDocuments) -> None:
    """At start, before any training; ids beyond the model's vocabulary too."""
    prefix = write_documents(numbered(0), tokenizer=TOKENIZER)
    build(train_data_path=(prefix,))
    with expect_error(DataError, "GPT2BPETokenizer"):
        build(train_data_path=(prefix,), tokenizer=FakeTokenizer(fingerprint="0" * 64))
    with expect_error(DataError, "9", "0", "8"):
        build_gpt_splits(
            DataConfig(seq_length=8, train_data_path=(prefix,)), seed=1, sizes=SIZES, tokenizer=TOKENIZER, vocab_size=9
        )


def test_data_of_unknown_origin_are_checked_as_they_are_read(write_documents: WriteDocuments) -> None:
    """Megatron-LM's files name no tokenizer: the first sample with an impossible id says where it lies."""
    prefix = write_documents([[60] * 100])
    splits = build(SplitSizes(5, 0, 0), data_path=(prefix,), split="1,0,0")
    assert splits.train is not None
    with expect_error(DataError, "60", "0", "50"):
        splits.train[0]


def test_tokens_that_are_not_integers_are_refused(write_documents: WriteDocuments) -> None:
    """The format can hold floats, which are no ids."""
    with expect_error(DataError, "float32"):
        build(data_path=(write_documents([[1] * 100], dtype="float32"),))


def test_no_data_at_all() -> None:
    """The message lists the ways to give some."""
    with expect_error(ConfigError, "--data-path PREFIX", "--train-data-path", "--mock-data"):
        build()


def test_mock_data_need_no_files() -> None:
    """Three equal splits of the made-up documents, with ids that the vocabulary has."""
    splits = build(mock_data=True, seq_length=512)
    samples = [tokens_of(dataset) for dataset in (splits.train, splits.valid, splits.test)]
    assert max(max(map(max, rows)) for rows in samples) <= 50
    assert samples[0][:10] != samples[1][:10] != samples[2][:10]


def test_megatron_order_asks_each_source_for_a_surplus(write_documents: WriteDocuments) -> None:
    """Each source of a weighted blend is ordered for 0.5 % more samples than its share, which decides its shuffles."""
    documents = [*numbered(0, documents=49, length=60), [1] * 65]  # 3005 tokens: two epochs hold 751 samples, not 754
    prefixes = [write_documents(documents, name) for name in ("a", "b")]
    splits = build(
        SplitSizes(1000, 0, 0),
        data_path=("1", prefixes[0], "3", prefixes[1]),
        split="1,0,0",
        data_order="megatron",
    )
    assert isinstance(splits.train, BlendedDataset)
    assert len(splits.train) == 1000
    for source, request in zip(splits.train.sources, (252, 754)):
        assert isinstance(source, GPTDataset)
        index = build_megatron(source.documents.lengths, seed=1234, num_samples=request, seq_length=8)
        assert len(source) == len(index.shuffle)
        starts = [source.order.find(number) for number in range(50)]
        assert [[start.position, start.offset] for start in starts] == index.in_training_order().samples[:50].tolist()


def test_megatron_order_without_weights_makes_one_pass(write_documents: WriteDocuments) -> None:
    """Megatron-LM's data end after one pass; here the run is told so before it starts."""
    prefixes = tuple(write_documents(numbered(0), name) for name in ("a", "b"))
    arguments: dict[str, Any] = {"data_path": prefixes, "split": "1,0,0", "data_order": "megatron"}
    splits = build(SplitSizes(98, 0, 0), **arguments)
    assert splits.train is not None
    assert len(splits.train) == 98
    with expect_error(DataError, "99 samples", "98"):
        build(SplitSizes(99, 0, 0), **arguments)


def test_small_blends_of_many_sources_never_run_dry(write_documents: WriteDocuments) -> None:
    """Rounding makes Megatron-LM's blend of 40 sources and few samples take more than it built, and crash."""
    path = [word for i in range(40) for word in (str(1 + 60 // (1 + i)), write_documents([[i] * 10], f"data{i}"))]
    for order in ("epoch", "megatron"):
        for size in (1, 10, 41, 100):
            splits = build(SplitSizes(size, 0, 0), data_path=tuple(path), split="1,0,0", data_order=order)
            assert len(tokens_of(splits.train)) >= size


def test_cache_lies_beside_the_data_or_where_it_is_asked(
    write_documents: WriteDocuments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large indices are stored once per data set, not per run."""
    prefix = write_documents(numbered(0))
    monkeypatch.setattr(build_module, "IndexCache", partial(IndexCache, least_rows=1))
    for cache, folder in ((None, Path(f"{prefix}_index_cache")), (str(tmp_path / "cache"), tmp_path / "cache")):
        splits = build(SplitSizes(10, 0, 0), data_path=(prefix,), data_cache_path=cache)
        assert splits.train is not None
        splits.train[0]
        assert len(list(folder.glob("*.npy"))) == 2


def test_all_bytes_are_compared_with_what_was_written(write_documents: WriteDocuments) -> None:
    """A bit that flipped in a copy trained to the end: the usual checks read 4 kB."""
    prefix = write_documents(numbered(0, length=2000), tokenizer=TOKENIZER)
    digests = [hashlib.sha256(Path(f"{prefix}.{ending}").read_bytes()).hexdigest() for ending in ("bin", "idx")]
    splits = build(data_path=(prefix,), split="1,0,0", verify_data=True)
    assert splits.contents == {prefix: ContentDigests(*digests)}
    assert splits.remarks == [f"{prefix}: all bytes are as written (--verify-data)"]
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[23_456] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    assert build(data_path=(prefix,), split="1,0,0").digest == splits.digest
    with expect_error(DataError, "data.bin"):
        build(data_path=(prefix,), split="1,0,0", verify_data=True)
    Path(f"{prefix}.meta.json").unlink()
    other = build(data_path=(prefix,), split="1,0,0", verify_data=True)
    assert other.contents[prefix] != splits.contents[prefix]
    check_sentence(other.remarks[0])
