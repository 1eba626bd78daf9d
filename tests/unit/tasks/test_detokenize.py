"""Published perplexities are of text: words put together again otherwise give another number."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.training.evaluation.zero_shot.detokenize import detokenizer_for, penn_treebank, unchanged, wikitext
from tests.harness.evaluation import WIKITEXT, WIKITEXT_AS_TEXT
from tests.harness.sentences import check_sentence, expect_error


def test_wikitext() -> None:
    assert wikitext(WIKITEXT) == WIKITEXT_AS_TEXT
    assert wikitext("a { b } at 20 ° C ; = = = = Four = = = =\n N up") == "a {b} at 20°C; ==== Four ====\nN up"


def test_penn_treebank() -> None:
    text = " it 's a pity they do n't have N cents or $ N or # N now \n more"
    check_sentence(penn_treebank(text), "have1", "$1", "#1")


def test_the_path_tells_the_corpus() -> None:
    """In Megatron-LM's order, by any part of the path."""
    assert detokenizer_for(Path("data/ptb/test.txt")) is penn_treebank
    assert detokenizer_for(Path("wikitext-103/ptb.test")) is penn_treebank
    assert detokenizer_for(Path("wikitext-103/test.tokens")) is wikitext
    assert detokenizer_for(Path("lambada.txt")) is unchanged
    with expect_error(DataError, "LM"):
        detokenizer_for(Path("test.txt"))


def test_against_the_harness() -> None:
    """lm-evaluation-harness has the same rules for WikiText."""
    theirs = pytest.importorskip(
        "lm_eval.tasks.wikitext.preprocess_wikitext", reason="compares with lm-evaluation-harness"
    )
    assert theirs.wikitext_detokenizer({"page": WIKITEXT}) == wikitext(WIKITEXT)
