"""Text that already is token ids, separated by spaces."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from megatron.core.tokenizers.base import Tokenizer, fingerprint_of, with_pieces
from megatron.errors import ConfigError, DataError


class NullTokenizer(Tokenizer):
    """Ids 0 to ``vocab_size - 1`` as ``--vocab-size`` says, and one more that ends documents."""

    name = "NullTokenizer"
    pad = bos = eos = None

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None:
            raise ConfigError(f"{self.name} needs --vocab-size: the number of ids in the data.")
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    @property
    @override
    def fingerprint(self) -> str:
        """SHA-256 of the number of ids."""
        return fingerprint_of([self.name, self.vocab_size])

    @override
    def tokenize(self, text: str) -> list[int]:
        """The numbers in the text; raises DataError for a word that is none, or one beyond the vocabulary."""
        words = text.split()
        digits = "".join(words)
        try:
            ids = list(map(int, words)) if digits.isascii() and digits.isdecimal() else []
        except ValueError:  # more digits than Python converts
            ids = []
        if len(ids) < len(words):  # int() alone would take 1_0, +1 and the digits of other scripts
            wrong = max(words, key=lambda word: (not (word.isascii() and word.isdecimal()), len(word)))
            raise DataError(
                f"{wrong[:40]!r} is not a token id; {self.name} reads numbers separated by spaces: for text give "
                "another --tokenizer-type and its files"
            )
        if ids and max(ids) >= self.vocab_size:
            raise DataError(f"token id {max(ids)} is outside 0 to {self.eod}, which --vocab-size {self.eod} allows")
        return ids

    @override
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in each text."""
        return [self.tokenize(text) for text in texts]

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        """The numbers, separated by spaces."""
        return " ".join(map(str, with_pieces(ids, self.vocab_size)))
