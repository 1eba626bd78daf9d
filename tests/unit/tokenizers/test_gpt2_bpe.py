"""GPT2BPETokenizer gives exactly the ids of GPT-2: a model trained elsewhere would otherwise see noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import ConfigError, DataError
from tests.harness.data import shared_data
from tests.harness.sentences import expect_error
from tests.tiers import examples
from tests.unit.tokenizers.conftest import TEXTS


def build(vocab: Path | str | None, merges: Path | str | None, *, extra_ids: int = 0) -> Tokenizer:
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=None if vocab is None else str(vocab),
        merge_file=None if merges is None else str(merges),
        vocab_extra_ids=extra_ids,
    )
    return build_tokenizer(config)


@pytest.fixture(scope="module")
def tiny(bpe_folder: Path) -> Tokenizer:
    return build(bpe_folder / "vocab.json", bpe_folder / "merges.txt")


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return build(shared_data("data", "gpt2", "gpt2-vocab.json"), shared_data("data", "gpt2", "gpt2-merges.txt"))


@pytest.fixture(scope="module")
def openai() -> tiktoken.Encoding:
    """GPT-2 as an independent implementation: ids are the order in which pairs merge."""
    vocab = json.loads(shared_data("data", "gpt2", "gpt2-vocab.json").read_text())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    byte_of = {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in vocab.items() if rank < 50256}
    pattern = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


@examples(150)
@given(text=st.text(max_size=60))
def test_ids_are_gpt2s(gpt2: Tokenizer, openai: tiktoken.Encoding, text: str) -> None:
    """Any text becomes the ids an independent implementation of GPT-2's BPE gives, and comes back."""
    ids = gpt2.tokenize(text)
    assert ids == openai.encode_ordinary(text)
    assert gpt2.detokenize(ids) == text


def test_known_ids(gpt2: Tokenizer) -> None:
    """Ids that anybody can look up: a swapped vocabulary or merge file would change them."""
    assert gpt2.tokenize("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eod, gpt2.pad) == (50257, 50256, None)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tiny: Tokenizer, text: str) -> None:
    """Text survives: accents, line ends, runs of spaces and characters the training never saw."""
    assert tiny.detokenize(tiny.tokenize(text)) == text


def test_batch_equals_one_by_one(tiny: Tokenizer) -> None:
    """The fast path gives the same ids as the plain one, in order, empty texts included."""
    texts = [*TEXTS, "", "x"]
    assert tiny.tokenize_batch(texts) == [tiny.tokenize(text) for text in texts]
    assert tiny.tokenize_batch([]) == []


def test_end_of_text_inside_a_document_is_text(tiny: Tokenizer) -> None:
    """A web page that spells ``<|endoftext|>`` must not end a document; GPT-2's own code treats it as characters."""
    ids = tiny.tokenize("a<|endoftext|>b")
    assert tiny.eod not in ids
    assert tiny.detokenize(ids) == "a<|endoftext|>b"


def test_extra_ids_come_last(bpe_folder: Path, tiny: Tokenizer) -> None:
    """``--vocab-extra-ids`` leaves every other id alone, so data fit any number; they are recognised in text."""
    tokenizer = build(bpe_folder / "vocab.json", bpe_folder / "merges.txt", extra_ids=3)
    assert tokenizer.vocab_size == tiny.vocab_size + 3
    assert tokenizer.tokenize("the<extra_id_2>") == [*tiny.tokenize("the"), tiny.vocab_size + 2]
    assert tokenizer.fingerprint == tiny.fingerprint


def test_lone_surrogate_is_refused(tiny: Tokenizer) -> None:
    """JSON may hold half of a surrogate pair; it must be reported, not crash the run or become another character."""
    with expect_error(DataError, "surrogate"):
        tiny.tokenize_batch(["fine", "broken \ud800"])


def test_missing_flags_are_named() -> None:
    with expect_error(ConfigError, "--vocab-file"):
        build(None, "m")
    with expect_error(DataError, "--vocab-file /nowhere/v.json"):
        build("/nowhere/v.json", "m")


def test_missing_merges_are_named(bpe_folder: Path) -> None:
    with expect_error(ConfigError, "--merge-file"):
        build(bpe_folder / "vocab.json", None)
    with expect_error(DataError):
        build(bpe_folder / "vocab.json", bpe_folder)


def test_swapped_files_are_explained(bpe_folder: Path) -> None:
    """The commonest slip: the two paths the wrong way round."""
    with expect_error(DataError):
        build(bpe_folder / "merges.txt", bpe_folder / "vocab.json")


def test_files_of_different_trainings_are_explained(bpe_folder: Path, tmp_path: Path) -> None:
    """Merges that make a token the vocabulary lacks."""
    (tmp_path / "merges.txt").write_text("#version: 0.2\nzz yy\n")
    with expect_error(DataError):
        build(bpe_folder / "vocab.json", tmp_path / "merges.txt")


def test_ids_that_are_no_ids_are_refused(bpe_folder: Path, tmp_path: Path) -> None:
    """The library skipped an entry whose id was a text, and gave one id to two tokens, without a word."""
    vocab = json.loads((bpe_folder / "vocab.json").read_text())
    path = tmp_path / "vocab.json"
    for value, fact in (("7", '"7"'), (5, "5")):
        path.write_text(json.dumps({"zzzq": value, **vocab}))
        with expect_error(DataError, "zzzq", fact):
            build(path, bpe_folder / "merges.txt")


def test_vocabulary_without_end_of_text(bpe_folder: Path, tmp_path: Path) -> None:
    vocab = json.loads((bpe_folder / "vocab.json").read_text())
    del vocab["<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    with expect_error(DataError, tmp_path / "vocab.json", "<|endoftext|>"):
        build(tmp_path / "vocab.json", bpe_folder / "merges.txt")


def test_ids_that_would_take_all_memory_are_refused(bpe_folder: Path, tmp_path: Path) -> None:
    """A single damaged id, 4,000,000,000, took 8 GB and ended the process without a message."""
    vocab = json.loads((bpe_folder / "vocab.json").read_text())
    tokenizer = json.loads((bpe_folder / "tokenizer.json").read_text())
    for number in (10_000_000, 4_000_000_000, 2**32 - 1, 5_000_000_000, 2**64, -1):
        (tmp_path / "vocab.json").write_text(json.dumps({**vocab, "zzz": number}))
        with expect_error(DataError):
            build(tmp_path / "vocab.json", bpe_folder / "merges.txt")
        tokenizer["model"]["vocab"]["zzz"] = number
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        fact = f"id {number}" if 0 <= number < 2**32 else tmp_path / "tokenizer.json"
        with expect_error(DataError, fact, hide=[r"(?<=is not a tokenizer.json: ).*"]):  # the library's words
            build_tokenizer(
                TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "tokenizer.json"))
            )


def test_a_hole_in_the_vocabulary_counts(bpe_folder: Path, tmp_path: Path) -> None:
    """Embeddings are looked up by id: the size is the largest id plus one, not the number of tokens."""
    vocab = json.loads((bpe_folder / "vocab.json").read_text())
    vocab["<|endoftext|>"] = 1000
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    assert build(tmp_path / "vocab.json", bpe_folder / "merges.txt").vocab_size == 1001
