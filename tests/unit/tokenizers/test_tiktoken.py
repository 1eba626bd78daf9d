"""TikTokenizer: special tokens first, then ranks, cut by one of two patterns; a slip in any shifts every id."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import regex

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.tiktoken import PATTERNS
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error


def build(path: Path, *, vocab_size: int | None = None, num_special: int = 10, **settings: Any) -> Tokenizer:
    config = TokenizerConfig(
        tokenizer_type="TikTokenizer",
        tokenizer_model=str(path),
        tiktoken_num_special_tokens=num_special,
        vocab_size=vocab_size,
        **settings,
    )
    return build_tokenizer(config)


def entries(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_ranks_are_shifted_by_the_special_tokens(tiktoken_vocabulary: Path) -> None:
    tokenizer = build(tiktoken_vocabulary)
    assert tokenizer.tokenize("the") == [10 + 257]
    assert tokenizer.tokenize("a the") == [10 + ord("a"), 10 + 258]
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos, tokenizer.eod) == (270, 1, 2, 2)


def test_special_tokens_in_text_are_text(tiktoken_vocabulary: Path) -> None:
    tokenizer = build(tiktoken_vocabulary)
    assert tokenizer.eod not in tokenizer.tokenize("</s>")
    assert tokenizer.detokenize([*tokenizer.tokenize("the café"), 2, 9]) == "the café</s><SPECIAL_9>"


def test_own_special_tokens(tiktoken_vocabulary: Path) -> None:
    tokenizer = build(tiktoken_vocabulary, tiktoken_special_tokens=("</s>", "<unk>", "<s>", "<tool>"))
    assert (tokenizer.eod, tokenizer.bos, tokenizer.detokenize([3, 4])) == (0, 2, "<tool><SPECIAL_4>")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("v1", ["camelCaseÜber", " ÉTÉs", "\n\n", "  ", " x", " ==\n", "/x", "\r\n", "1", "2", "!a", "\u0301b", "  "]),
        (
            "v2",
            ["camel", "Case", "Über", " ÉTÉs", "\n\n", "  ", " x", " ==\n/", "x", "\r\n", "1", "2", "!a\u0301b", "  "],
        ),
    ],
)
def test_patterns_cut_text_into_words(version: str, words: list[str]) -> None:
    """Where BPE may not merge across; case, marks, numbers, line ends and runs of spaces are treated differently."""
    assert regex.findall(PATTERNS[version], "".join(words)) == words


def test_pattern_is_part_of_the_fingerprint(tiktoken_vocabulary: Path) -> None:
    v1, v2 = (build(tiktoken_vocabulary, tiktoken_pattern=version) for version in ("v1", "v2"))
    assert v1.fingerprint != v2.fingerprint
    assert build(tiktoken_vocabulary).fingerprint == v2.fingerprint


def test_vocab_size_cuts_the_ranks(tiktoken_vocabulary: Path) -> None:
    """As Megatron does: the rarest tokens go, so that ids fit the model."""
    tokenizer = build(tiktoken_vocabulary, vocab_size=10 + 257)
    assert tokenizer.vocab_size == 267
    assert tokenizer.tokenize("the") == [10 + 256, 10 + ord("e")]


@pytest.mark.parametrize(
    "settings",
    [
        {"vocab_size": 200},
        {"vocab_size": 1000},
        {"num_special": 2},
        {"tiktoken_special_tokens": ("<s>",)},
        {"tiktoken_special_tokens": ("<unk>", "<s>", "</s>", "<s>")},
        {"vocab_extra_ids": 5},
    ],
)
def test_impossible_settings(tiktoken_vocabulary: Path, settings: dict[str, Any]) -> None:
    with expect_error(ConfigError):
        build(tiktoken_vocabulary, **settings)


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows[300:],
        lambda rows: {"a": 1},
        lambda rows: [*rows[:256], {"rank": 256}],
        lambda rows: [*rows[:256], {**rows[256], "rank": 7}],
        lambda rows: [*rows[:256], {**rows[256], "token_bytes": "!"}],
        lambda rows: [*rows, {**rows[256], "rank": 260}],
    ],
)
def test_damaged_vocabulary(tiktoken_vocabulary: Path, tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(damage(entries(tiktoken_vocabulary))))
    with expect_error(DataError):
        build(path)


def test_bytes_out_of_order(tiktoken_vocabulary: Path, tmp_path: Path) -> None:
    rows = entries(tiktoken_vocabulary)
    rows[0]["token_bytes"] = base64.b64encode(b"xx").decode()
    (tmp_path / "vocab.json").write_text(json.dumps(rows))
    with expect_error(DataError, "256"):
        build(tmp_path / "vocab.json")


def test_not_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("rank 0")
    with expect_error(DataError):
        build(tmp_path / "vocab.json")


def test_lone_surrogate_is_refused(tiktoken_vocabulary: Path) -> None:
    with expect_error(DataError, "surrogate"):
        build(tiktoken_vocabulary).tokenize("\udfff")


def test_missing_library_is_explained(tiktoken_vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with expect_error(ConfigError):
        build(tiktoken_vocabulary)
