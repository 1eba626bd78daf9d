"""tools/preprocess_data.py --split-sentences: every sentence a sequence, documents kept together."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.bert.data import build_bert_splits
from megatron.core.tokenizers.sentences import installed_rules, learned_rules
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import ConfigError
from tests.harness.sentences import check_line, expect_error
from tests.unit.tools.conftest import write_lines
from tools import preprocess_data

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    ".",
    "he",
    "slept",
    "dr",
    "smith",
    "woke",
    "cafe",
    "café",
    "##s",
]
TEXTS = ["He slept.  Dr. Smith woke.\nHe slept. ", "", "He woke"]
LEARNED = ["Dr. Smith slept. He woke. "] * 40


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return path


def preprocess(folder: Path, vocabulary: Path, *more: str, name: str = "out") -> str:
    source = write_lines(folder / "in.jsonl", [{"text": text} for text in [*TEXTS, *LEARNED]])
    kind = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary), "--workers", "1")
    preprocess_data.main(["--input", str(source), "--output-prefix", str(folder / name), *kind, *more])
    return str(folder / name)


def sentences(prefix: str) -> list[list[str]]:
    """Words of each sentence of each document; those learned from are left out."""
    data = IndexedDataset(prefix)
    found = [
        [" ".join(PIECES[each] for each in row) for row in data[start:stop]]
        for start, stop in pairwise(data.boundaries)
    ]
    return found[: len(TEXTS)]


def test_each_sentence_is_a_sequence(
    tmp_path: Path, vocabulary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """BERT pairs sentences: a cut after an abbreviation, or documents that run together, would pair the wrong ones."""
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    prefix = preprocess(tmp_path, vocabulary, "--split-sentences", "--lang", "german")
    assert sentences(f"{prefix}_text_sentence") == [
        ["he slept .", "dr . smith woke .", "he slept ."],
        [],
        ["he woke"],
    ]
    check_line(capsys.readouterr().out, "NLTK_DATA", "punkt_tab")


def test_the_document_ends_once(tmp_path: Path, vocabulary: Path) -> None:
    """An end of document after every sentence would end it in its middle."""
    prefix = preprocess(tmp_path, vocabulary, "--split-sentences", "--append-eod")
    first, empty, last = sentences(f"{prefix}_text_sentence")
    assert (first[-1], empty, last) == ("he slept . [SEP]", [], ["he woke [SEP]"])
    assert not any("[SEP]" in sentence for sentence in first[:-1])


def test_keep_newlines() -> None:
    """Whitespace stays with the sentence before it, so nothing of the text is lost."""
    rules = learned_rules(LEARNED, language="english", keep_whitespace=True)
    for text in ["  He slept.\n\nDr. Smith woke. ", "", " ", "one", *TEXTS]:
        assert "".join(rules.split(text)) == text
    assert rules.split("He slept.\n\nHe woke.") == ["He slept.\n\n", "He woke."]


def test_rules_do_not_depend_on_the_process() -> None:
    """Sets of words come in another order in each process; the rules, and with them the files, must not."""
    first, second = learned_rules(LEARNED, language="english"), learned_rules(LEARNED, language="english")
    assert first == second
    abbreviations, *_ = json.loads(first.parameters)
    assert abbreviations == sorted(abbreviations)


def test_installed_rules_are_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NLTK's data at hand the sentences are those that the field's recorded data sets have."""
    assert installed_rules("english") is None
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, content in {"abbrev_types": "dr", "collocations": "", "sent_starters": "", "ortho_context": ""}.items():
        (folder / f"{name}.{'txt' if name in ('abbrev_types', 'sent_starters') else 'tab'}").write_text(content)
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    rules = installed_rules("english")
    assert rules is not None
    assert rules.origin == "NLTK's punkt_tab, english"
    assert rules.split("I saw Dr. Smith. He slept.") == ["I saw Dr. Smith.", "He slept."]


@pytest.mark.parametrize(
    ("module", "found"),
    [(None, "which is not installed"), (ModuleType("nltk.tokenize.punkt"), "and release 3.8.1 is installed")],
)
def test_a_missing_or_an_old_nltk_is_one_sentence(
    module: ModuleType | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were tracebacks: ModuleNotFoundError, and ImportError of PunktTokenizer, which came with 3.9."""
    monkeypatch.setattr("nltk.__version__", "3.8.1")  # imports nltk, whose own modules need the one replaced next
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", module)
    with expect_error(ConfigError, found, "'nltk>=3.9'"):
        installed_rules("english")


def test_bert_reads_them(tmp_path: Path, vocabulary: Path) -> None:
    """From text to a sample of a pair of sentences, masked tokens and all."""
    prefix = preprocess(tmp_path, vocabulary, "--split-sentences") + "_text_sentence"
    tokenizer = WordPieceTokenizer(str(vocabulary), name="BertWordPieceLowerCase", extra_ids=0)
    config = DataConfig(seq_length=32, train_data_path=(prefix,))
    train = build_bert_splits(config, seed=1, sizes=SplitSizes(50, 0, 0), tokenizer=tokenizer).train
    assert train is not None
    pairs = ("dr . smith slept .", "he woke ."), ("he woke .", "dr . smith slept .")
    seen = set()
    for index in range(50):
        sample = train[index]
        whole = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])[: sample["attention_mask"].sum()]
        if not sample["truncated"]:
            seen.add(" ".join(PIECES[each] for each in whole))
    assert {f"[CLS] {first} [SEP] {second} [SEP]" for first, second in pairs} <= seen


def test_bpe_keeps_the_space_between_sentences(tmp_path: Path) -> None:
    """The second sentence of a RoBERTa's text began as if it continued the last word, and was masked with it."""
    import tokenizers

    pipeline = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<mask>"]
    pipeline.train_from_iterator([*TEXTS, *LEARNED], vocab_size=300, special_tokens=special, show_progress=False)
    (tmp_path / "roberta").mkdir()
    pipeline.save(str(tmp_path / "roberta/tokenizer.json"))
    roles = zip(("cls_token", "pad_token", "sep_token", "mask_token"), special)
    (tmp_path / "roberta/tokenizer_config.json").write_text(json.dumps({**dict(roles), "eos_token": "</s>"}))
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in [*TEXTS, *LEARNED]])
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "roberta")]
    files = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    preprocess_data.main([*files, *kind, "--split-sentences"])
    data = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert data.boundaries[1] == 3, "sentences stay apart"
    whole = pipeline.encode("He slept. Dr. Smith woke. He slept.").ids
    assert data.get_range(0, 3).tolist() == whole
