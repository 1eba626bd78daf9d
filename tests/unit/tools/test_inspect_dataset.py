"""tools/inspect_dataset.py: what it shows is what is there, and what training reads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.parse import parse_run
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.null import NullTokenizer
from megatron.errors import ConfigError, DataError
from megatron.training.run.split_sizes import split_sizes
from tests.harness.sentences import check_line, expect_error
from tools import inspect_dataset

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "50"]
RUN = [
    *["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--seq-length", "8"],
    *["--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3", *NULL],
]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Twenty documents of two sequences that say where they are; document 3 is empty."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16, tokenizer=TokenizerStamp.of(NullTokenizer(50))) as writer:
        for document in range(20):
            sequences = [[document] * (document + 1), [30 + document % 20, 50]] if document != 3 else []
            writer.add_document(*sequences)
    return str(tmp_path / "data")


def test_a_sample_is_asked_of_a_run(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix before ``--sample`` was answered with "there is no flag --prefix", which nobody had typed."""
    (tmp_path / "flags").write_text(" ".join([*RUN, "--data-path", prefix, "--split", "1,0,0"]))
    with expect_error(ConfigError, prefix, f"--data-path {prefix}"):
        inspect_dataset.main([prefix, "--sample", "3", f"@{tmp_path}/flags"])
    inspect_dataset.main([f"@{tmp_path}/flags", "--sample", "3"])
    assert capsys.readouterr().out.startswith(f"sample 3 of train: {prefix}, document ")


def test_counts_and_document(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    inspect_dataset.main([prefix, "--document", "2", *NULL])
    assert capsys.readouterr().out == (
        f"{prefix}\n"
        "documents    20 (1 empty)\n"
        "sequences    38\n"
        "tokens       244 of type uint16\n"
        "per document 0% 0, 10% 3, 50% 12, 90% 20, 99% 22, 100% 22; mean 12.2\n"
        f"tokenizer    {TokenizerStamp.of(NullTokenizer(50))}\n"
        "document 2: 2 sequences\n"
        "2 2 2\n"
        "32 50\n"
    )
    with expect_error(ConfigError, "--document 20", "20 documents"):
        inspect_dataset.main(["--prefix", prefix, "--document", "20"])


def test_chat_format(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How conversations are written and where answers end could be read in the metadata alone."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([1])
        writer.chat = ChatSettings(template="{% for m in messages %}\n{{ m.content }}{% endfor %}", end_tokens=(7, 9))
    inspect_dataset.main([prefix, *NULL])
    assert capsys.readouterr().out.endswith(
        "end tokens   7 7, 9 9, and the end of a document\n"
        "chat         turns are written by this template\n"
        "    {% for m in messages %}\n"
        "    {{ m.content }}{% endfor %}\n"
    )
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_document([1])
        writer.chat = ChatSettings(template=None, end_tokens=())
    inspect_dataset.main([prefix])
    assert capsys.readouterr().out.endswith("\nend tokens   the end of a document\n")


def test_unigrams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loss below it shows that a model has learned what words have to do with each other."""
    with IndexedDatasetWriter(tmp_path / "even", np.uint16) as writer:
        for token in (5, 6, 7, 8):
            writer.add_document([token] * 10)
    inspect_dataset.main(["--prefix", str(tmp_path / "even"), "--unigrams"])
    check_line(capsys.readouterr().out, "unigrams", "1.386")


def test_verify(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit in a copied file is found, with its place, before it trains an unknown row of the embeddings."""
    inspect_dataset.main(["--prefix", prefix, "--verify"])
    assert "verified     index, sizes, all ids below 51, metadata, all bytes as written\n" in capsys.readouterr().out
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[2 * 10 : 2 * 10 + 2] = (51).to_bytes(2, "little")
    Path(f"{prefix}.bin").write_bytes(content)
    with expect_error(DataError, "51", "2", "5", "0"):
        inspect_dataset.main(["--prefix", prefix, "--verify"])


def test_digests_of_data_made_elsewhere(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-LM writes none; stored once, they tell of every bit that changes later, in copies too."""
    made = Path(f"{prefix}.meta.json").read_text()
    Path(f"{prefix}.meta.json").unlink()
    inspect_dataset.main(["--prefix", prefix, "--write-digests"])
    check_line(capsys.readouterr().out, f"{prefix}.meta.json")
    assert json.loads(Path(f"{prefix}.meta.json").read_text()) == {**json.loads(made), "tokenizer": None}
    for ending, at in ((".bin", 0), (".idx", -16)):  # the end of the last document but one, which nothing else tells
        path = Path(prefix + ending)
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        with expect_error(DataError, f"data{ending}"):
            inspect_dataset.main(["--prefix", prefix, "--verify"])
        content[at] ^= 1
        path.write_bytes(content)
    inspect_dataset.main(["--prefix", prefix, "--verify"])


def test_verify_metadata_and_tokenizer(prefix: str) -> None:
    with expect_error(DataError):
        inspect_dataset.main(["--prefix", prefix, "--verify", "--tokenizer-type", "GPT2BPETokenizer", *gpt2(prefix)])
    path = Path(f"{prefix}.meta.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_token_id": 49}))
    with expect_error(DataError, "49", "20", "50"):
        inspect_dataset.main(["--prefix", prefix, "--verify"])


def gpt2(prefix: str) -> list[str]:
    """Files of a tokenizer with 257 ids."""
    folder = Path(prefix).parent
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]


def test_histogram(prefix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws, is optional")
    inspect_dataset.main(["--prefix", prefix, "--histogram", str(tmp_path / "picture.svg")])
    drawing = (tmp_path / "picture.svg").read_text()
    assert drawing.count("<path") > 10
    with expect_error(ConfigError, "--histogram"):
        inspect_dataset.main(["--prefix", prefix, "--histogram", str(tmp_path / "picture.xyz")])


def test_the_legend_covers_nothing(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lay over the tallest bar."""
    pytest.importorskip("matplotlib", reason="matplotlib, which draws, is optional")
    from megatron.training.reporting import picture

    drawn: list[Any] = []
    monkeypatch.setattr(picture, "save", lambda axes, *paths, **flags: drawn.append(axes))
    inspect_dataset.main(["--prefix", prefix, "--histogram", str(tmp_path / "picture.png")])
    (axes,) = drawn
    axes.figure.canvas.draw()
    (legend,) = axes.figure.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


@pytest.mark.parametrize("loader", ["single", "cyclic"])
def test_a_sample_is_what_training_reads(prefix: str, loader: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Shown from another epoch, split or order it would explain a loss spike with the wrong text."""
    flags = [*RUN, "--data-path", prefix, "--split", "1,0,0", "--eval-iters", "0", "--dataloader-type", loader]
    config = parse_run(flags, extra_groups=GPT_GROUPS)
    tokenizer = NullTokenizer(50)
    train = build_gpt_splits(config.data, seed=1234, sizes=split_sizes(config), tokenizer=tokenizer).train
    assert train is not None
    capsys.readouterr()
    seen = []
    for number in range(5):
        inspect_dataset.main([*flags, "--sample", str(number)])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"sample {number} of train: {prefix}, document ")
        seen.append(lines[1])
        assert lines[2:] == ["loss on      8 of 8 labels", "positions    0 to 7"]
    ours = [
        f"⟦{train[index]['tokens'][0]}⟧ {' '.join(map(str, train[index]['labels'].tolist()))}"
        for index in range(len(train))
    ]
    cyclic = {"shuffle_seed": 1234} if loader == "cyclic" else {}
    order = MicrobatchSampler(num_samples=len(train), consumed=0, micro_batch_size=2, **cyclic)
    read = itertools.chain.from_iterable(order)  # cyclic, without an end
    assert seen == [ours[index] for index in itertools.islice(read, 5) if index is not None]
    with expect_error(ConfigError, "--from-split valid", "0"):
        inspect_dataset.main([*flags, "--sample", "0", "--from-split", "valid"])


def test_packed_documents_are_shown_each_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first token of a document is nobody's label, and padding is not a string."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        for document in range(2):
            writer.add_document([10 + document, 0, 20 + document])
    flags = [*RUN, "--data-path", str(tmp_path / "data"), "--split", "1,0,0", "--eval-iters", "0"]
    inspect_dataset.main([*flags, "--packing", "best-fit", "--sample", "0"])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert sorted(lines[:2]) == ["⟦10⟧ 0 20", "⟦11⟧ 0 21"]
    assert lines[2:] == [
        "loss on      4 of 8 labels",
        "positions    0 to 1",
        "documents    2 2 tokens, each attended to by itself",
        "padding      4 tokens",
    ]


def test_what_bears_no_loss_stands_in_brackets() -> None:
    """Marks within a word leave the spaces of the text as they are."""
    sample = {
        "tokens": np.array([1, 2, 3, 4]),
        "labels": np.array([2, 3, 4, 5]),
        "loss_mask": np.array([0, 1, 1, 0]),
        "position_ids": np.arange(4),
    }
    text, *_ = inspect_dataset.sample_lines(sample, NullTokenizer(50))
    assert text == "⟦1 2⟧ 3 4⟦ 5⟧"


def test_tokenizer_files_say_enough(prefix: str) -> None:
    """Left aside because no type is given, --verify would find nothing wrong with another tokenizer's data."""
    with expect_error(DataError):
        inspect_dataset.main([prefix, "--verify", *gpt2(prefix)])


def test_data_at_a_url(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokenizer and counts are known there, too."""
    pytest.importorskip("fsspec", reason="fsspec, which opens URLs, is optional")
    inspect_dataset.main([f"file://{prefix}", "--data-cache-path", str(tmp_path / "cache"), "--verify"])
    shown = capsys.readouterr().out
    check_line(shown, "NullTokenizer")
    check_line(shown, "verified", "51")


def test_a_sample_of_bert(capsys: pytest.CaptureFixture[str]) -> None:
    """The family is asked for by name, and its flags with it."""
    inspect_dataset.main([*RUN, "--seq-length", "24", "--mock-data", "--model-type", "BERT", "--sample", "0"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("sample 0 of train: mock data, sentences ")
    assert [line.split()[0] for line in shown[1:]] == ["text", "answers", "is_random", "truncated"]


def test_masked_samples_are_shown_as_they_are_read() -> None:
    """What BERT is asked and what it should answer; padding is left out."""
    sample = {
        "text": np.array([2, 5, 4, 3, 0]),
        "attention_mask": np.array([1, 1, 1, 1, 0]),
        "labels": np.array([-1, -1, 7, -1, -1]),
        "loss_mask": np.array([0, 0, 1, 0, 0]),
        "is_random": np.array(1),
        "truncated": np.array(0),
    }
    lines = list(inspect_dataset.sample_lines(sample, NullTokenizer(50)))
    assert lines == ["text         2 5 4 3", "answers      7", "is_random    1", "truncated    0"]
