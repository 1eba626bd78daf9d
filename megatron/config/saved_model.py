"""What a run takes of the settings of a saved model when flags replace its tokenizer or its positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.positions import ROTARY_FIELDS


def replaced_positions(saved: Mapping[str, Any], given: Mapping[str, Any], *, scales: bool) -> set[str]:
    """Settings of the saved model's rotary positions that those of a given, other type lack.

    ``given``: values of flags and files, by field. ``scales``: whether Llama 3's scaling is asked for.
    """
    asked, before = given.get("position_embedding_type"), saved.get("model", {}).get("position_embedding_type")
    if asked is None or asked == before:
        return set()
    lacking = {field for field, types in ROTARY_FIELDS.items() if asked not in types}
    return lacking - {"original_max_position_embeddings"} if scales else lacking


def with_one_tokenizer(saved: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The saved settings, without those of the tokenizer if another kind is given; the vocabulary size stays.

    ``given``: values of flags and files, by field.
    """
    own: Mapping[str, Any] = saved.get("tokenizer") or {}
    kind, rows = own.get("tokenizer_type"), own.get("vocab_size")
    asked = given.get("tokenizer_type", kind)
    if "tokenizer_type" not in given and any(
        own.get(file) is None for file in ("vocab_file", "merge_file", "tokenizer_model") if file in given
    ):
        asked = None  # what follows from the files
    if asked == kind:
        return saved
    if rows is not None:  # of the model: a NullTokenizer adds the id that ends documents
        rows += (kind == "NullTokenizer") - (asked == "NullTokenizer")
    return {**saved, "tokenizer": {"vocab_size": rows}}
