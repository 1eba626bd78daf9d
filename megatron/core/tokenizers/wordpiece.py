"""WordPiece (Devlin et al. 2018, arXiv:1810.04805), read from its vocab.txt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from typing_extensions import override

from megatron.core.tokenizers.base import extra_id_tokens, required_file
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import DataError
from megatron.small_files import VOCABULARY_BYTES, as_kind, read_json

UNKNOWN = "[UNK]"
SPECIAL_TOKENS = ("[PAD]", UNKNOWN, "[CLS]", "[SEP]", "[MASK]")

_PREFIX = "##"
_LONGEST_WORD = 200  # characters; longer words are unknown, as in Google's and Megatron-LM's implementations


class WordPieceTokenizer(RustTokenizer):
    """BertWordPieceCase, or BertWordPieceLowerCase, which also strips accents.

    The vocabulary grows by ``[BOS]``, ``[EOS]`` and the ``<extra_id_N>`` of ``--vocab-extra-ids``, as Megatron-LM's
    does; with a ``vocab_size`` of just the file's pieces, as in Hugging Face's models, by the latter alone. The pieces
    are read from a vocab.txt or from Hugging Face's tokenizer.json. Inside a text special tokens such as ``[CLS]`` are
    ordinary characters. Documents end with ``[SEP]``.
    Raises ConfigError when the flag is missing, DataError when the file is missing or lacks a special token.
    """

    def __init__(self, vocab_file: str | None, *, name: str, extra_ids: int, vocab_size: int | None = None) -> None:
        path = required_file(vocab_file, flag="--vocab-file", kind=name, holds="a vocab.txt")
        pieces = read_pieces(path)
        lacking = [token for token in SPECIAL_TOKENS if token not in pieces]
        if lacking:
            raise DataError(f"--vocab-file {path} has no {lacking[0]}: a WordPiece vocab.txt has one piece a line.")
        pipeline = words_pipeline(
            models.WordPiece(pieces, unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD),
            lower_case=name == "BertWordPieceLowerCase",
        )
        if vocab_size != len(pieces):
            pipeline.add_special_tokens(["[BOS]", "[EOS]"])
        added = pipeline.get_vocab(with_added_tokens=True)
        super().__init__(
            pipeline,
            name=name,
            eod=pieces["[SEP]"],
            pad=pieces["[PAD]"],
            bos=added.get("[BOS]"),
            eos=added.get("[EOS]"),
            extra_ids=extra_ids,
        )
        self.cls, self.sep, self.mask = pieces["[CLS]"], pieces["[SEP]"], pieces["[MASK]"]
        self.separators = 1
        self._vocabulary = pipeline.get_vocab(with_added_tokens=True)
        self.sentinels = tuple(self._vocabulary[token] for token in extra_id_tokens(extra_ids))
        self.decoder_start = self.bos

    @property
    @override
    def special_ids(self) -> frozenset[int]:
        """The special tokens; an unknown word is part of a text."""
        return super().special_ids.union((self.cls, self.sep, self.mask), self.sentinels)

    def continuations(self) -> Sequence[bool]:
        """Whether each id continues the previous word."""
        found = [False] * self.vocab_size
        for piece, number in self._vocabulary.items():
            found[number] = piece.startswith(_PREFIX)
        return found


def read_pieces(path: Path) -> dict[str, int]:
    """Ids of the pieces in a vocab.txt or a tokenizer.json; DataError for another file."""
    if path.suffix == ".json":
        where = f"--vocab-file {path}"
        content = read_json(path, dict[str, Any], where=where, error=DataError, most_bytes=VOCABULARY_BYTES)
        model = content.get("model")
        if not isinstance(model, dict) or model.get("type") != "WordPiece":
            raise DataError(f"{where} is not a tokenizer.json of WordPiece; give a vocab.txt.")
        pieces: dict[str, int] = as_kind(model.get("vocab"), dict[str, int], where=f"{where}: vocab", error=DataError)
        if sorted(pieces.values()) != list(range(len(pieces))):
            raise DataError(f"{where}: the ids of vocab are not 0 to {len(pieces) - 1}; give a vocab.txt.")
        return pieces
    try:
        return models.WordPiece.read_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"--vocab-file {path} is not a vocab.txt: {error}.") from None


def words_pipeline(model: models.WordPiece, *, lower_case: bool) -> tokenizers.Tokenizer:
    """Cuts text into words and signs, then pieces; in lower case also strips accents."""
    pipeline = tokenizers.Tokenizer(model)
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=lower_case, strip_accents=lower_case)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece(prefix=_PREFIX)
    return pipeline
