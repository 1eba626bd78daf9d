"""The optional gigatoken engine, real where it is installed, else a stand-in: used only where it gives the same ids."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.core.tokenizers import engine, gpt2_bpe
from megatron.core.tokenizers.engine import GIGATOKEN, OWN, build_engine, choose_engine
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError
from tests.harness.data import shared_data
from tests.harness.sentences import expect_error
from tests.unit.tokenizers.conftest import TEXTS


@pytest.fixture
def tokenizer(bpe_folder: Path) -> RustTokenizer:
    return load(str(bpe_folder), extra_ids=0)


def install(monkeypatch: pytest.MonkeyPatch, *, wrong_id: bool = False, broken: bool = False) -> None:
    """A module with the class of gigatoken's that is used."""

    class Encoder:
        def __init__(self, pipeline: Any) -> None:
            if broken:
                raise ValueError("no such model\n\nLocation:\n    src/load.rs:241:24")
            self._pipeline, self.backend = pipeline, self

        def encode(self, text: bytes) -> NDArray[np.uint32]:
            ids = np.array(self._pipeline.encode(text.decode()).ids, np.uint32)
            return ids + np.uint32(wrong_id and text.decode() == TEXTS[1])

    gigatoken = ModuleType("gigatoken")
    vars(gigatoken).update(Tokenizer=Encoder)
    monkeypatch.setitem(sys.modules, "gigatoken", gigatoken)


def test_it_is_the_engine_where_it_is_identical(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    choice = choose_engine(tokenizer, TEXTS, "uint16")
    assert (choice.name, choice.reason) == (GIGATOKEN, "identical on a probe of 3 documents")
    texts = ["", *TEXTS, ""]
    fast, own = (build_engine(name, tokenizer, "uint16").encode(texts) for name in (GIGATOKEN, OWN))
    assert (fast.flat.tolist(), fast.lengths.tolist()) == (own.flat.tolist(), own.lengths.tolist())
    assert fast.flat.dtype == own.flat.dtype == np.uint16


def test_a_single_other_id_rules_it_out(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are nearly those of the tokenizer would train a model that no tokenizer fits."""
    install(monkeypatch, wrong_id=True)
    choice = choose_engine(tokenizer, TEXTS, "uint16")
    assert (choice.name, choice.reason) == (OWN, "gigatoken gave different ids on a probe of the text")


def test_a_library_that_fails_is_not_used(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken=True)
    assert choose_engine(tokenizer, TEXTS, "uint16").reason == "gigatoken failed on a probe of the text: no such model"


def test_without_the_library(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert choose_engine(tokenizer, TEXTS, "uint16").reason == "gigatoken is not installed"
    assert choose_engine(NullTokenizer(9), ["1"], "uint16").name == OWN


def test_lone_surrogates_are_refused_by_both(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in (GIGATOKEN, OWN):
        with expect_error(DataError):
            build_engine(name, tokenizer, "uint16").encode(["\ud83d"])


HARD = [
    "The cat's 12345 hats; it'll cost \u20ac3.50\n\n\n  \t end  ",
    "na\u00efve \u0928\u092e\u0938\u094d\u0924\u0947 \u4f60\u597d\u4e16\u754c \U0001f469\u200d\U0001f680\u200b\u00a0x",
    "<|endoftext|> spelled out, \x00\x07 and \r\n",
    "".join(map(chr, range(32, 700))),
    "a" * 5000 + " " * 300 + "!?" * 400,
]


@pytest.mark.parametrize("texts", [TEXTS, HARD, [], [""]], ids=["plain", "hard", "none", "empty"])
def test_the_real_library_gives_the_same_ids(tokenizer: RustTokenizer, texts: list[str]) -> None:
    """A release that cuts text otherwise must be found out by the probe, and here."""
    pytest.importorskip("gigatoken", reason="gigatoken is not installed")
    fast, own = (build_engine(name, tokenizer, "uint16").encode(texts) for name in (GIGATOKEN, OWN))
    assert (fast.flat.tolist(), fast.lengths.tolist()) == (own.flat.tolist(), own.lengths.tolist())
    assert fast.flat.dtype == own.flat.dtype
    assert choose_engine(tokenizer, texts, "uint16").name == GIGATOKEN


def test_the_real_library_on_gpt2s_vocabulary() -> None:
    """The vocabulary of most runs, on real English."""
    pytest.importorskip("gigatoken", reason="gigatoken is not installed")
    folder = shared_data("gpt2")
    tokenizer = gpt2_bpe.load(str(folder / "gpt2-vocab.json"), str(folder / "gpt2-merges.txt"), extra_ids=0)
    text = shared_data("wikitext-2", "wiki.test.tokens").read_text()
    texts = [*HARD, *(text[start : start + 997] for start in range(0, 300_000, 997))]
    assert choose_engine(tokenizer, texts, "uint16").name == GIGATOKEN


def test_what_differs_later_is_found(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is the beginning of the text; a language that comes later could be what the library gets wrong."""
    install(monkeypatch, wrong_id=True)
    monkeypatch.setattr(engine, "CHECK_EVERY", 2)
    fast = build_engine(GIGATOKEN, tokenizer, "uint16")
    fast.encode(TEXTS[1:])
    fast.encode([TEXTS[0]])
    fast.encode(TEXTS[1:])
    with expect_error(ConfigError, "--tokenizer-engine own"):
        fast.encode(TEXTS[1:])


def test_what_the_library_remembers_is_bounded(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps every word it has seen: text that hardly repeats would take as much memory as it is long."""
    install(monkeypatch)
    memory = [100, 150, 300, 300]
    monkeypatch.setattr(engine, "resident_bytes", lambda: memory.pop(0))
    monkeypatch.setattr(engine, "CHECK_EVERY", 1)
    monkeypatch.setattr(engine, "CACHE_BYTES", 100)
    fast = engine.GigatokenEngine(tokenizer, "uint16", parts=False)
    first, ids = fast._encode, fast.encode(TEXTS).flat.tolist()
    assert fast._encode == first
    assert fast.encode(TEXTS).flat.tolist() == ids
    assert fast._encode != first
    assert memory == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_memory_of_this_process() -> None:
    """A wrong unit would make the library begin anew with every batch, or never."""
    before = engine.resident_bytes()
    held = np.ones(50_000_000, np.uint8)
    assert 40_000_000 < engine.resident_bytes() - before < 100_000_000
    del held
