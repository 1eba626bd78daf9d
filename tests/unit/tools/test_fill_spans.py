"""tools/fill_spans.py: missing spans have the names that training gave them, and the answer is cut at the names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.models.t5 import generation
from megatron.core.models.t5.generation import Beginnings
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import CheckpointError, ConfigError
from megatron.training.run.run import Run
from tests.harness.runs import PIECES, saved_model
from tests.harness.scripts import run_script
from tests.harness.sentences import check_sentence, expect_error
from tools import fill_spans

TEXT = "The [MASK] sat [MASK] mat."
WORDS = f"--vocab-extra-ids 3 --vocab-size {len(PIECES) + 5}"
THE, CAT, DOG, SAT, ON, A, MAT, S, DOT = range(PIECES.index("the"), len(PIECES))


def saved(folder: Path, words: str | None = WORDS) -> Run:
    """A T5 and its checkpoint."""
    return saved_model(folder, "t5", words, flags="--position-embedding-type relative --decoder-seq-length 8")


def saved_on_text(folder: Path, decoder: str = "--decoder-seq-length 8") -> Run:
    """Of a run on sentences of ``PIECES``, four a document."""
    with IndexedDatasetWriter(f"{folder}/text", np.uint16) as writer:
        for number in range(60):
            sentence = [THE, (CAT, DOG)[number % 2], SAT, ON, (THE, A)[number % 3 == 0], MAT, DOT]
            writer.add_documents(sentence * 4, [len(sentence)] * 4, [4])
    flags = f"{decoder} --mask-prob 0.4 --split 1,2 --eval-iters 1"
    return saved_model(folder, "t5", WORDS, flags=flags, data=f"--data-path {folder}/text")


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

    monkeypatch.setattr(generation, "likeliest_answer", answer)
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


def test_guesses_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every span of the run's validation data counts once, beside what always saying the commonest would reach."""
    run = saved_on_text(tmp_path)
    tokenizer = run.tokenizer
    assert isinstance(tokenizer, WordPieceTokenizer)
    asked = list[Beginnings]()

    def guess(model: object, tokens: Tensor, told: Tensor, *, names: Sequence[int], count: int, **_: Any) -> Beginnings:
        named = torch.isin(told, torch.tensor(names))
        true = told.roll(-1, 1)[named]
        others = torch.arange(count).expand(len(true), count)  # marks, which no span begins with
        third = torch.arange(len(true)) % 3
        second = torch.where(third == 1, true, others[:, 1])
        first = torch.where(third == 0, true, others[:, 0])
        asked.append(Beginnings(true, torch.stack([first, second, *others[:, 2:].unbind(1)], dim=1)))
        return asked[-1]

    monkeypatch.setattr(generation, "beginnings", guess)
    capsys.readouterr()
    assert fill_spans.main(["--load", f"{tmp_path}/saved", "--samples", "40", "--examples", "1"]) == 0
    text, *answers, heading, ours, always, entropy = capsys.readouterr().out.splitlines()
    assert "[MASK]" in text and len(answers) == text.count("[MASK]")
    assert all(re.fullmatch(r"  \d  .+  \(hidden: [a-z .]+\)", line) for line in answers)
    true = [token for each in asked for token in each.true.tolist()]
    assert [len(each.true) > 0 for each in asked] == [True, True], "40 samples are two batches"
    check_sentence(heading, len(true), "40 samples", "5 guesses")
    hits = [sum((len(each.true) + 2 - rest) // 3 for each in asked) for rest in (0, 1)]
    assert ours.split()[-2:] == [f"{hits[0] / len(true):.1%}", f"{sum(hits) / len(true):.1%}"]
    commonest = Counter(true).most_common(5)
    often = [commonest[0][1], sum(count for _, count in commonest)]
    assert always.split("  (")[0].split()[-2:] == [f"{count / len(true):.1%}" for count in often]
    assert re.fullmatch(r"Predicting its tokens by their frequency costs \d\.\d\d nats a token\.", entropy)


def test_samples_that_hide_nothing(tmp_path: Path) -> None:
    """A decoder of two tokens has no room for a span; there would be nothing to divide by."""
    saved_on_text(tmp_path, "--decoder-seq-length 2")
    with expect_error(ConfigError, "--samples 4"):
        fill_spans.main(["--load", f"{tmp_path}/saved", "--samples", "4"])


def test_entropy() -> None:
    """Of two tokens as often ln 2, of one nothing."""
    assert fill_spans.entropy_of([3, 4, 4, 3]) == pytest.approx(math.log(2))
    assert fill_spans.entropy_of([3, 3]) == 0.0


def test_mistakes(tmp_path: Path) -> None:
    """What is asked of it."""
    with expect_error(ConfigError, "--text", "--samples"):
        fill_spans.main(["--load", "x"])
    with expect_error(ConfigError, "--text 'no gap'"):
        fill_spans.main(["--load", "x", "--text", "no gap"])
    saved(tmp_path)
    load = ["--load", f"{tmp_path}/saved", "--text"]
    with expect_error(ConfigError, "4", "3"):
        fill_spans.main([*load, "[MASK] the [MASK] sat [MASK] on [MASK]"])
    with expect_error(ConfigError, "17 tokens", "16"):
        fill_spans.main([*load, "[MASK] " + "the " * 16])


def test_other_models_are_refused(tmp_path: Path) -> None:
    """A GPT has no encoder; a model of made-up data has no names for spans."""
    saved_model(tmp_path / "gpt", "gpt")
    with expect_error(CheckpointError, "t5"):
        fill_spans.main(["--load", f"{tmp_path}/gpt/saved", "--text", TEXT])
    saved(tmp_path / "mock", words=None)
    # A converted one keeps no tokenizer; it was said to be trained with one that it had never met.
    with expect_error(ConfigError, "NullTokenizer", "--tokenizer-type"):
        fill_spans.main(["--load", f"{tmp_path}/mock/saved", "--text", TEXT])
