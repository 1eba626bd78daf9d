"""JSON Schemas as the library that follows them takes them: its dialect of regular expressions, and its keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.inference.ecma_regex import rust_pattern

_OF_NAMES = ("properties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema for each name."""
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONES = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")


def followable(schema: Mapping[str, Any], *, strict: bool) -> tuple[dict[str, Any], bool]:
    """``schema`` for the library, and whether a ``uniqueItems`` was left out of it, which only happens if not
    ``strict``: a grammar can't compare the items of a list.
    """
    walk = _Walk(strict)
    return walk.schema(schema), walk.is_relaxed


class _Walk:
    def __init__(self, strict: bool) -> None:
        self._strict, self.is_relaxed = strict, False

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = {}
        for key, value in schema.items():
            if key == "uniqueItems" and self._is_left_out(schema):
                continue
            found[key] = self._value(key, value)
        return found

    def _value(self, key: str, value: Any) -> Any:
        if key == "pattern" and isinstance(value, str):
            return rust_pattern(value)
        if key == "patternProperties" and isinstance(value, dict):
            return {rust_pattern(pattern): self.schema(each) for pattern, each in value.items()}
        if key in _OF_NAMES and isinstance(value, dict):
            return {name: self.schema(each) for name, each in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.schema(each) for each in value]
        return self.schema(value) if key in _ONES else value

    def _is_left_out(self, schema: Mapping[str, Any]) -> bool:
        most = schema.get("maxItems")
        if schema["uniqueItems"] is False or (isinstance(most, int) and most < 2):
            return True
        if self._strict or schema["uniqueItems"] is not True:  # for the library to refuse
            return False
        self.is_relaxed = True
        return True
