"""Whatever bytes and words come in: one clear error, or exactly the right tokens; never a crash, never a wrong one."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.config.data import DataConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.blend import interleave, normalized, parse_blend
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.datasets.splits import Share, parse_split, read_sources
from megatron.core.tokenizers.conversations import ChatFormat
from megatron.core.tokenizers.encode import Encoding, encode_batch
from megatron.core.tokenizers.line_batches import LineBatch
from megatron.core.tokenizers.records import Conversation, read_sample
from megatron.core.tokenizers.text_files import read_record
from megatron.errors import ConfigError, DataError
from tests.tiers import examples

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def refusal(call: Callable[[], Any]) -> str | None:
    """The message with which a call is refused; None when it isn't."""
    try:
        call()
    except (DataError, ConfigError) as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture(scope="module")
def index(folder: Path) -> bytes:
    """A sound index; its .bin is beside it, and for those made of it."""
    with IndexedDatasetWriter(folder / "sound", np.uint16) as writer:
        writer.add_documents(range(30000, 30010), [3, 0, 5, 2], [2, 0, 1, 1])
    shutil.copy(folder / "sound.bin", folder / "fuzzed.bin")
    return (folder / "sound.idx").read_bytes()


def opened(folder: Path, index: bytes) -> IndexedDataset | None:
    """The data set with this index, None when it is refused."""
    (folder / "fuzzed.idx").write_bytes(index)
    found = list[IndexedDataset]()
    message = refusal(lambda: found.append(IndexedDataset(folder / "fuzzed")))
    assert message is None or (str(folder) in message and "\n" not in message)
    return found[0] if found else None


@examples(300)
@given(data=st.data())
def test_damaged_index(folder: Path, index: bytes, data: st.DataObject) -> None:
    """Bytes changed, cut or added: refused, or the same sequences.

    What the format says only once can't be checked: types of one width, and which sequences make up a document.
    """
    content = bytearray(index)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    check_damaged(folder, bytes(content[:length]) + data.draw(st.just(b"") | st.binary(max_size=8)))


def check_damaged(folder: Path, index: bytes) -> bool:
    """Whether a damaged index is refused; else it gives the same sequences."""
    found = opened(folder, index)
    if found is not None:
        sound = IndexedDataset(folder / "sound")
        assert found.dtype.itemsize == sound.dtype.itemsize
        assert [each.tobytes() for each in found[:]] == [each.tobytes() for each in sound[:]]
    return found is None


def test_every_byte_of_an_index_and_every_length(folder: Path, index: bytes) -> None:
    """A damaged number of sequences, length or offset read beyond the file, or asked for all memory."""
    refused = [
        check_damaged(folder, index[:at] + bytes([value]) + index[at + 1 :])
        for at in range(len(index))
        for value in {index[at] ^ 1 << bit for bit in range(8)} | {0xFF} - {index[at]}
    ]
    assert len(refused) > 1000
    assert sum(refused) / len(refused) > 0.8
    assert all(check_damaged(folder, index[:size]) for size in range(len(index)))


@examples(200)
@given(content=st.binary(max_size=200))
def test_any_bytes_as_an_index(folder: Path, index: bytes, content: bytes) -> None:
    assert opened(folder, content) is None
    assert opened(folder, index[:9] + content) is None


@examples(150)
@given(content=JSON.map(json.dumps) | st.text(max_size=30))
@example('{"tokenizer": null}')
@example('{"tokenizer": {"type": 1}}')
def test_any_metadata(folder: Path, content: str) -> None:
    (folder / "any.meta.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    remedy = "preprocess the text again"
    assert remedy in (refusal(lambda: DatasetMetadata.read(str(folder / "any"))) or remedy)


LINES = st.lists(
    st.binary(max_size=12).map(lambda line: line.replace(b"\n", b""))
    | st.builds(lambda text: json.dumps({"text": text}).encode(), st.text(max_size=12))
    | st.lists(st.integers(0, 9), max_size=5).map(lambda ids: json.dumps({"text": " ".join(map(str, ids))}).encode())
    | JSON.map(lambda value: json.dumps(value).encode()),
    min_size=1,
    max_size=8,
)


def ids_by_hand(line: bytes) -> list[int] | None:
    """What NullTokenizer with ten ids makes of a line; None for a bad one."""
    try:
        text = json.loads(line.decode("utf-8"))["text"]
        ids = [int(word) if re.fullmatch("[0-9]+", word) else -1 for word in text.split()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return [*ids, 9] * bool(ids) if all(0 <= each <= 9 for each in ids) else None


@examples(300)
@given(lines=LINES)
def test_any_lines(lines: list[bytes]) -> None:
    """Each line is the document that it spells, or a bad line with its number; the others are untouched."""
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=9)
    batch = LineBatch("in.jsonl", 1, b"\n".join(lines) + b"\n", 0)
    encoded = encode_batch(batch, Encoding(config, ("text",), append_eod=True, dtype="uint16"))
    texts, found = encoded.texts["text"], []
    ends = np.cumsum(texts.document_lengths)
    for start, end in zip([0, *ends], ends):
        found.append(texts.tokens[start:end].tolist())
    expected = [ids_by_hand(line) for line in lines]
    assert found == [ids for ids in expected if ids is not None]
    assert [bad.line for bad in encoded.bad] == [number for number, ids in enumerate(expected, 1) if ids is None]


KEYS = """role content tool_calls function name arguments weight type text from value messages prompt completion
conversations instruction input output history system tools functions refusal function_call"""
RECORDS = st.recursive(
    st.none() | st.integers() | st.sampled_from(["assistant", "user", "x", "", "{}", "gpt", "function_call"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=5),
    max_leaves=12,
)


@examples(400)
@given(record=st.dictionaries(st.sampled_from(KEYS.split()), RECORDS, max_size=4) | JSON)
def test_any_conversation(record: Any) -> None:
    """A conversation has something to learn, or is refused with a reason."""
    try:
        sample = read_sample(read_record(json.dumps(record).encode()))
        answers = ChatFormat().write(sample).answers if isinstance(sample, Conversation) else [sample]
    except DataError:
        return
    assert answers


WORDS = st.lists(st.sampled_from(["a", "b/c", "1", "0", "-1", "0.5", "nan", "inf", "1e999", "", "c=d"]), max_size=6)


@examples(300)
@given(words=WORDS)
def test_any_blend_words(words: list[str]) -> None:
    message = refusal(lambda: parse_blend(words))
    if message is not None:
        assert "--data-path" in message
        return
    spec = parse_blend(words)
    if spec.weights is not None:
        assert len(spec.weights) == len(spec.prefixes) > 0
        assert all(0 < weight < math.inf for weight in spec.weights)


@examples(150)
@given(weights=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=6), size=st.integers(0, 3000))
@example(weights=[1e308, 1e308], size=100)
@example(weights=[5e-324, 5e-324], size=100)
def test_any_weights(weights: list[float], size: int) -> None:
    """Exact counts that follow the shares, at any scale of the weights."""
    mixed = interleave(normalized(weights), size=size)
    assert mixed.counts.sum() == len(mixed) == size
    largest = max(weights)
    shares = np.array([weight / largest for weight in weights])
    shares /= shares.sum()
    assert (np.abs(mixed.counts - shares * size) <= len(weights)).all()


@examples(300)
@given(text=st.text(st.sampled_from("0123456789., /-ae"), max_size=12), count=st.integers(0, 1000))
def test_any_split(text: str, count: int) -> None:
    """Every document belongs to one split, or the words are refused."""
    message = refusal(lambda: parse_split(text))
    if message is not None:
        assert "--split" in message
        return
    ranges = [share.units(count) for share in parse_split(text).values() if isinstance(share, Share)]
    assert [number for each in ranges for number in each] == list(range(count))


@examples(150)
@given(content=JSON.map(json.dumps) | st.text(max_size=30))
def test_any_file_of_paths(folder: Path, content: str) -> None:
    path = folder / "paths.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    for options in ({"data_args_path": str(path)}, {"per_split_data_args_path": str(path)}):
        config = DataConfig(seq_length=8, **options)  # type: ignore[arg-type]
        message = refusal(lambda config=config: [each.blends() for each in read_sources(config).values()])  # type: ignore[misc]
        assert message is None or str(path) in message
