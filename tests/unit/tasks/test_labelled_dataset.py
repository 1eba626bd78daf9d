"""Samples with a right answer: cut as Megatron-LM cuts them, each scored once, each trained on once an epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, processors

from megatron.core.datasets.loader import BatchLoader
from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.tokenizers.base import MaskingTokenizer
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import DataError
from tasks.fine_tuning.dataset import EpochsDataset, LabelledDataset, PairLayout, batches_of_an_epoch
from tasks.fine_tuning.files import LabelledText, LabelledTexts
from tests.harness.sentences import expect_error

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "##s", "?", "_"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> WordPieceTokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n")
    return WordPieceTokenizer(str(path), name="BertWordPieceLowerCase", extra_ids=0)


def ids(*pieces: str) -> list[int]:
    return [VOCABULARY.index(piece) for piece in pieces]


def texts(*pairs: tuple[str, str], count: int = 1, label: int = 1) -> LabelledTexts:
    each = [LabelledText(pairs, label, Path("x.tsv"), line) for line in range(2, 2 + count)]
    return LabelledTexts("x", "x.tsv", each, digest="d")


def numbered(count: int, tokenizer: WordPieceTokenizer) -> LabelledDataset:
    """Samples that their label tells apart."""
    each = [LabelledText((("cat", "dog"),), number, Path("x.tsv"), number) for number in range(count)]
    return LabelledDataset(LabelledTexts("x", "x.tsv", each, digest="d"), PairLayout(8, tokenizer))


def test_a_pair(tokenizer: WordPieceTokenizer) -> None:
    """[CLS] A [SEP] B [SEP], B and its end of type 1, padding behind."""
    sample = LabelledDataset(texts(("The cats sat", "A mat?")), PairLayout(12, tokenizer))[0]
    whole = ids("[CLS]", "the", "cat", "##s", "sat", "[SEP]", "a", "mat", "?", "[SEP]")
    assert sample["text"].tolist() == [[*whole, 0, 0]]
    assert sample["types"].tolist() == [[0] * 6 + [1] * 4 + [0] * 2]
    assert sample["attention_mask"].tolist() == [[1] * 10 + [0] * 2]
    assert sample["label"] == 1


FIRST, SECOND = ["cat"] * 4, ["dog"] * 5


@pytest.mark.parametrize(
    ("length", "expected", "seconds"),
    [
        (12, ["[CLS]", *FIRST, "[SEP]", *SECOND, "[SEP]"], 6),
        (11, ["[CLS]", *FIRST, "[SEP]", *SECOND[:4], "[SEP]"], 5),
        (8, ["[CLS]", *FIRST, "[SEP]", "dog", "[SEP]"], 2),
        (7, ["[CLS]", *FIRST, "[SEP]", "[SEP]"], 1),
        (6, ["[CLS]", *FIRST, "[SEP]"], 1),
        (5, ["[CLS]", *FIRST[:3], "[SEP]"], 1),
    ],
)
def test_what_is_too_long_loses_its_end(
    length: int, expected: list[str], seconds: int, tokenizer: WordPieceTokenizer
) -> None:
    """The last token is always [SEP], and belongs to the second text."""
    sample = LabelledDataset(texts((" ".join(FIRST), " ".join(SECOND))), PairLayout(length, tokenizer))[0]
    assert sample["text"].tolist() == [ids(*expected)]
    assert sample["types"].tolist() == [[0] * (length - seconds) + [1] * seconds]
    assert sample["attention_mask"].all()


def test_choices_and_a_limit_of_the_first_text(tokenizer: WordPieceTokenizer) -> None:
    """Of RACE's questions only so many tokens are taken, that the article has room."""
    pairs = [("the " * 9 + end, "cat dog") for end in ("a", "mat")]
    sample = LabelledDataset(texts(*pairs), PairLayout(10, tokenizer, longest_first=4))[0]
    one = [*ids("[CLS]", *["the"] * 4, "[SEP]", "cat", "dog", "[SEP]"), 0]
    assert sample["text"].tolist() == [one, one]
    assert sample["types"].shape == sample["attention_mask"].shape == (2, 10)


def test_a_sample_to_fill_a_batch_counts_for_nothing(tokenizer: WordPieceTokenizer) -> None:
    """It would be scored, and the accuracy be of more samples than there are."""
    sample = numbered(3, tokenizer)[None]
    assert [int(sample["label"]), int(sample["number"])] == [-1, -1]
    assert sample["text"].tolist() == numbered(3, tokenizer)[0]["text"].tolist()


def test_samples_are_numbered_through_several_sets(tokenizer: WordPieceTokenizer) -> None:
    """Predictions are listed by these numbers; a text without a label is read, and counts for no score."""
    unlabelled = LabelledTexts("x", "x.tsv", [LabelledText((("cat", "dog"),), None, Path("x.tsv"), 2)], digest="d")
    sample = LabelledDataset(unlabelled, PairLayout(8, tokenizer), first_number=5)[0]
    assert [int(sample["label"]), int(sample["number"])] == [-1, 5]
    assert [int(numbered(3, tokenizer)[place]["number"]) for place in range(3)] == [0, 1, 2]


def test_a_text_without_tokens_is_named(tokenizer: WordPieceTokenizer) -> None:
    """Half of a surrogate pair can be spelled in JSON."""
    with expect_error(DataError, "x.tsv:2", "\\ud800"):
        LabelledDataset(texts(("\ud800", "b")), PairLayout(8, tokenizer))[0]


@given(count=st.integers(1, 13), micro=st.integers(1, 3), ranks=st.integers(1, 3), accumulated=st.integers(1, 2))
def test_every_sample_is_scored_once_on_one_rank(count: int, micro: int, ranks: int, accumulated: int) -> None:
    """At any number of ranks and any micro-batch size; the rest are samples that count for nothing."""
    batch = micro * ranks * accumulated
    found = []
    for rank in range(ranks):
        sampler = MicrobatchSampler(
            num_samples=count,
            consumed=0,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            pad_to=batch,
        )
        found += [label for each in BatchLoader(Numbers(count), sampler) for label in each["label"].tolist()]
    assert sorted(label for label in found if label >= 0) == list(range(count))
    assert len(found) == batches_of_an_epoch(count, batch) * batch


class Numbers:
    """Samples that are their number, and −1 for one that counts for nothing."""

    digest = prefix = ""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | None) -> dict[str, np.ndarray]:
        return {"label": np.array(-1 if index is None else index)}

    def origin(self, index: int) -> str:
        return str(index)

    def describe(self) -> list[str]:
        return []


def labels(data: EpochsDataset) -> list[int]:
    return [int(data[place]["label"]) for place in range(len(data))]


def test_an_epoch_is_every_sample_once_and_whole_batches(tokenizer: WordPieceTokenizer) -> None:
    """No sample is dropped for a batch that isn't full, and none is in a batch with the next epoch's."""
    data = EpochsDataset(numbered(10, tokenizer), epochs=3, batch=4, seed=1)
    epochs = np.array(labels(data)).reshape(3, 12)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == [-1, -1, *range(10)]
        assert epoch[10:].tolist() == [-1, -1]
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3
    assert labels(data) == epochs.flatten().tolist(), "going back to an epoch must not change it"
    assert labels(EpochsDataset(numbered(10, tokenizer), epochs=1, batch=4, seed=1)) == epochs[0].tolist()
    assert labels(EpochsDataset(numbered(10, tokenizer), epochs=3, batch=4, seed=2)) != epochs.flatten().tolist()


def test_what_an_epoch_is_made_of_is_in_its_digest(tokenizer: WordPieceTokenizer) -> None:
    """A resume with another batch size, seed or data would go on inside another epoch; with more epochs, not."""
    samples = numbered(10, tokenizer)
    given = {"epochs": 3, "batch": 4, "seed": 1}
    digest = EpochsDataset(samples, **given).digest
    assert EpochsDataset(samples, **given | {"epochs": 5}).digest == digest
    others = [EpochsDataset(samples, **given | {"batch": 5}), EpochsDataset(samples, **given | {"seed": 2})]
    others.append(EpochsDataset(numbered(11, tokenizer), **given))
    assert digest not in {each.digest for each in others[:2]}
    with expect_error(DataError, "--seq-length", "--seed", "--global-batch-size"):
        others[0].with_samples(7)


def test_places(tokenizer: WordPieceTokenizer) -> None:
    """Messages name file and line; sets describe themselves, and can be cut or repeated."""
    samples = numbered(3, tokenizer)
    assert [int(samples.with_samples(5)[n]["label"]) for n in range(5)] == [0, 1, 2, 0, 1]
    data = EpochsDataset(samples, epochs=1, batch=2, seed=1)
    assert data.origin(0) == f"x.tsv:{data[0]['label']}"
    assert data.origin(3) == "padding of a batch"
    assert data.describe() == ["x.tsv: 3 samples; 1 epochs"]
    with pytest.raises(IndexError):
        data[4]


def test_pairs_as_roberta_separates_them(tmp_path: Path) -> None:
    """RoBERTa was trained with two separators between texts; with one, fine-tuning began from a worse model."""
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}
    model = models.WordLevel({**special, "a": 5, "b": 6}, unk_token="<unk>")
    pipeline = tokenizers.Tokenizer(model)
    pipeline.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    pipeline.add_special_tokens([*special])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    roles = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "mask_token": "<mask>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(roles))
    roberta = cast("MaskingTokenizer", load(str(tmp_path), extra_ids=0))
    text, types, attention_mask = PairLayout(8, roberta).sequence("a", "b")
    assert text.tolist() == [*pipeline.encode("a", "b").ids, 1, 1] == [0, 5, 2, 2, 6, 2, 1, 1]
    assert types.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert attention_mask.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
