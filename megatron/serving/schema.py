"""Checks a JSON value against the part of JSON Schema that /openapi.json uses, so that the two cannot differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from json import dumps
from typing import Any

from megatron.config.suggestions import did_you_mean
from megatron.errors import enumeration
from megatron.serving.errors import ApiError
from megatron.small_files import shown

Schema = Mapping[str, Any]
_FEW, _SHORT = 8, 60  # items and characters of a list that a message shows

_NOUNS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_IS: dict[str, Callable[[Any], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": lambda value: _is_number(value),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def checked(value: Any, schema: Schema, name: str) -> Any:
    """``value`` with whole numbers as int; raises ApiError, whose ``param`` is the beginning of ``name``.

    As JSON Schema says, 1.0 is a whole number; numbers are finite, true is none, and texts hold no unpaired surrogate.
    """
    if "anyOf" in schema:
        return _one_of(value, schema, name)
    kind = schema.get("type")
    if "enum" in schema:
        if not any(value == each and type(value) is type(each) for each in schema["enum"]):
            raise wrong(value, schema, name)
    elif kind is not None and not _IS[kind](value):
        raise wrong(value, schema, name, error=WrongTypeError)
    elif kind in ("integer", "number"):
        if _out_of_bounds(value, schema):
            raise wrong(value, schema, name)
        return int(value) if kind == "integer" else float(value)
    elif kind == "string":
        _check_text(value, schema, name)
    elif kind == "array":
        listed = value[: schema.get("maxItems")]  # more are refused, and not looked at
        if not _are_integers(listed, schema["items"]):
            listed = [checked(each, schema["items"], f"{name}[{number}]") for number, each in enumerate(listed)]
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            raise wrong(value, schema, name)
        return listed
    elif kind == "object":
        return _checked_object(value, schema, name)
    return value


class WrongTypeError(ApiError):
    """A value of another type than its schema's."""


def wrong(value: Any, schema: Schema, name: str, *, error: type[ApiError] = ApiError) -> ApiError:
    """The refusal of a value, which says what it is and what would work."""
    what = schema.get("x-refusal") or f"it must be {words(schema)}"
    short = isinstance(value, list) and len(json := dumps(value[:_FEW])) <= _SHORT and len(value) <= _FEW
    return error(f"{name} is {json if short else shown(value)}; {what}", param=_field_of(name))


def words(schema: Schema) -> str:
    """What a schema allows, in words."""
    if "title" in schema:
        return str(schema["title"])
    if "anyOf" in schema:
        return enumeration((words(each) for each in schema["anyOf"] if each.get("type") != "null"), "or")
    if "enum" in schema:
        return enumeration(map(shown, schema["enum"]), "or")
    said = _NOUNS[schema["type"]]
    if "minimum" in schema or "exclusiveMinimum" in schema:
        said += f" above {schema['exclusiveMinimum']:,}" if "exclusiveMinimum" in schema else ""
        said += f" from {schema['minimum']:,}" if "minimum" in schema else ""
        said += f" to {schema['maximum']:,}" if "maximum" in schema else " on"
    if schema["type"] == "array":
        most = f" of {schema.get('minItems', 0)} to {schema['maxItems']:,} items" if "maxItems" in schema else ""
        said += f"{most}, each {words(schema['items'])}"
    if "maxLength" in schema:
        said += f" of {schema.get('minLength', 0)} to {schema['maxLength']:,} characters"
    elif schema.get("minLength"):
        said += " that is not empty"
    return said


def _field_of(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_integers(values: list[Any], schema: Schema) -> bool:
    """Whether all ``values`` fit a schema of whole numbers, without a step in Python for each: there may be many."""
    if schema.get("type") != "integer" or set(map(type, values)) != {int}:
        return False
    return not _out_of_bounds(min(values), schema) and not _out_of_bounds(max(values), schema)


def _out_of_bounds(value: float, schema: Schema) -> bool:
    least, above, most = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    return (
        (least is not None and value < least)
        or (above is not None and value <= above)
        or (most is not None and value > most)
    )


def _check_text(value: str, schema: Schema, name: str) -> None:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
        raise wrong(value, schema, name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = rf"\u{ord(value[error.start]):04x}"
        raise ApiError(
            f"{name} holds {half}, an unpaired surrogate, which is no character", param=_field_of(name)
        ) from None


def _checked_object(value: dict[str, Any], schema: Schema, name: str) -> dict[str, Any]:
    if len(value) > schema.get("maxProperties", math.inf):
        raise ApiError(
            f"{name} has {len(value):,} entries; it can have at most {schema['maxProperties']:,}", param=_field_of(name)
        )
    known: Schema = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    required = schema.get("required", ())
    found = {}
    for key, each in value.items():
        place = f"{name}.{key[:60]}"
        _check_text(key, {}, f"{name}.{shown(key)}")
        if key not in known and others is False:
            raise ApiError(
                f"{name} has {shown(key)}{did_you_mean(key, known)}, and can have only {', '.join(known)}",
                param=_field_of(name),
            )
        if each is None and key in known and key not in required:  # as good as absent
            continue
        part = known.get(key, others)
        found[key] = each if part is True else checked(each, part, place)
    for key in required:
        if key not in found:
            raise ApiError(
                f"{name} has no {key}; it must have {' and '.join(schema['required'])}", param=_field_of(name)
            )
    return found


def _one_of(value: Any, schema: Schema, name: str) -> Any:
    """``value`` as the first schema that it fits; else the error of the only one whose types it has, down to the place
    of the error.
    """
    errors = []
    for each in schema["anyOf"]:
        try:
            return checked(value, each, name)
        except ApiError as error:
            if _IS[each["type"]](value):
                errors.append(error)
    fitting = [error for error in errors if not isinstance(error, WrongTypeError)] if len(errors) > 1 else errors
    raise fitting[0] if len(fitting) == 1 else wrong(value, schema, name, error=WrongTypeError)
