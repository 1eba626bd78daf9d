"""Texts for calibration: sequences of tokens from a ``.bin``/``.idx`` data set, or from JSON lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.core.conversion.companions import text_tokenizer_of
from megatron.core.conversion.portable import PortableModel
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.metadata import DatasetMetadata, TokenizerStamp
from megatron.core.tokenizers.input_files import find_inputs, is_plain_text
from megatron.core.tokenizers.text_files import read_batches, read_documents, read_plain_lines
from megatron.errors import DataError

_SAMPLES_READ = 8  # times as many samples as are asked for are read of a file of text, to choose among them


@dataclass(frozen=True)
class CalibrationTexts:
    """Sequences of equal length. ``tokens``: [samples, length], int64. ``digest``: SHA-256 (hex) of all of them."""

    tokens: Tensor
    digest: str


def calibration_texts(
    portable: PortableModel, path: str, *, key: str, samples: int, length: int, seed: int
) -> CalibrationTexts:
    """``samples`` sequences of ``length`` tokens, chosen by ``seed`` among those of the texts at ``path``, which are
    joined, one after the other, and cut.

    Raises DataError for data of another tokenizer, for text without one, and where the texts are too short.
    """
    if Path(f"{path}.idx").exists():
        _check_tokenizer(portable, path)
        documents = IndexedDataset(path)
        total, ends = documents.num_tokens, np.cumsum(documents.lengths, dtype=np.int64)
    else:
        read = _read_texts(portable, path, key, most=samples * length * _SAMPLES_READ)
        documents, total, ends = None, len(read), np.zeros(0, np.int64)
    windows = total // length
    if windows < samples:
        more = f"give at most --samples {windows}, a shorter --seq-length, or more text"
        raise DataError(
            f"--data-path {path} has {total:,} tokens, and --samples {samples} of --seq-length {length} need "
            f"{samples * length:,}: {more if windows else 'give a shorter --seq-length, or more text'}"
        )
    firsts = length * np.sort(np.random.RandomState(seed).permutation(windows)[:samples])
    cut = [
        read[first : first + length] if documents is None else _cut(documents, ends, int(first), length)
        for first in firsts
    ]
    tokens, words = np.stack(cut).astype(np.int64), portable.model.vocab_size
    if words is not None and tokens.max() >= words:
        raise DataError(
            f"--data-path {path} holds token id {tokens.max()}, and the vocabulary of the model in --load has ids 0 to "
            f"{words - 1}: give data of its own tokenizer"
        )
    return CalibrationTexts(torch.from_numpy(tokens), hashlib.sha256(tokens.tobytes()).hexdigest())


def _check_tokenizer(portable: PortableModel, prefix: str) -> None:
    tokenizer, metadata = text_tokenizer_of(portable.tokenizer), DatasetMetadata.read(prefix)
    if tokenizer is None or metadata is None or metadata.tokenizer is None:
        return
    own = TokenizerStamp.of(tokenizer)
    if metadata.tokenizer.fingerprint != own.fingerprint:
        raise DataError(
            f"--data-path {prefix} was tokenized with {metadata.tokenizer}, and the model in --load reads {own}: give "
            "data of its own tokenizer, such as a part of its training data, or text"
        )


def _cut(documents: IndexedDataset, ends: NDArray[np.int64], first: int, length: int) -> NDArray[Any]:
    """Tokens ``[first, first + length)`` of all documents one after the other, which end at ``ends``."""
    found, document = list[NDArray[Any]](), int(np.searchsorted(ends, first, side="right"))
    while length:
        offset = first - int(ends[document - 1] if document else 0)
        part = documents.get(document, offset, min(length, int(ends[document]) - first))
        found.append(part)
        first, length, document = first + len(part), length - len(part), document + 1
    return np.concatenate(found)


def _read_texts(portable: PortableModel, path: str, key: str, *, most: int) -> NDArray[Any]:
    """Token ids of texts, each followed by the end of a document, until there are ``most``."""
    tokenizer = text_tokenizer_of(portable.tokenizer)
    if tokenizer is None:
        raise DataError(
            f"--data-path {path} is text, and the checkpoint keeps no tokenizer that could read it: give the prefix of "
            "a .bin and .idx file that tools/preprocess_data.py wrote with the model's tokenizer"
        )
    if not Path(path).exists():
        raise DataError(
            f"--data-path {path}: there is no {path}.idx of a data set, and no file of JSON lines (.jsonl) or text"
        )
    found, count = list[NDArray[Any]](), 0
    for text in _texts(find_inputs([path]), key):
        ids = [*tokenizer.tokenize(text), tokenizer.eod]
        found.append(np.asarray(ids, np.int64))
        count += len(ids)
        if count >= most:
            break
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _texts(paths: Sequence[str], key: str) -> Iterator[str]:
    for batch in read_batches(paths, keys=(key,)):
        documents = read_plain_lines(batch) if is_plain_text(batch.path) else read_documents(batch, (key,))
        if documents.bad:
            raise DataError(f"--data-path {documents.bad[0]}")
        yield from documents.texts["text" if is_plain_text(batch.path) else key]
