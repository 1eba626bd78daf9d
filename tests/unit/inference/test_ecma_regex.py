"""Patterns mean what ECMA-262 says: readers of the answers check them by it."""

from __future__ import annotations

import json
import re

import pytest

from megatron.core.inference.constrained import Constraint, ConstraintCompiler, Vocabulary
from megatron.core.inference.ecma_regex import rust_pattern
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.harness.serving import byte_tokenizer

pytest.importorskip("llguidance", reason="the extra constrained is not installed")

TOKENIZER = byte_tokenizer()
CHARACTERS = "05٣५aåÅZ_é \t\n\r\v\u00a0\u2028\u3000\ufeff\u0085-&[]\\d.|~^\x01\b\x00/+,"


def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(Vocabulary.of(TOKENIZER, [TOKENIZER.eod]))


def taken(constraint: Constraint, text: str) -> bool:
    """Whether a text is an answer, to its end."""
    bits, end = constraint.begin().allowed(tuple(TOKENIZER.tokenize_parts([text])[0])), TOKENIZER.eod
    return bits is not None and bool(bits[end // 32] >> (end % 32) & 1)


# In Python's syntax, what ECMA's means there: both have the same words for most of it.
SAME_IN_PYTHON = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"[\d]": "[0-9]",
    r"[^\d]": "[^0-9]",
    r"[\w.-]": "[0-9A-Za-z_.-]",
    r"[\w-.]": "[0-9A-Za-z_.-]",
    r"[\D]": "[^0-9]",
    r"[a\D]": "[^0-9]",
    r"[^\w\s]": "[^0-9A-Za-z_\\t-\\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
    r"\s": "[\\t-\\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
    r"\\d": r"\\d",
    r"\\": r"\\",
    r"[\\d]": r"[\\d]",
    r"\\\d": r"\\[0-9]",
    r".": "[^\n\r\u2028\u2029]",
    r"[.]": r"\.",
    r"\.": r"\.",
    r"[a&&Z]": "[a&Z]",
    r"[a~~Z]": "[a~Z]",
    r"[[a]": r"[\[a]",
    r"[[]": r"\[",
    r"[\]a]": r"[\]a]",
    r"[+--]": "[+,-]",
    r"[--/]": "[-./]",
    r"[a-]": "[a-]",
    r"[-a]": "[-a]",
    r"[^]": r"[\s\S]",
    r"\cA": "\x01",
    r"[\b]": "\b",
    r"\0": "\x00",
    r"\/": "/",
    r"[\/]": "/",
    r"\x41|\u005F": "A|_",
    r"(\d)|(?:\w)": "[0-9A-Za-z_]",
    r"[0-9]{1,2}": "[0-9]{1,2}",
}


@pytest.mark.parametrize("pattern", SAME_IN_PYTHON)
def test_a_pattern_takes_what_ecma_says(pattern: str) -> None:
    r"""``\d`` took any digit of Unicode, ``[a&&Z]`` nothing, and ``[[]`` was refused."""
    compile_for, expected = compiler(), re.compile(SAME_IN_PYTHON[pattern])
    plain, schema = compile_for.regex(pattern), compile_for.json_schema({"type": "string", "pattern": f"^({pattern})$"})
    names = compile_for.json_schema(
        {
            "type": "object",
            "patternProperties": {f"^({pattern})$": {"const": 1}},
            "additionalProperties": False,
            "minProperties": 1,
        }
    )
    for text in (*CHARACTERS, "\\d", "\\5", "05"):
        is_right = expected.fullmatch(text) is not None
        assert taken(plain, text) == is_right, text
        assert taken(schema, json.dumps(text, ensure_ascii=False)) == is_right, text
        assert taken(names, json.dumps({text: 1}, ensure_ascii=False)) == is_right, text


def test_a_readers_check_takes_the_answers() -> None:
    """This one's dot takes a carriage return, which ECMA's doesn't."""
    validator = pytest.importorskip("jsonschema_rs", reason="it checks answers: pip install -e '.[dev-all]'")
    for pattern in SAME_IN_PYTHON:
        schema = {"type": "string", "pattern": f"^({pattern})$"}
        try:
            found = [each for each in CHARACTERS if validator.is_valid(schema, each)]
        except validator.ValidationError:  # a pattern that this reader can't read
            continue
        constraint = compiler().json_schema(schema)
        mine = [each for each in CHARACTERS if taken(constraint, json.dumps(each, ensure_ascii=False))]
        assert set(mine) <= set(found), pattern


def test_what_is_no_class_stays() -> None:
    for pattern in ("a|b", "(?i)a{2,3}?", "^[a-c]{1,4}-[0-9]{2}$", r"\p{L}\P{L}", r"(?<name>x)", "é", "a(b", "(?s)."):
        assert rust_pattern(pattern) == pattern


@pytest.mark.parametrize("pattern", ["\\", "a\\", r"\\" + "\\"])
def test_a_backslash_at_the_end_is_refused(pattern: str) -> None:
    """The library left it out: the pattern of a backslash alone was answered by an empty text."""
    with expect_error(ConfigError):
        compiler().regex(pattern)
    with expect_error(ConfigError):
        compiler().json_schema({"type": "string", "pattern": pattern})
