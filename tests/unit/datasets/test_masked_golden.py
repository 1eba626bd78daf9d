"""BERT and T5 samples recorded from Megatron-LM: with ``--data-order megatron`` ours are the same, id for id."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.masked_dataset import MaskedDataset
from megatron.core.datasets.masking import MaskingRules, MaskingVocabulary
from megatron.core.datasets.spans import Sentences, SpanRules, build_megatron_spans, mersenne_twister_64
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.bert.data import build_bert_splits
from megatron.core.models.t5.data import T5Maker, build_t5_splits
from tests.unit.datasets.conftest import GOLDEN

RECORDED: dict[str, Any] = json.loads((GOLDEN.parent / "masked_datasets_v012.json").read_text())


@dataclass
class RecordedTokenizer:
    """The tokenizer of the recorded samples."""

    name: str = "BertWordPieceLowerCase"
    vocab_size: int = RECORDED["vocab_size"]
    cls: int = RECORDED["cls"]
    sep: int = RECORDED["sep"]
    mask: int = RECORDED["mask"]
    separators: int = 1
    pad: int | None = RECORDED["pad"]
    bos: int | None = RECORDED["bos"]
    eos: int | None = RECORDED["eos"]
    decoder_start: int | None = RECORDED["bos"]
    eod: int = RECORDED["sep"]
    fingerprint: str = "f1" * 32
    sentinels: tuple[int, ...] = tuple(RECORDED["extra"])
    special_ids: frozenset[int] = frozenset()

    def continuations(self) -> list[bool]:
        return [piece.startswith("##") for piece in RECORDED["vocab_order"]]

    def tokenize(self, text: str) -> list[int]:
        raise NotImplementedError

    def tokenize_batch(self, texts: Any) -> list[list[int]]:
        raise NotImplementedError

    def tokenize_parts(self, texts: Any) -> list[list[int]]:
        raise NotImplementedError

    def detokenize(self, ids: Any) -> str:
        raise NotImplementedError

    def detokenize_part(self, ids: Any) -> str:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        raise NotImplementedError


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The recorded documents."""
    path = tmp_path_factory.mktemp("masked") / "sentences"
    with IndexedDatasetWriter(path, np.uint16) as writer:
        for document in RECORDED["docs"]:
            writer.add_document(*document)
    return str(path)


def config(prefix: str, seq_length: int) -> DataConfig:
    return DataConfig(seq_length=seq_length, data_path=(prefix,), split="1,0,0", data_order="megatron")


def plain(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in sample.items()}


def rows(dataset: MaskedDataset) -> list[list[int]]:
    return [list(dataset.order.find(index)) for index in range(len(dataset))]


@pytest.mark.parametrize("case", RECORDED["mapping"])
def test_sample_maps(case: dict[str, Any]) -> None:
    sentences = Sentences(
        np.array([len(sentence) for document in RECORDED["docs"] for sentence in document], np.int32),
        np.cumsum([0, *(len(document) for document in RECORDED["docs"])]),
    )
    rules = SpanRules(
        max_tokens=case["max_seq"], min_sentences=case["min_sent"], short_probability=case["short_seq_prob"]
    )
    spans = build_megatron_spans(sentences, rules, seed=case["seed"], num_samples=case["max_num_samples"])
    assert spans.tolist() == case["out"]
    assert spans.dtype == case["dtype"]


@pytest.mark.parametrize("case", RECORDED["bert"])
def test_bert(prefix: str, case: dict[str, Any]) -> None:
    train = build_bert_splits(
        config(prefix, case["seq"]),
        seed=1234,
        sizes=SplitSizes(case["n"], 0, 0),
        tokenizer=RecordedTokenizer(),
        binary_head=case["binary_head"],
    ).train
    assert isinstance(train, MaskedDataset)
    assert rows(train) == case["sample_index"]
    expected = [
        {"attention_mask" if name == "padding_mask" else name: values for name, values in sample.items()}
        for sample in case["samples"]
    ]
    assert [plain(train[index]) for index in range(len(expected))] == expected


def test_a_random_replacement_that_is_the_padding_is_padding(prefix: str) -> None:
    """Since core 0.16 Megatron-LM hides the padding id wherever it is; ours was seen where it replaced a word."""
    build = partial(build_bert_splits, seed=1234, sizes=SplitSizes(800, 0, 0), tokenizer=RecordedTokenizer())
    theirs, ours = build(config(prefix, 32)).train, build(replace(config(prefix, 32), data_order="epoch")).train
    assert theirs is not None and ours is not None
    for dataset, seen in ((theirs, 0), (ours, 1)):
        samples = [dataset[index] for index in range(800)]
        masks = np.stack([sample["attention_mask"] for sample in samples])
        replaced = np.stack([(sample["text"] == RECORDED["pad"]) & (sample["loss_mask"] == 1) for sample in samples])
        assert replaced.any()
        assert set(masks[replaced].tolist()) == {seen}


def test_the_padding_id_in_a_text_is_padding_for_t5() -> None:
    """As in Megatron-LM since core 0.16: its masks are what differs from the padding id."""
    vocabulary = MaskingVocabulary.of(RecordedTokenizer())
    for hide_pads in (False, True):
        make = T5Maker(16, 8, vocabulary, MaskingRules(probability=0.1), hide_pads=hide_pads)
        tokens, lengths = np.array([5, 6, RECORDED["pad"], 7, 8, 9]), np.array([6], np.int32)
        sample = make(tokens, lengths, 6, np.random.RandomState(1))
        assert sample["enc_mask"].sum() == (sample["text_enc"] != RECORDED["pad"]).sum() + (not hide_pads)


def test_t5(prefix: str) -> None:
    case = RECORDED["t5"]
    train = build_t5_splits(
        config(prefix, case["seq"]),
        seed=1234,
        sizes=SplitSizes(case["n"], 0, 0),
        tokenizer=RecordedTokenizer(),
        decoder_seq_length=case["dec"],
    ).train
    assert isinstance(train, MaskedDataset)
    assert rows(train) == case["sample_index"]
    expected = [
        {"attention_mask" if name == "padding_mask" else name: values for name, values in sample.items()}
        for sample in case["samples"]
    ]
    assert [plain(train[index]) for index in range(len(expected))] == expected


def test_mersenne_twister() -> None:
    """The value that the C++ standard gives for the 10,000th number of std::mt19937_64, whose seed is 5489."""
    numbers = mersenne_twister_64(5489)
    for _ in range(9999):
        next(numbers)
    assert next(numbers) == 9981545732273789042
