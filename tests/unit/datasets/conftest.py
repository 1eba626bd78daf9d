"""What the data tests share: recorded outputs of Megatron-LM, small data sets, a tokenizer's identity."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.null import NullTokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "datasets_v012.json"

WriteDocuments = Callable[..., str]


class FakeTokenizer(NullTokenizer):
    """The properties of a tokenizer that data sets look at."""

    fingerprint = ""

    def __init__(self, *, vocab_size: int = 51, fingerprint: str = "f1" * 32) -> None:
        self.name, self.vocab_size, self.eod, self.fingerprint = "GPT2BPETokenizer", vocab_size, 50, fingerprint


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Outputs recorded from core_v0.12.0."""
    recorded: dict[str, Any] = json.loads(GOLDEN.read_text())
    return recorded


@pytest.fixture
def tokenizer() -> FakeTokenizer:
    """The tokenizer of the recorded documents: ids 0 to 49, and 50 at the end of each document."""
    return FakeTokenizer()


@pytest.fixture
def write_documents(tmp_path: Path) -> WriteDocuments:
    """Write token lists as documents of one sequence and get the prefix; ``tokenizer=None`` leaves no metadata."""

    def write(
        documents: Sequence[Sequence[int]],
        name: str = "data",
        *,
        dtype: Any = np.uint16,
        tokenizer: Tokenizer | None = None,
    ) -> str:
        prefix = str(tmp_path / name)
        stamp = None if tokenizer is None else TokenizerStamp.of(tokenizer)
        with IndexedDatasetWriter(prefix, dtype, tokenizer=stamp) as writer:
            for document in documents:
                writer.add_document(document)
        if tokenizer is None:
            Path(f"{prefix}.meta.json").unlink()
        return prefix

    return write
