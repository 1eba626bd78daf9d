"""BERT and T5 samples in our order: every sentence once an epoch, masks as asked, each a function of its number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.masked_dataset import MaskedDataset
from megatron.core.datasets.masking import MaskingRules, MaskingVocabulary, choose_stretches
from megatron.core.datasets.spans import Sentences, SpanOrder, SpanRules, build_spans
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.bert.data import build_bert_splits, shorten
from megatron.core.models.t5.data import build_t5_splits
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error
from tests.tiers import examples
from tests.unit.datasets.conftest import FakeTokenizer
from tests.unit.datasets.test_masked_golden import RecordedTokenizer

TOKENIZER = RecordedTokenizer(vocab_size=77)
DOCUMENTS = st.lists(st.lists(st.integers(0, 30), min_size=0, max_size=12), min_size=1, max_size=12)


def sentences_of(documents: list[list[int]]) -> Sentences:
    lengths = np.array([length for document in documents for length in document], np.int32)
    return Sentences(lengths, np.cumsum([0, *map(len, documents)]))


@examples(150)
@given(documents=DOCUMENTS, least=st.integers(1, 2), short=st.sampled_from([0.0, 0.1, 1.0]))
def test_every_sentence_once_an_epoch(documents: list[list[int]], least: int, short: float) -> None:
    """Spans follow each other without gap or overlap inside a document, and never reach into the next."""
    rules = SpanRules(max_tokens=20, min_sentences=least, short_probability=short)
    sentences = sentences_of(documents)
    spans = build_spans(sentences, rules, seed=1).tolist()
    covered = Counter(number for first, stop, _ in spans for number in range(first, stop))
    assert set(covered.values()) <= {1}
    usable = [number for number, document in enumerate(documents) if len(document) >= least]
    bounds = sentences.boundaries.tolist()
    assert sorted(covered) == [each for number in usable for each in range(bounds[number], bounds[number + 1])]
    for first, stop, target in spans:
        assert stop - first >= least
        assert 2 <= target <= 20
        assert np.searchsorted(bounds, first, side="right") == np.searchsorted(bounds, stop, side="left")
    if short == 0.0:
        assert all(target == 20 for _, _, target in spans)


@examples(100)
@given(documents=DOCUMENTS)
def test_spans_are_as_long_as_they_must_be(documents: list[list[int]]) -> None:
    """A span ends with the sentence that reaches the target, except that no single sentence is left behind."""
    sentences = sentences_of(documents)
    starts, ends = sentences.starts, set(sentences.boundaries.tolist())
    rules = SpanRules(max_tokens=20, min_sentences=1, short_probability=0.0)
    for first, stop, target in build_spans(sentences, rules, seed=1).tolist():
        reached = next((k for k in range(first + 1, stop + 1) if starts[k] - starts[first] >= target), None)
        assert stop == reached or stop in ends


def test_epochs_shuffle_and_longer_runs_keep_the_prefix() -> None:
    sentences = sentences_of([[5] * 9] * 30)
    rules = SpanRules(max_tokens=20, min_sentences=2, short_probability=0.1)
    order = SpanOrder(sentences, rules, seed=1, num_samples=None, cache=IndexCache(None))
    longer = order.with_samples(3 * len(order))
    epochs = [[longer.find(epoch * len(order) + i) for i in range(len(order))] for epoch in range(3)]
    assert [order.find(i) for i in range(len(order))] == epochs[0]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert [order.find(i) for i in range(len(order))] == epochs[0], "going back an epoch must not change it"
    other = SpanOrder(sentences, rules, seed=2, num_samples=None, cache=IndexCache(None))
    assert [other.find(i) for i in range(len(order))] != epochs[0]


@pytest.fixture
def prefix(tmp_path: Any) -> str:
    """Documents of sentences with words of one to three pieces; pieces 45 to 64 go on with a word."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "sentences", np.uint16) as writer:
        for _ in range(60):
            sentences = [random.integers(5, 65, random.integers(1, 20)) for _ in range(random.integers(1, 9))]
            writer.add_document(*sentences)
    return str(tmp_path / "sentences")


def bert(prefix: str, **options: Any) -> MaskedDataset:
    config = DataConfig(seq_length=64, train_data_path=(prefix,))
    train = build_bert_splits(config, seed=3, sizes=SplitSizes(300, 0, 0), tokenizer=TOKENIZER, **options).train
    assert isinstance(train, MaskedDataset)
    return train


def t5(prefix: str, **options: Any) -> MaskedDataset:
    config = DataConfig(seq_length=64, train_data_path=(prefix,))
    arguments: dict[str, Any] = {"tokenizer": TOKENIZER, "decoder_seq_length": 32, **options}
    train = build_t5_splits(config, seed=3, sizes=SplitSizes(300, 0, 0), **arguments).train
    assert isinstance(train, MaskedDataset)
    return train


def test_bert_layout(prefix: str) -> None:
    """[CLS] A [SEP] B [SEP] padding, where A and B are the two parts of a span, in half of the samples exchanged."""
    data, stored = bert(prefix), IndexedDataset(prefix)
    exchanged = 0
    for index in range(300):
        sample, span = data[index], data.order.find(index)
        text = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])
        size = int(sample["attention_mask"].sum())
        first_end, last = np.flatnonzero(text[:size] == TOKENIZER.sep).tolist()
        assert (text[0], last) == (TOKENIZER.cls, size - 1)
        assert sample["types"].tolist() == [0] * (first_end + 1) + [1] * (size - first_end - 1) + [0] * (64 - size)
        parts = text[1:first_end].tolist(), text[first_end + 1 : last].tolist()
        whole = stored.get_range(span.first, span.stop).tolist()
        if not sample["truncated"]:
            assert whole == (parts[1] + parts[0] if sample["is_random"] else parts[0] + parts[1])
        assert size - 3 <= span.target
        exchanged += int(sample["is_random"])
    assert 110 < exchanged < 190


def test_bert_masks(prefix: str) -> None:
    """Whole words, 15 % of the tokens; of these 80 % become the mask, 10 % another id and 10 % stay."""
    data, fates = bert(prefix), Counter[str]()
    hidden = total = 0
    continues = np.array(TOKENIZER.continuations())
    for index in range(300):
        sample = data[index]
        text, labels, masked = sample["text"], sample["labels"], sample["loss_mask"] == 1
        assert (labels[~masked] == -1).all()
        whole = np.where(masked, labels, text)
        for place in np.flatnonzero(masked).tolist():
            if place + 1 < 64 and continues[whole[place + 1]] and sample["attention_mask"][place + 1]:
                assert masked[place + 1] or whole[place] in (TOKENIZER.cls, TOKENIZER.sep), "half a word is hidden"
            kept = "kept" if text[place] == labels[place] else "replaced"
            fates["masked" if text[place] == TOKENIZER.mask else kept] += 1
        hidden += int(masked.sum())
        total += int(sample["attention_mask"].sum())
    assert 0.11 < hidden / total < 0.16
    assert 0.75 < fates["masked"] / hidden < 0.85
    assert 0.06 < fates["kept"] / hidden < 0.15


def test_what_becomes_of_masked_tokens() -> None:
    """80 % the mask, 10 % an id and 10 % themselves: a model that sees 12 % of its answers trained without a notice."""
    vocabulary = MaskingVocabulary.of(TOKENIZER)
    ordinary = next(id for id in range(77) if id not in (vocabulary.cls, vocabulary.sep, vocabulary.mask))
    found = list[int | None]()
    rules = MaskingRules(probability=0.5, longest=1, whole_words=False)
    random = np.random.RandomState(0)
    tokens = np.full(40_000, ordinary)
    choose_stretches(tokens, rules, vocabulary, random, target=len(tokens), replacements=found)
    assert len(found) == 20_000
    assert abs(found.count(None) / 20_000 - 0.1) < 0.008
    assert abs(found.count(vocabulary.mask) / 20_000 - (0.8 + 0.1 / 77)) < 0.01


def test_far_samples_have_numbers_of_their_own(prefix: str) -> None:
    """Of a seed that holds only a part of the sample's number, every 65,536th sample would be masked alike."""
    order = bert(prefix).order
    drawn = [order.random(index).random_sample() for index in (5, 5 + (1 << 16), 5 + (1 << 32))]
    assert len(set(drawn)) == 3


def test_single_sentences_without_the_binary_head(prefix: str) -> None:
    data = bert(prefix, binary_head=False)
    for index in range(50):
        sample = data[index]
        assert not sample["types"].any()
        assert np.count_nonzero(sample["text"] == TOKENIZER.sep) == 1
        assert sample["is_random"] == 0


def test_t5_puts_back_together(prefix: str) -> None:
    """Each sentinel of the text, replaced by its span from the decoder, gives the original; labels are one ahead."""
    data, stored = t5(prefix), IndexedDataset(prefix)
    for index in range(300):
        sample, span = data[index], data.order.find(index)
        encoder = sample["text_enc"][sample["enc_mask"] == 1].tolist()
        decoder = sample["text_dec"][sample["dec_mask"] == 1].tolist()
        labels = sample["labels"][sample["loss_mask"] == 1].tolist()
        assert decoder[0] == TOKENIZER.bos
        assert labels == [*decoder[1:], TOKENIZER.eos]
        spans: dict[int, list[int]] = {}
        for each in decoder[1:]:
            if each in TOKENIZER.sentinels:
                current = spans.setdefault(each, [])
            else:
                current.append(each)
        assert list(spans) == list(TOKENIZER.sentinels[: len(spans)])
        restored = [token for each in encoder for token in spans.get(each, [each])]
        assert restored == stored.get_range(span.first, span.stop)[: span.target].tolist()
        assert spans


@pytest.mark.parametrize(("sentinels", "decoder_length"), [(1, 32), (10, 4)])
def test_t5_without_room_hides_less(prefix: str, sentinels: int, decoder_length: int) -> None:
    """Megatron-LM stops the run with an error when sentinels or the decoder's places run out."""
    tokenizer = RecordedTokenizer(sentinels=TOKENIZER.sentinels[:sentinels])
    data = t5(prefix, tokenizer=tokenizer, decoder_seq_length=decoder_length)
    for index in range(300):
        sample = data[index]
        assert np.isin(sample["text_dec"], TOKENIZER.sentinels).sum() <= sentinels
        assert sample["text_dec"].shape == (decoder_length,)


def test_a_sample_is_a_function_of_its_number(prefix: str) -> None:
    """Whatever was read before it, in whatever worker: a resumed run sees what the stopped one would have seen."""
    for build in (bert, t5):
        forwards, backwards = build(prefix), build(prefix)
        read = [forwards[index] for index in range(100)]
        for index in reversed(range(100)):
            for name, value in backwards[index].items():
                assert (value == read[index][name]).all()
        assert forwards.digest == backwards.digest
        assert len(forwards.with_samples(1000)) == 1000


def test_a_sample_that_fills_a_batch_counts_for_nothing(prefix: str) -> None:
    sample = bert(prefix)[None]
    assert not sample["loss_mask"].any()
    assert sample["is_random"] == -1
    assert sample["attention_mask"].any(), "attention needs something to attend to"
    assert not t5(prefix)[None]["loss_mask"].any()


@examples(200)
@given(first=st.integers(0, 30), second=st.integers(0, 30), target=st.integers(0, 40), seed=st.integers(0, 5))
def test_shortening(first: int, second: int, target: int, seed: int) -> None:
    """As taking away one token at a time: from the longer one, of equal ones the second, front or back by a coin."""
    random = np.random.RandomState(seed)
    expected = [list(range(first)), list(range(100, 100 + second))]
    while sum(map(len, expected)) > target:
        longer = expected[0] if len(expected[0]) > len(expected[1]) else expected[1]
        del longer[0 if random.random_sample() < 0.5 else -1]
    found = shorten(np.arange(first), np.arange(100, 100 + second), target, np.random.RandomState(seed))
    assert [part.tolist() for part in found] == expected


@examples(200)
@given(
    tokens=st.lists(st.integers(0, 76), min_size=0, max_size=60),
    probability=st.floats(0.01, 0.9),
    longest=st.integers(1, 10),
    geometric=st.booleans(),
    whole=st.booleans(),
)
def test_stretches(tokens: list[int], probability: float, longest: int, geometric: bool, whole: bool) -> None:
    """Never more than the budget, never twice, never a special token, whole words if asked."""
    rules = MaskingRules(probability=probability, longest=longest, geometric=geometric, whole_words=whole)
    vocabulary = MaskingVocabulary.of(TOKENIZER)
    ids = np.array(tokens, np.int64)
    stretches = choose_stretches(ids, rules, vocabulary, np.random.RandomState(0), target=60)
    places = [place for stretch in stretches for place in stretch.tolist()]
    assert len(places) == len(set(places)) <= max(1, round(len(tokens) * probability))
    assert not {tokens[place] for place in places} & {TOKENIZER.cls, TOKENIZER.sep}


def test_errors(prefix: str, tmp_path: Any) -> None:
    config = DataConfig(seq_length=64, train_data_path=(prefix,))
    arguments: dict[str, Any] = {"seed": 1, "sizes": SplitSizes(5, 0, 0)}
    with expect_error(ConfigError, "BERT"):
        build_bert_splits(config, tokenizer=FakeTokenizer(), **arguments)  # type: ignore[arg-type]
    with expect_error(ConfigError, "--vocab-extra-ids 100"):
        build_t5_splits(config, tokenizer=RecordedTokenizer(sentinels=()), decoder_seq_length=9, **arguments)
    with IndexedDatasetWriter(tmp_path / "documents", np.uint16) as writer:
        writer.add_documents([1, 2, 3, 4], [2, 2])
    config = DataConfig(seq_length=64, train_data_path=(str(tmp_path / "documents"),))
    with expect_error(DataError, "2 documents", "2 sentences"):
        build_bert_splits(config, tokenizer=TOKENIZER, **arguments)
    with expect_error(ConfigError, "--vocab-size 6", "--mock-data", "16"):
        build_bert_splits(DataConfig(seq_length=64, mock_data=True), tokenizer=TOKENIZER, vocab_size=7, **arguments)


def test_small_sources_of_a_blend_are_trained_on_without_evaluation(tmp_path: Any) -> None:
    """Few documents, by themselves or in a blend, train BERT and T5 under the default --split as they train GPT."""
    for name in ("a", "b"):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            writer.add_documents([5, 6, 7, 8] * 4, [2] * 8, [2] * 4)
    config = DataConfig(seq_length=64, data_path=(str(tmp_path / "a"), str(tmp_path / "b")))
    arguments: dict[str, Any] = {"seed": 1, "sizes": SplitSizes(9, 4, 2), "tokenizer": TOKENIZER}
    for splits in (
        build_bert_splits(config, binary_head=False, **arguments),
        build_t5_splits(config, decoder_seq_length=32, **arguments),
    ):
        assert splits.train is not None
        assert splits.valid is splits.test is None
        assert [remark.partition(" on ")[0] for remark in splits.remarks] == [
            "valid: nothing is evaluated",
            "test: nothing is evaluated",
        ]


def test_mock_sentences() -> None:
    """A model is tried without files: samples of every length, of ids that it knows, with words to find."""
    config = DataConfig(seq_length=64, mock_data=True)
    arguments: dict[str, Any] = {"seed": 1, "sizes": SplitSizes(200, 20, 0), "tokenizer": TOKENIZER, "vocab_size": 40}
    bert = build_bert_splits(config, **arguments).train
    t5 = build_t5_splits(config, decoder_seq_length=32, **arguments).train
    assert bert is not None and t5 is not None
    lengths = [int(bert[index]["attention_mask"].sum()) for index in range(200)]
    assert max(lengths) == 64 and min(lengths) < 40
    texts = np.concatenate([bert[index]["text"] for index in range(200)])
    assert texts.min() >= 0 and texts.max() < 40 and len(np.unique(texts)) > 25
    assert sum(bert[index]["loss_mask"].any() for index in range(200)) > 190
    sentinels = [int((t5[index]["text_enc"] >= 30).sum()) for index in range(200)]
    assert np.median(sentinels) >= 1 and max(int(t5[index]["text_dec"].max()) for index in range(200)) < 40


def test_blends_and_splits(prefix: str) -> None:
    """Documents, not sentences, go to a split; sources mix as GPT's do, and carry over a change of the mix."""
    config = DataConfig(seq_length=64, data_path=("1", prefix, "3", prefix), split="6,4,0")
    splits = build_bert_splits(config, seed=1, sizes=SplitSizes(80, 20, 0), tokenizer=TOKENIZER)
    assert splits.train is not None
    assert splits.valid is not None
    border = int(IndexedDataset(prefix).boundaries[36])
    firsts = [int(splits.train.origin(index).split()[2]) for index in range(80)]
    assert max(firsts) < border
    assert min(int(splits.valid.origin(index).split()[2]) for index in range(20)) >= border
    assert splits.train.digest != splits.valid.digest
