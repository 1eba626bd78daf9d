"""tools/fill_mask.py: a missing word is asked of the model at its place, and mistakes are said in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.checkpointing.load import read_run_state
from megatron.core.models.bert.model import BertModel, BertOutput
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training.checkpoints import trained_model
from megatron.training.run.run import Run
from tests.harness.runs import PIECES, saved_model
from tests.harness.scripts import run_script
from tests.harness.sentences import check_line, expect_error
from tools import fill_mask

TEXT = "The [MASK] sat on a [MASK]."
WORDS = f"--vocab-size {len(PIECES)}"


def best(run: Run, text: str) -> list[tuple[str, float]]:
    """Likeliest word and its probability at each mask, by the model itself."""
    tokenizer, model = run.tokenizer, run.models[0].eval()
    assert isinstance(tokenizer, WordPieceTokenizer) and isinstance(model, BertModel)
    ids = [PIECES.index(word) for word in f"[CLS] {text.lower().replace('[mask]', '[MASK]')} [SEP]".split()]
    output = model(torch.tensor([ids]))
    assert isinstance(output, BertOutput)
    found = output.words.logits()[0].softmax(-1).max(-1)
    masked = [place for place, token in enumerate(ids) if token == tokenizer.mask]
    return [(PIECES[int(found.indices[place])], float(found.values[place])) for place in masked]


def test_words_are_found_where_they_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At another place, or without [CLS], another word would be the likeliest."""
    run = saved_model(tmp_path, "bert", WORDS)
    (first, sure), (second, _) = best(run, "the [MASK] sat on a [MASK] .")
    capsys.readouterr()
    assert fill_mask.main(["--load", str(tmp_path / "saved"), "--text", TEXT, "A [MASK]", "--top-k", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == TEXT and lines[4] == "A [MASK]"
    assert lines[1].startswith(f"  1  {first} {sure:.1%}, ") and lines[1].count("%") == 3
    assert lines[2].startswith(f"  2  {second} ")
    assert lines[3].startswith(f"  => the {first} sat on a {second}".replace(" ##", ""))
    assert lines[5].startswith(f"  1  {best(run, 'a [MASK]')[0][0]} ")


def test_two_ranks_say_it_once(tmp_path: Path) -> None:
    """Each has half of the vocabulary, and one speaks."""
    run = saved_model(tmp_path, "bert", WORDS)
    flags = ["--load", str(tmp_path / "saved"), "--text", TEXT, "--top-k", "2"]
    ended = run_script("tools/fill_mask.py", flags, ranks=2, log=tmp_path / "log")
    assert ended.code == 0, ended.output
    assert ended.output.count(TEXT) == 1
    assert f"  1  {best(run, 'the [MASK] sat on a [MASK] .')[0][0]} " in ended.output


def test_mistakes(tmp_path: Path) -> None:
    """What is asked of it, what it knows, and what it is."""
    saved_model(tmp_path, "bert", WORDS)
    load = ["--load", str(tmp_path / "saved"), "--text"]
    with expect_error(ConfigError, "--text 'the cat'"):
        fill_mask.main([*load, "the cat"])
    with expect_error(ConfigError, "19 tokens", "16"):
        fill_mask.main([*load, "[MASK] " + "the " * 16])
    with expect_error(ConfigError, "--top-k", "0", "1"):
        fill_mask.main([*load, "a [MASK]", "--top-k", "0"])


def test_other_models_are_refused(tmp_path: Path) -> None:
    """A GPT looks one way only; a model of made-up data knows no words."""
    saved_model(tmp_path / "gpt", "gpt")
    with expect_error(CheckpointError):
        fill_mask.main(["--load", str(tmp_path / "gpt/saved"), "--text", "a [MASK]"])
    saved_model(tmp_path / "bert", "bert")
    with expect_error(ConfigError, "NullTokenizer"):
        fill_mask.main(["--load", str(tmp_path / "bert/saved"), "--text", "a [MASK]"])


def test_a_checkpoint_without_its_tokenizer_is_given_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was converted from a folder without a tokenizer could not be asked about any text."""
    saved_model(tmp_path, "bert")
    read = read_run_state
    monkeypatch.setattr(
        trained_model,
        "read_run_state",
        lambda folder: (state := read(folder)) | {"tokenizer": {**state["tokenizer"], "fingerprint": None}},
    )
    words = tmp_path / "words.txt"
    words.write_text("".join(f"{word}\n" for word in [*PIECES, *(f"w{number}" for number in range(37))]))
    flags = ["--load", str(tmp_path / "saved"), "--text", TEXT, "--vocab-file", str(words)]
    with expect_error(ConfigError, "--tokenizer-type"):
        fill_mask.main(flags)
    flags += ["--tokenizer-type", "BertWordPieceLowerCase"]
    assert fill_mask.main(flags) == 0
    check_line(capsys.readouterr().out, "the")
    words.write_text(words.read_text() + "more\n")
    with expect_error(ConfigError, "54 tokens", "51"):
        fill_mask.main(flags)


def test_the_place_of_a_tokenizer_that_is_gone_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error named a --vocab-file that the user had not given; it was where training had read it."""
    saved_model(tmp_path, "bert", WORDS)
    monkeypatch.setattr(trained_model, "with_kept_files", lambda config, folder: config)  # as checkpoints of before
    (tmp_path / "vocab.txt").unlink()
    with expect_error(DataError, "vocab.txt", "--vocab-file"):
        fill_mask.main(["--load", str(tmp_path / "saved"), "--text", TEXT])
