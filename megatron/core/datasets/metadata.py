"""The tokenizer that made a data set, stored in ``PREFIX.meta.json`` and compared with the tokenizer of a run.

Training with the wrong vocabulary raises no error. Megatron-LM's files don't name theirs: data that it wrote has no
such file, and ids can only be checked one by one as they are read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import DataError, exit_code_of
from megatron.small_files import has_file, read_json

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer

_ANY_IDS = "NullTokenizer"  # its ids are the numbers in the data, so it fits data of any tokenizer


@dataclass(frozen=True)
class TokenizerStamp:
    """A tokenizer's identity, small enough to store beside the data."""

    type: str
    vocab_size: int
    eod: int | None
    fingerprint: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerStamp:
        """Identity of a tokenizer."""
        return cls(tokenizer.name, tokenizer.vocab_size, tokenizer.eod, tokenizer.fingerprint)

    @override
    def __str__(self) -> str:
        return f"{self.type} ({self.vocab_size} ids, fingerprint {self.fingerprint[:12]})"


@dataclass(frozen=True)
class ContentDigests:
    """SHA-256 (hex) of all bytes of ``PREFIX.bin`` and ``PREFIX.idx``, as ``sha256sum`` prints them."""

    bin: str
    idx: str


@dataclass(frozen=True, kw_only=True)
class DatasetMetadata:
    """What is known about the tokens of ``PREFIX.bin`` without reading them."""

    tokenizer: TokenizerStamp | None
    num_tokens: int
    num_sequences: int
    num_documents: int
    max_token_id: int | None  # None: no tokens, or tokens that aren't integers
    sha256: ContentDigests | None = None
    chat: ChatSettings | None = None  # of conversations that tools/preprocess_sft.py wrote
    num_images: int | None = None  # of which tools/preprocess_images.py wrote places

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens, sequences and documents."""
        return self.num_tokens, self.num_sequences, self.num_documents

    @staticmethod
    def path(prefix: str) -> Path:
        """File of the metadata."""
        return Path(f"{prefix}.meta.json")

    def to_json(self) -> str:
        """Content of the file."""
        found = asdict(self)
        for name in ("chat", "num_images"):
            if found[name] is None:
                del found[name]
        return json.dumps(found, indent=2) + "\n"

    @classmethod
    def read(cls, prefix: str) -> DatasetMetadata | None:
        """Metadata stored beside the data; None when there is none; DataError when it cannot be understood."""
        path = cls.path(prefix)
        if not has_file(path, error=DataError):
            return None
        try:
            return cast(DatasetMetadata, read_json(path, cls, error=DataError))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", exit_code=exit_code_of(error)) from None
        except DataError as error:
            raise DataError(
                f"{error}: preprocess the text again, or delete this file to train without checking that data and "
                "tokenizer fit"
            ) from None

    def check_counts(self, prefix: str, *, num_tokens: int, num_sequences: int) -> None:
        """DataError when the metadata belongs to other ``.bin``/``.idx`` files than those beside it."""
        if (self.num_tokens, self.num_sequences) != (num_tokens, num_sequences):
            raise DataError(
                f"{self.path(prefix)} describes {self.num_tokens} tokens in {self.num_sequences} sequences but "
                f"{prefix}.idx has {num_tokens} in {num_sequences}: it belongs to other files; copy its own"
            )

    def check_content(self, prefix: str, found: ContentDigests) -> None:
        """DataError when the files' bytes have changed; without stored digests nothing is checked."""
        for ending, digest in asdict(found).items():
            written = getattr(self.sha256, ending, digest)
            if digest != written:
                raise DataError(
                    f"{prefix}.{ending} has changed: its SHA-256 starts with {digest[:12]}, in "
                    f"{self.path(prefix).name} with {written[:12]}; copy the file again, or preprocess the text again"
                )

    def check_tokenizer(self, prefix: str, run: TokenizerStamp) -> None:
        """DataError when another tokenizer than the run's made the data."""
        if self.tokenizer is None or run.type == _ANY_IDS or self.tokenizer.fingerprint == run.fingerprint:
            return
        raise DataError(
            f"{prefix} was tokenized with {self.tokenizer} but this run has {run}: give --tokenizer-type and its "
            "files as for tools/preprocess_data.py, or preprocess the text again with the run's tokenizer"
        )

    def check_vocabulary(self, prefix: str, *, vocab_size: int) -> None:
        """DataError when some token id has no row in the model's vocabulary."""
        if self.max_token_id is not None and self.max_token_id >= vocab_size:
            raise DataError(
                f"{prefix} holds token id {self.max_token_id} but the vocabulary has ids 0 to {vocab_size - 1}: "
                "the data was made with a larger vocabulary; use its tokenizer, or preprocess the text again"
            )
        wrong = [each for each in (self.chat.end_tokens if self.chat else ()) if not 0 <= each < vocab_size]
        if wrong:
            raise DataError(
                f"{self.path(prefix)}: chat.end_tokens has {wrong[0]} but the vocabulary has ids 0 to {vocab_size - 1}"
                ": preprocess the text again with the run's tokenizer"
            )
