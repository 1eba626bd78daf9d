"""The ``tokenizers`` library, with a DataError for whatever it says about descriptions from strangers.

It is written in Rust and panics on some of them, which Python sees as an exception that is no ``Exception``.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import tokenizers

from megatron.errors import DataError

_PROBES = ["", " ", "A text, 12 x  y\n\tz.", "\u00e9\u0301 \ufb01 \u6f22\u5b57 \U0001f389\u200d"]


def parsed_pipeline(text: str, *, where: str) -> tokenizers.Tokenizer:
    """The pipeline that a tokenizer.json describes; DataError for a text that is none, or that can't be used."""
    _check_charsmaps(text, where)
    with panics_as_errors(f"{where} is not a tokenizer.json"):
        pipeline = tokenizers.Tokenizer.from_str(text)
        # A file may carry settings that cut or fill documents.
        pipeline.no_truncation()
        pipeline.no_padding()
    check_encoding(pipeline, where=where)
    return pipeline


def check_encoding(pipeline: tokenizers.Tokenizer, *, where: str) -> None:
    """Raise DataError where the library panics on texts; errors about single words are those of a text."""
    with panics_as_errors(f"{where} describes a tokenizer that cannot encode text"), suppress(Exception):
        pipeline.encode_batch_fast(_PROBES, add_special_tokens=True)


@contextmanager
def panics_as_errors(sentence: str) -> Iterator[None]:
    """Raise DataError, the ``sentence`` with the reason, where the library raises or panics."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise DataError(f"{sentence}: {str(error).partition(chr(10))[0]}.") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{sentence}: the library fails on it ({str(error).partition(chr(10))[0]}).") from None


def _check_charsmaps(text: str, where: str) -> None:
    """Raise DataError for damaged normalization rules, on which the library panics, with a report of its own."""
    if '"Precompiled"' not in text:
        return
    try:
        normalizer = json.loads(text).get("normalizer")
    except (ValueError, AttributeError, RecursionError):
        return  # the library says what is wrong
    for each in _all_of(normalizer):
        if each.get("type") == "Precompiled":
            check_charsmap(each.get("precompiled_charsmap"), where=where)


def check_charsmap(value: Any, *, where: str) -> None:
    """Raise DataError for what is no compiled map: its length, a trie of as many bytes, and the texts it points to."""
    try:
        content = base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise DataError(f"{where} has a Precompiled normalizer whose precompiled_charsmap is not base64.") from None
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 or size % 4 or size < 4 or 4 + size > len(content):
        raise DataError(f"{where} has a Precompiled normalizer whose precompiled_charsmap is damaged.")


def _all_of(normalizer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(normalizer, dict):
        yield normalizer
        for each in normalizer.get("normalizers") or ():
            yield from _all_of(each)
