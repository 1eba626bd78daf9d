"""tools/fill_spans.py: missing spans have the names that training gave them, and the answer is cut at the names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.core.inference import telling
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import CheckpointError, ConfigError
from megatron.training.run import Run
from tests.harness.runs import PIECES, saved_model
from tests.harness.scripts import run_script
from tools import fill_spans

TEXT = "The [MASK] sat [MASK] mat."
WORDS = f"--vocab-extra-ids 3 --vocab-size {len(PIECES) + 5}"
THE, CAT, DOG, SAT, ON, A, MAT, S, DOT = range(PIECES.index("the"), len(PIECES))


def saved(folder: Path, words: str | None = WORDS) -> Run:
    """A T5 and its checkpoint."""
    return saved_model(folder, "t5", words, flags="--position-embedding-type relative --decoder-seq-length 8")


def test_spans_are_asked_for_by_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other names, a text with marks at its ends or more words than training had room for are new to the model."""
    tokenizer = saved(tmp_path).tokenizer
    assert isinstance(tokenizer, WordPieceTokenizer)
    one, two, three = tokenizer.sentinels
    asked: list[tuple[list[int], dict[str, Any]]] = []

    def answer(model: object, tokens: Sequence[int], **how: Any) -> list[int]:
        asked.append((list(tokens), how))
        return [one, CAT, S, two, ON, A, three, DOG]

    monkeypatch.setattr(telling, "likeliest_answer", answer)
    capsys.readouterr()
    assert fill_spans.main(["--load", f"{tmp_path}/saved", "--text", TEXT, "[MASK]"]) == 0
    (both, how), (only, _) = asked
    assert both == [THE, one, SAT, two, MAT, DOT] and only == [one]
    assert (how["begin"], how["end"], how["most"]) == (len(PIECES), len(PIECES) + 1, 7)
    first = [TEXT, "  1  cats", "  2  on a", "  => the cats sat on a mat."]
    assert capsys.readouterr().out.splitlines() == [*first, "[MASK]", "  1  cats", "  => cats"]


def test_two_ranks_say_the_same_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has half of the vocabulary, and one speaks."""
    saved(tmp_path)
    words = ["--load", f"{tmp_path}/saved", "--text", TEXT]
    capsys.readouterr()
    fill_spans.main(words)
    alone = capsys.readouterr().out
    ended = run_script("tools/fill_spans.py", words, ranks=2, log=tmp_path / "log")
    assert ended.code == 0, ended.output
    assert alone in ended.output and ended.output.count(TEXT) == 1


def test_answers_are_cut_at_the_names() -> None:
    """Spans may come in any order, twice or not at all, and words before the first name belong to none."""
    assert fill_spans.spans_of([5, 101, 6, 7, 100, 8, 101, 9], [100, 101, 102]) == [[8], [6, 7, 9], []]


def test_mistakes(tmp_path: Path) -> None:
    """What is asked of it."""
    with pytest.raises(ConfigError, match=r"--text 'no gap' has no \[MASK\]: write it where words are missing"):
        fill_spans.main(["--load", "x", "--text", "no gap"])
    saved(tmp_path)
    load = ["--load", f"{tmp_path}/saved", "--text"]
    with pytest.raises(ConfigError, match=r"has 4 \[MASK\], and this model can name 3 at most"):
        fill_spans.main([*load, "[MASK] the [MASK] sat [MASK] on [MASK]"])
    with pytest.raises(ConfigError, match="has 17 tokens, and this model sees 16 at most: shorten it"):
        fill_spans.main([*load, "[MASK] " + "the " * 16])


def test_other_models_are_refused(tmp_path: Path) -> None:
    """A GPT has no encoder; a model of made-up data has no names for spans."""
    saved_model(tmp_path / "gpt", "gpt")
    with pytest.raises(CheckpointError, match="holds a gpt model; this tool works with t5"):
        fill_spans.main(["--load", f"{tmp_path}/gpt/saved", "--text", TEXT])
    saved(tmp_path / "mock", words=None)
    with pytest.raises(ConfigError, match="NullTokenizer, which has no tokens that name missing spans"):
        fill_spans.main(["--load", f"{tmp_path}/mock/saved", "--text", TEXT])
