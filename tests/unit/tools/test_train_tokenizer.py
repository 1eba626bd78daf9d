"""tools/train_tokenizer.py: files that every reader of them agrees on, the same each time."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import trainers

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import ConfigError, DataError
from megatron.training.reporting.progress import ProgressBar
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.unit.tools.conftest import TEXTS, run, write_lines
from tools import train_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def train(folder: Path, *inputs: Path, vocab_size: int = 300, more: tuple[str, ...] = ()) -> None:
    names = [str(path) for path in inputs]
    train_tokenizer.main(["--input", *names, "--output-dir", str(folder), "--vocab-size", str(vocab_size), *more])


def load(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """The two ways to read the folder."""
    whole = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    pair = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )
    return build_tokenizer(whole), build_tokenizer(pair)


def test_both_forms_are_one_tokenizer(tokenizer_folder: Path) -> None:
    """Data made with either form trains with the other: same ids, same fingerprint, the size that was asked for."""
    whole, pair = load(tokenizer_folder)
    assert (whole.vocab_size, pair.vocab_size) == (300, 300)
    assert whole.tokenize_batch(TEXTS) == pair.tokenize_batch(TEXTS)
    assert (whole.eod, whole.fingerprint) == (pair.eod, pair.fingerprint)
    assert whole.detokenize(whole.tokenize("Ünïcode 漢字 🎉\n\n\ttoo")) == "Ünïcode 漢字 🎉\n\n\ttoo"


def test_transformers_reads_it(tokenizer_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    ours, _ = load(tokenizer_folder)
    assert theirs(TEXTS[0]).input_ids == ours.tokenize(TEXTS[0])
    assert theirs.eos_token_id == ours.eod


def test_the_same_text_gives_the_same_files(tmp_path: Path, tokenizer_folder: Path, corpus: Path) -> None:
    """In a process of its own with another number of threads: no hash order, no race decides a merge."""
    done = run("train_tokenizer.py", "--input", corpus, "--output-dir", tmp_path, "--vocab-size", "300")
    assert done.returncode == 0, done.stderr
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (tokenizer_folder / name).read_bytes(), name


def test_plain_text_and_packed_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt.gz").write_bytes(gzip.compress("".join(TEXTS).encode()))
    write_lines(tmp_path / "in" / "b.jsonl", [{"body": text} for text in TEXTS])
    train(tmp_path / "out", tmp_path / "in", more=("--json-key", "body"))
    assert load(tmp_path / "out")[0].vocab_size == 300


def test_special_tokens(tmp_path: Path, corpus: Path) -> None:
    train(tmp_path, corpus, more=("--special-tokens", "<|pad|>", "<|endoftext|>"))
    tokenizer, _ = load(tmp_path)
    assert (tokenizer.eod, tokenizer.tokenize("<|pad|>"), tokenizer.vocab_size) == (0, [1], 300)


def test_too_little_text_is_refused(tmp_path: Path, corpus: Path) -> None:
    """Not a smaller vocabulary than asked, which would train a model of another shape than the one planned."""
    with expect_error(DataError, "--vocab-size 5000"):
        train(tmp_path / "out", corpus, vocab_size=5000)
    assert not (tmp_path / "out").exists()


def test_too_small_a_vocabulary_is_refused(tmp_path: Path, corpus: Path) -> None:
    with expect_error(ConfigError, "257"):
        train(tmp_path, corpus, vocab_size=100)


def test_a_vocabulary_without_bound_or_text_is_refused(tmp_path: Path, corpus: Path) -> None:
    """4,000,000,000 tokens ended in the library's abort with 40 lines of its stack; no text in advice about size."""
    with expect_error(ConfigError, "--vocab-size", "4000000000", "10000000"):
        train(tmp_path, corpus, vocab_size=4_000_000_000)
    (tmp_path / "empty.jsonl").touch()
    with expect_error(DataError, "empty.jsonl", "0"):
        train(tmp_path / "out", tmp_path / "empty.jsonl")


def test_bad_lines_stop_the_training(tmp_path: Path) -> None:
    """Through the library's loop over our texts: still one sentence with file and line, and nothing written."""
    bad = write_lines(tmp_path / "in.jsonl", [{"text": TEXTS[0]}, {"txt": "a"}])
    done = run("train_tokenizer.py", "--input", bad, "--output-dir", tmp_path / "out", "--vocab-size", "300")
    assert done.returncode == 2
    check_sentence(done.stderr, f"{bad}:2", '"text"', "--on-bad-line skip")
    assert not (tmp_path / "out").exists()


def test_bad_lines_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"text": text} for text in TEXTS]
    bad = write_lines(tmp_path / "in.jsonl", [{"text": "half \ud800"}, *records, {"txt": "a"}])
    train(tmp_path / "out", bad, more=("--on-bad-line", "skip"))
    check_line(capsys.readouterr().err, "2 bad lines", f"{bad}:1")
    assert load(tmp_path / "out")[0].vocab_size == 300


def test_unwritable_folder(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "file").touch()
    with expect_error(DataError, "--output-dir"):
        train(tmp_path / "file" / "out", corpus)


def test_vocabulary_file_is_ordered_by_id(tokenizer_folder: Path) -> None:
    """So that a person, or a diff, can read it."""
    ids = list(json.loads((tokenizer_folder / "vocab.json").read_text()).values())
    assert ids == list(range(300))


def test_wordpiece_for_bert(tmp_path: Path, corpus: Path) -> None:
    """A vocab.txt that BertWordPieceLowerCase reads; the same text gives the same file."""
    texts = []
    for name in ("one", "two"):
        flags = ["--kind", "wordpiece", "--input", str(corpus), "--vocab-size", "120"]
        assert train_tokenizer.main([*flags, "--output-dir", str(tmp_path / name)]) == 0
        texts.append((tmp_path / name / "vocab.txt").read_text())
    assert texts[0] == texts[1]
    assert texts[0].split("\n")[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    config = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(tmp_path / "one/vocab.txt"))
    assert build_tokenizer(config).vocab_size == 122


def test_progress_has_the_projects_style(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the library drew bars of its own, of another style than all other commands."""
    shown: list[str] = []
    made, trainer = list[Any](), trainers.BpeTrainer

    def make(**how: Any) -> Any:
        made.append(trainer(**how))
        return made[0]

    # Two modules have the name tokenizers.trainers: the compiled one, until somebody imports the Python one.
    monkeypatch.setattr("tools.train_tokenizer.trainers.BpeTrainer", make)
    monkeypatch.setattr(ProgressBar, "show", lambda self, done, *facts: shown.extend(facts))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    text = write_lines(tmp_path / "text.jsonl", [{"text": "low lower lowest"}] * 5)
    train_tokenizer.main(["--input", str(text), "--output-dir", str(tmp_path), "--vocab-size", "260"])
    assert shown == ["5 documents read"]
    assert not made[0].show_progress
