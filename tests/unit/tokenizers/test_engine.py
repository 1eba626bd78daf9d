"""The optional gigatoken engine, played by a stand-in: used only where it gives the very same ids."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatron.core.tokenizers.engine import GIGATOKEN, OWN, build_engine, choose_engine
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import DataError
from tests.unit.tokenizers.conftest import TEXTS


@pytest.fixture
def tokenizer(bpe_folder: Path) -> RustTokenizer:
    return load(str(bpe_folder), extra_ids=0)


def install(monkeypatch: pytest.MonkeyPatch, *, wrong_id: bool = False, broken: bool = False) -> None:
    """Modules with the two functions of gigatoken's and awkward's that are used; ragged arrays are lists of lists."""

    class Encoder:
        def __init__(self, pipeline: Any) -> None:
            if broken:
                raise ValueError("no such model")
            self._pipeline = pipeline

        def encode_batch(self, texts: Sequence[str], *, parallel: bool) -> list[list[int]]:
            assert not parallel, "a worker is one core"
            ids = [encoding.ids for encoding in self._pipeline.encode_batch(texts)]
            return [[each + (wrong_id and text == 1) for each in row] for text, row in enumerate(ids)]

    gigatoken, awkward = ModuleType("gigatoken"), ModuleType("awkward")
    parts: dict[ModuleType, dict[str, Any]] = {
        gigatoken: {"Tokenizer": Encoder},
        awkward: {
            "num": lambda rows: [len(row) for row in rows],
            "flatten": lambda rows: [each for row in rows for each in row],
            "to_numpy": lambda values: np.array(values, np.uint32),
        },
    }
    for module, functions in parts.items():
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)


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
    assert (choice.name, choice.reason) == (OWN, "gigatoken gave other ids on a probe of the text")


def test_a_library_that_fails_is_not_used(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, broken=True)
    assert choose_engine(tokenizer, TEXTS, "uint16").reason == "gigatoken failed on a probe of the text: no such model"


def test_without_the_library(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert choose_engine(tokenizer, TEXTS, "uint16").reason == "gigatoken is not installed"
    assert choose_engine(NullTokenizer(9, extra_ids=0), ["1"], "uint16").name == OWN


def test_lone_surrogates_are_refused_by_both(tokenizer: RustTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in (GIGATOKEN, OWN):
        with pytest.raises(DataError, match="half of a surrogate pair"):
            build_engine(name, tokenizer, "uint16").encode(["\ud83d"])
