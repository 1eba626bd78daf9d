"""tools/fill_mask.py: a missing word is asked of the model at its place, and mistakes are said in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core.models.bert import BertModel, BertOutput
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import CheckpointError, ConfigError
from megatron.training.run import Run
from tests.harness.runs import PIECES, saved_model
from tests.harness.scripts import run_script
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
    with pytest.raises(ConfigError, match=r"--text 'the cat' has no \[MASK\]: write it where words are missing"):
        fill_mask.main([*load, "the cat"])
    with pytest.raises(ConfigError, match=r"has 19 tokens, and this model sees 16 at most: shorten it"):
        fill_mask.main([*load, "[MASK] " + "the " * 16])
    with pytest.raises(ConfigError, match="--top-k is 0; it must be at least 1"):
        fill_mask.main([*load, "a [MASK]", "--top-k", "0"])


def test_other_models_are_refused(tmp_path: Path) -> None:
    """A GPT looks one way only; a model of made-up data knows no words."""
    saved_model(tmp_path / "gpt", "gpt")
    with pytest.raises(CheckpointError, match="holds a gpt model; this tool works with bert"):
        fill_mask.main(["--load", str(tmp_path / "gpt/saved"), "--text", "a [MASK]"])
    saved_model(tmp_path / "bert", "bert")
    with pytest.raises(ConfigError, match=r"was trained with NullTokenizer, which has no \[MASK\]"):
        fill_mask.main(["--load", str(tmp_path / "bert/saved"), "--text", "a [MASK]"])
