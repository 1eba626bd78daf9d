"""Lines to arrays of ids: the same whatever the batches, in order, with what cannot be encoded set aside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers import encode as module
from megatron.core.tokenizers.encode import EncodedBatch, Encoding, encode_batch, encode_in_order, shared_tokenizer
from megatron.core.tokenizers.line_batches import LineBatch
from megatron.core.tokenizers.text_files import read_batches
from megatron.errors import DataError
from tests.harness.sentences import expect_error
from tests.unit.tokenizers.conftest import TEXTS

NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)


def encoding(config: TokenizerConfig = NULL, *, keys: tuple[str, ...] = ("text",), append_eod: bool = True) -> Encoding:
    return Encoding(config, keys, append_eod, "uint16")


def batch(*texts: str) -> LineBatch:
    lines = "".join(json.dumps({"text": text, "title": text[:1]}) + "\n" for text in texts)
    return LineBatch("in.jsonl", 1, lines.encode(), 0)


def documents(encoded: EncodedBatch, key: str = "text") -> list[list[int]]:
    texts = encoded.texts[key]
    ids, found = texts.tokens.tolist(), []
    for length in texts.document_lengths.tolist():
        found.append(ids[:length])
        ids = ids[length:]
    assert not ids, "lengths must cover all ids"
    return found


def test_end_of_document_is_appended() -> None:
    assert documents(encode_batch(batch("1 2", "3"), encoding())) == [[1, 2, 9], [3, 9]]
    assert documents(encode_batch(batch("1 2", "3"), encoding(append_eod=False))) == [[1, 2], [3]]


def test_an_empty_text_has_no_end_either() -> None:
    """As in Megatron-LM: a document of nothing but its end would be a sample that teaches ends after ends."""
    assert documents(encode_batch(batch("1", "", "2"), encoding())) == [[1, 9], [], [2, 9]]


def test_every_key_has_its_own_ids() -> None:
    encoded = encode_batch(batch("1 2", "3"), encoding(keys=("title", "text")))
    assert (documents(encoded, "title"), documents(encoded, "text")) == ([[1, 9], [3, 9]], [[1, 2, 9], [3, 9]])


def test_what_the_tokenizer_refuses_becomes_a_bad_line() -> None:
    """One bad document among good ones neither stops the others nor moves them."""
    encoded = encode_batch(batch("1", "2 x", "3", "99"), encoding())
    assert documents(encoded) == [[1, 9], [3, 9]]
    assert [str(bad) for bad in encoded.bad] == [
        "in.jsonl:2: 'x' is not a token id; NullTokenizer reads numbers separated by spaces: for text give another "
        "--tokenizer-type and its files",
        "in.jsonl:4: token id 99 is outside 0 to 9, which --vocab-size 9 allows",
    ]


def test_lone_surrogate_becomes_a_bad_line(bpe_folder: Path) -> None:
    """JSON escapes can spell what no UTF-8 text holds."""
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(bpe_folder))
    encoded = encode_batch(batch(TEXTS[0], "half \ud83d of a pair"), encoding(config))
    assert [str(bad) for bad in encoded.bad] == [
        r"in.jsonl:2: the text holds \ud83d, an unpaired surrogate, which is not a character"
    ]
    assert documents(encoded) == [[*shared_tokenizer(config).tokenize(TEXTS[0]), shared_tokenizer(config).eod]]


@pytest.mark.parametrize("batch_bytes", [1, 200, 1 << 20])
def test_documents_come_in_the_order_of_lines(bpe_folder: Path, tmp_path: Path, batch_bytes: int) -> None:
    """Whatever the batches, the documents are those of the lines, in their order."""
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(bpe_folder))
    texts = [f"{number} {TEXTS[number % 3]}" for number in range(30)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    batches = read_batches([str(path)], batch_bytes=batch_bytes)
    found = [each for encoded in encode_in_order(batches, encoding(config), workers=1) for each in documents(encoded)]
    tokenizer = shared_tokenizer(config)
    assert found == [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]


def test_no_more_batches_are_read_than_are_worked_on() -> None:
    """Memory does not grow with the input when writing is slower than reading."""
    read = 0

    def endless() -> Iterator[LineBatch]:
        nonlocal read
        while True:
            read += 1
            yield batch("1")

    running = encode_in_order(endless(), encoding(), workers=1)
    next(running)
    next(running)
    running.close()
    assert read <= 4


def test_errors_of_the_reader_pass_through() -> None:
    def broken() -> Iterator[LineBatch]:
        yield batch("1")
        raise DataError("the disk is gone")

    with expect_error(DataError):
        list(encode_in_order(broken(), encoding(), workers=1))


def test_processes_that_have_started_share_the_work(
    bpe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they give back has its place in the order, and they get their share: else more workers would do nothing."""
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(bpe_folder))
    texts = [f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(200)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    have_started, submit = module._Crew._have_started, ProcessPoolExecutor.submit
    handed_over = list[str]()

    def once_started(crew: module._Crew) -> bool:
        for future in crew._starting:
            future.result()
        return have_started(crew)

    def counted(pool: ProcessPoolExecutor, function: Any, *arguments: Any) -> Any:
        handed_over.append(function.__name__)
        return submit(pool, function, *arguments)

    monkeypatch.setattr(module._Crew, "_have_started", once_started)
    monkeypatch.setattr(ProcessPoolExecutor, "submit", counted)
    batches = list(read_batches([str(path)], batch_bytes=200))
    encoded = encode_in_order(batches, encoding(config), workers=2)
    found = [each for batch in encoded for each in documents(batch)]
    tokenizer = shared_tokenizer(config)
    assert found == [[*ids, tokenizer.eod] for ids in tokenizer.tokenize_batch(texts)]
    assert handed_over.count("encode_batch") > len(batches) / 4
