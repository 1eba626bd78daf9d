"""Token files of pairs of answers, as tools/preprocess_preferences.py writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter


def write_pairs(prefix: Path, *, pairs: int, longest: int, vocab_size: int, seed: int = 0) -> str:
    """Pairs of random texts that begin alike, together at most ``longest`` tokens with their labels; the prefix."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as texts, IndexedDatasetWriter(f"{prefix}_targets", np.uint8) as marks:
        for _ in range(pairs):
            prompt = random.integers(vocab_size, size=random.integers(1, longest // 4))
            answers = [random.integers(vocab_size, size=random.integers(1, longest // 4 + 1)) for _ in range(2)]
            texts.add_document(*(np.concatenate([prompt, answer]) for answer in answers))
            marks.add_document(*(np.arange(len(prompt) + len(answer)) >= len(prompt) for answer in answers))
    return str(prefix)


def write_rated(prefix: Path, *, answers: int, longest: int, vocab_size: int, seed: int = 0) -> str:
    """Rated answers, desirable ones and others in turn, as random texts of at most ``longest`` tokens; the prefix."""
    random = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as texts, IndexedDatasetWriter(f"{prefix}_targets", np.uint8) as marks:
        for number in range(answers):
            prompt, answer = (random.integers(vocab_size, size=random.integers(1, longest // 2 + 1)) for _ in range(2))
            both = [np.concatenate([prompt, answer]), np.empty(0, np.int64)]
            marked = [np.arange(len(each)) >= len(prompt) for each in both]
            texts.add_document(*(both if number % 2 == 0 else both[::-1]))
            marks.add_document(*(marked if number % 2 == 0 else marked[::-1]))
    return str(prefix)
