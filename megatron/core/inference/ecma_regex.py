r"""Regular expressions as JSON Schema writes them (ECMA-262), in the syntax of the library that follows them (Rust's).

Both look alike, and differ in what they match: Rust's ``\d`` takes any digit of Unicode, ``.`` a carriage return, and
``[a&&b]`` is an intersection.
"""

from __future__ import annotations

import re

from megatron.errors import ConfigError

_DIGIT, _WORD = "0-9", "0-9A-Za-z_"
_SPACE = r"\t-\r\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_NOT_LINE_END, _ANY, _NONE = r"[^\n\r\x{2028}\x{2029}]", r"[\x{0}-\x{10FFFF}]", r"[^\x{0}-\x{10FFFF}]"
_DOT_TAKES_ALL = re.compile(r"\(\?[a-z]*s")  # an inline flag, which ECMA doesn't have and Rust does
_TOKEN = re.compile(r"\\c[A-Za-z]|\\0(?![0-9])|\\.|\[\^?\]|\[\^?|.", re.DOTALL)


def rust_pattern(pattern: str) -> str:
    """``pattern`` of ECMA-262 as Rust's syntax has it; what neither knows stays, for the library to refuse.

    Raises ConfigError for a backslash at the end, which the library would leave out.
    """
    dot = "." if _DOT_TAKES_ALL.search(pattern) else _NOT_LINE_END
    written, place = list[str](), 0
    while place < len(pattern):
        token = _token(pattern, place)
        place += len(token)
        if token == "\\":
            raise ConfigError(
                r"a regular expression ends with a single backslash, which escapes nothing: \\ is a backslash"
            )
        if token in ("[]", "[^]"):
            written.append(_NONE if token == "[]" else _ANY)
        elif token in ("[", "[^"):
            place, inside = _class(pattern, place)
            written.append(f"{token}{inside}")
        elif token == ".":
            written.append(dot)
        else:
            written.append(_escape(token, is_in_class=False))
    return "".join(written)


def _token(pattern: str, place: int) -> str:
    found = _TOKEN.match(pattern, place)
    assert found is not None, "any character is a token"
    return found.group()


def _class(pattern: str, place: int) -> tuple[int, str]:
    """The rest of a character class from ``place`` on: where it ends, and Rust's syntax of it."""
    written, may_begin, must_end = list[str](), False, False  # a range, with the character before and the next one
    while place < len(pattern):
        token = _token(pattern, place)
        if token.startswith("["):  # a bracket is a character there
            token = "["
        place += len(token)
        if token == "]":
            written.append("]")
            break
        if token == "-" and may_begin and pattern[place : place + 1] != "]":
            written.append("-")
            may_begin, must_end = False, True
            continue
        written.append(_escape(token, is_in_class=True))
        is_class = token[:1] == "\\" and token[1:].lower() in _CLASSES
        may_begin, must_end = not (must_end or is_class), False
    return place, "".join(written)


def _escape(token: str, *, is_in_class: bool) -> str:
    name = token[1:2] if token.startswith("\\") else ""
    if name.lower() in _CLASSES:
        return f"[{'^' if name.isupper() else ''}{_CLASSES[name.lower()]}]"
    if name == "\\":
        return r"\x{5C}"  # which no other reader takes for the beginning of an escape
    if token == "\\0":
        return r"\x{0}"
    if name == "c" and len(token) == 3:
        return rf"\x{{{ord(token[2]) % 32:X}}}"
    if is_in_class:
        if token == "\\b":
            return r"\x{8}"
        if token in "[&~-":  # the library's operators
            return f"\\{token}"
    return token
