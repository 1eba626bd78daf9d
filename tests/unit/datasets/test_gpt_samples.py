"""What one sample holds: a wrong mask or position trains on the wrong thing without a sign."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder
from megatron.core.models.gpt.data import GPTDataset, SampleLayout
from megatron.errors import DataError
from tests.harness.sentences import expect_error
from tests.unit.datasets.conftest import WriteDocuments

PLAIN = SampleLayout(seq_length=8, eod=50)
NO_CACHE = IndexCache(None)


def dataset(
    prefix: str,
    *,
    layout: SampleLayout = PLAIN,
    num_samples: int | None = None,
    vocab_size: int | None = None,
    drop_last_partial: bool = True,
) -> GPTDataset:
    documents = IndexedDataset(prefix)
    order = EpochOrder(
        documents.lengths,
        seed=1,
        seq_length=layout.seq_length,
        num_samples=num_samples,
        cache=NO_CACHE,
        drop_last_partial=drop_last_partial,
    )
    return GPTDataset(documents, order, layout=layout, vocab_size=vocab_size)


@pytest.mark.parametrize("case", range(6))
def test_megatron_samples_equal_recorded_ones(
    golden: dict[str, Any], write_documents: WriteDocuments, case: int
) -> None:
    """The very tokens that Megatron-LM's data set gives, across documents and epochs."""
    recorded = golden["gpt_cases"][case]
    documents = IndexedDataset(write_documents(golden["gpt_docs"]))
    first, count = recorded["indices"][0], len(recorded["indices"])
    order = MegatronOrder(
        documents.lengths[first : first + count],
        seed=recorded["seed"],
        seq_length=recorded["seq"],
        num_samples=recorded["num_samples"],
        cache=NO_CACHE,
    )
    samples = GPTDataset(documents, order, layout=SampleLayout(seq_length=recorded["seq"], eod=50), first=first)
    assert len(samples) == recorded["length"]
    for index, tokens in enumerate(recorded["first"]):
        assert samples[index]["tokens"].tolist() == tokens[:-1]
        assert samples[index]["labels"].tolist() == tokens[1:]


@pytest.mark.parametrize("case", range(4))
def test_masks_and_positions_equal_recorded_ones(golden: dict[str, Any], case: int) -> None:
    """Resets at the end of a document, alone and together; document_ids say what Megatron-LM's square mask says."""
    recorded = golden["ltor"][case]
    layout = SampleLayout(
        seq_length=len(recorded["tokens"]),
        eod=recorded["eod"],
        reset_position_ids=bool(recorded["reset_position_ids"]),
        reset_attention_mask=bool(recorded["reset_attention_mask"]),
        eod_mask_loss=bool(recorded["eod_mask_loss"]),
    )
    tokens = np.array([*recorded["tokens"], 7])
    sample = layout.sample(tokens, num_tokens=len(tokens))
    assert sample["loss_mask"].tolist() == recorded["loss_mask"]
    assert sample["position_ids"].tolist() == recorded["position_ids"]
    document_ids = sample.get("document_ids", np.zeros(len(tokens) - 1, np.int32))
    hidden = (document_ids[:, None] != document_ids[None, :]) | ~np.tri(len(document_ids), dtype=bool)
    assert hidden.astype(int).tolist() == recorded["attention_mask"][0]


def test_types_and_shapes(write_documents: WriteDocuments, golden: dict[str, Any]) -> None:
    """What the loader stacks: 64-bit ids, a float mask, a length, and 32-bit document_ids only when asked for."""
    prefix = write_documents(golden["gpt_docs"])
    sample = dataset(prefix)[0]
    assert {name: (str(value.dtype), value.shape) for name, value in sample.items()} == {
        "tokens": ("int64", (8,)),
        "labels": ("int64", (8,)),
        "loss_mask": ("float32", (8,)),
        "position_ids": ("int64", (8,)),
        "text_length": ("int64", ()),
    }
    document_ids = dataset(prefix, layout=SampleLayout(seq_length=8, eod=50, reset_attention_mask=True))[0][
        "document_ids"
    ]
    assert (str(document_ids.dtype), document_ids.shape) == ("int32", (8,))


def test_an_epoch_reads_every_label_once(write_documents: WriteDocuments) -> None:
    """300 different tokens in documents of all sizes, some empty: 37 samples of 8 with 296 different labels."""
    tokens = iter(range(300))
    documents = [[next(tokens) for _ in range(size)] for size in [0, 1, 99, 0, 0, 17, 3, 180, 0]]
    samples = dataset(write_documents(documents))
    labels = np.concatenate([samples[i]["labels"] for i in range(len(samples))])
    assert len(samples) == 37
    assert len(set(labels.tolist())) == 296
    for sample in map(samples.__getitem__, range(len(samples))):
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()


def test_partial_sample_counts_real_labels_only(write_documents: WriteDocuments) -> None:
    """11 tokens, 8 a sample: the second one has 2 labels; what fills it up carries no loss."""
    samples = dataset(write_documents([list(range(1, 12))]), drop_last_partial=False)
    assert len(samples) == 2
    partial = next(sample for sample in map(samples.__getitem__, range(2)) if sample["loss_mask"].min() == 0)
    assert partial["tokens"].tolist() == [9, 10, 11, 0, 0, 0, 0, 0]
    assert partial["labels"].tolist() == [10, 11, 0, 0, 0, 0, 0, 0]
    assert partial["loss_mask"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert partial["text_length"] == 2


def test_real_tokens_equal_to_padding_keep_their_loss(write_documents: WriteDocuments) -> None:
    """Padding is known by its place, not by its id: text made of id 0 is learned."""
    assert dataset(write_documents([[0] * 9]))[0]["loss_mask"].tolist() == [1] * 8


def test_sample_none_counts_for_nothing(write_documents: WriteDocuments, golden: dict[str, Any]) -> None:
    """It fills a batch; and doing so must not change sample 0, as it did in Megatron-LM."""
    samples = dataset(write_documents(golden["gpt_docs"]))
    filler = samples[None]
    assert filler["tokens"].tolist() == samples[0]["tokens"].tolist()
    assert filler["loss_mask"].sum() == filler["text_length"] == 0
    assert samples[0]["loss_mask"].sum() == samples[0]["text_length"] == 8


def test_samples_do_not_share_memory(write_documents: WriteDocuments, golden: dict[str, Any]) -> None:
    """Whoever changes a sample in place changes that one only, and never the file."""
    samples = dataset(write_documents(golden["gpt_docs"]))
    before = {name: value.copy() for name, value in samples[3].items()}
    for value in samples[3].values():
        value[...] = 0
    assert all((samples[3][name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_ids_beyond_the_vocabulary_are_found(write_documents: WriteDocuments, dtype: Any) -> None:
    """Without metadata each sample is checked as it is read; the message says where to look."""
    documents = [list(range(10)), [1, 2, 3, 51, 4], list(range(10))]
    samples = dataset(write_documents(documents, dtype=dtype), vocab_size=51)
    with expect_error(DataError, "51", "1", "3", "0", "50"):
        list(map(samples.__getitem__, range(len(samples))))


def test_negative_ids_are_found(write_documents: WriteDocuments) -> None:
    """A signed type can hold them, and an embedding would take them for rows from the end, or crash."""
    samples = dataset(write_documents([[1, 2, -5, *range(6)]], dtype=np.int32), vocab_size=51)
    with expect_error(DataError, "-5", "0", "2"):
        samples[0]


def test_known_ids_pass(write_documents: WriteDocuments, golden: dict[str, Any]) -> None:
    """The largest id of the vocabulary is part of it."""
    samples = dataset(write_documents(golden["gpt_docs"]), vocab_size=51)
    assert max(int(samples[index]["labels"].max()) for index in range(len(samples))) == 50


def test_origin_names_document_and_token(write_documents: WriteDocuments) -> None:
    """A loss that explodes can be traced to the text it came from."""
    tokens = iter(range(400))
    documents = [[next(tokens) for _ in range(size)] for size in (40, 0, 50, 10)]
    prefix = write_documents(documents)
    samples = dataset(prefix)
    for index in range(len(samples)):
        document, token = _origin(samples.origin(index))
        assert samples[index]["tokens"][0] == documents[document][token]


def _origin(text: str) -> tuple[int, int]:
    _, document, token = text.replace(" from token ", ", document ").split(", document ")
    return int(document), int(token)


@pytest.mark.parametrize("index", [-1, 18, 10**9])
def test_samples_that_do_not_exist(write_documents: WriteDocuments, golden: dict[str, Any], index: int) -> None:
    """Asking beyond the end is an error of the program, not another sample."""
    samples = dataset(write_documents(golden["gpt_docs"]))
    assert len(samples) == 18
    with expect_error(IndexError, index, "18"):
        samples[index]
