"""Files of settings that are too large, too deep or of other types: each comes to one sentence, at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from megatron.core.checkpointing.torch_files import load_torch_file
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.small_files import Between, as_kind, check_kinds, parse_json, parse_yaml, read_json
from tests.harness.sentences import expect_error


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    files: Mapping[str, Inner]
    share: float = 0.5
    layers: Annotated[int, Between(1, 99)] = 1
    kind: Literal["a", "b"] = "a"
    words: tuple[str, ...] = ()
    seed: int | None = None


WHOLE = {"name": "x", "files": {"f": {"size": 3}}, "share": 1, "words": ["w"], "seed": None}


def test_dataclasses_come_out() -> None:
    """A whole number is a number, lists become tuples where a field is one, and null may be an optional field."""
    found = as_kind(WHOLE, Outer, where="x", error=ConfigError)
    assert found == Outer("x", {"f": Inner(3)}, share=1.0, words=("w",))
    assert isinstance(found.share, float)


def test_wrong_types_are_named_by_file_and_key() -> None:
    """``TypeError: unsupported operand`` was what a user saw of a text in place of a number."""
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "text": ({"layers": "abc"}, 'x: layers is "abc"; expected a whole number'),
        "truth": ({"layers": True}, "x: layers is true; expected a whole number"),
        "1e9": ({"layers": 1e9}, "x: layers is 1000000000.0; expected a whole number"),
        "bounds": ({"layers": 100}, "x: layers is 100; expected a whole number from 1 to 99"),
        "null": ({"name": None}, "x: name is null; expected a text"),
        "optional": ({"seed": [1]}, "x: seed is a list of 1; expected a whole number or null"),
        "nan": ({"share": float("nan")}, "x: share is NaN; expected a number"),
        "choice": ({"kind": "c"}, 'x: kind is "c"; expected "a" or "b"'),
        "element": ({"words": ["a", 1]}, "x: words[1] is 1; expected a text"),
        "nested": ({"files": {"f": {"size": -0.5}}}, "x: files.f.size is -0.5; expected a whole number"),
        "nested lacks": ({"files": {"f": {}}}, "x lacks files.f.size"),
        "unknown": ({"layer": 1}, "x has layer, which is none of files, kind, layers, name, seed, share, words"),
    }
    for change, message in wrong.values():
        with pytest.raises(ConfigError) as caught:
            as_kind({**WHOLE, **change}, Outer, where="x", error=ConfigError)
        assert str(caught.value) == message
    with expect_error(ConfigError, "1"):
        as_kind([1], Outer, where="x", error=ConfigError)
    check_kinds({"a": None, "c": "anything"}, {"a": int, "b": int}, where="x", error=ConfigError)
    with expect_error(ConfigError, '"1"'):
        check_kinds({"a": "1"}, {"a": int}, where="x", error=ConfigError)


def test_hostile_json_ends_at_once(tmp_path: Path) -> None:
    """Nested 100,000 deep it was a RecursionError; 4,301 digits were a sentence about Python's interpreter."""
    for text, message in {
        "[" * 100_000: "x is nested more than 100 levels deep",
        "[" * 101 + "]" * 101: "x is nested more than 100 levels deep",
        '{"a":' * 500 + "1" + "}" * 500: "x is nested more than 100 levels deep",
        '{"a": ' + "9" * 4301 + "}": "x has a number of 4,301 digits; at most 100 are read",
        '{"a": 1, "a": 2}': 'x has the key "a" twice',
        "{,}": "x:1 is not JSON: Expecting property name enclosed in double quotes",
        "": "x:1 is not JSON: Expecting value",
    }.items():
        with pytest.raises(ConfigError) as caught:
            parse_json(text, where="x", error=ConfigError)
        assert str(caught.value) == message
    assert parse_json("[" * 100 + "]" * 100, where="x", error=ConfigError)
    with pytest.raises(ConfigError, match="^x is not UTF-8 text$"):
        parse_json(b'"\xff"', where="x", error=ConfigError)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)
    with expect_error(ConfigError, "large.json", "16", "MiB"):
        read_json(tmp_path / "large.json", error=ConfigError)


def test_hostile_yaml_ends_at_once() -> None:
    """A few lines of aliases stand for more values than fit into memory; 010 is eight and 1:30 ninety to YAML."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))
    for text, message in {
        bomb: "x:2 has the alias *a0; write out its value",
        "a: &a {b: 1}\nc:\n  <<: *a\n": "x:3 has the alias *a; write out its value",
        "[" * 100_000: "x is nested more than 100 levels deep",
        "a: 1\nb: 2\na: 3\n": 'x:3 has the key "a" twice',
        "a: 010": "x:1 has 010, which YAML reads in another base; write the number in decimals",
        "a: 1:30": "x:1 has 1:30, which YAML reads in another base; write the number in decimals",
        "a: 2024-01-01": "x:1 has 2024-01-01, which YAML reads as a date; put it in quotes",
        "a: " + "9" * 4301: "x:1 has a number of 4,301 digits; at most 100 are read",
        "a: !!python/object/apply:os.system ['true']": (
            "x:1 is not YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object/apply:os.system'"
        ),
        "a: [": "x:1 is not YAML: expected the node content, but found '<stream end>'",
        'a: !!float "_"': "x is not YAML: string index out of range",
        'a: !!bool "x"': "x is not YAML: 'x'",
        'a: !!int ""': "x is not YAML: string index out of range",
        'a: !!timestamp "x"': "x:1 has x, which YAML reads as a date; put it in quotes",
        "? [a, {}]\n: 1": "x:1 is not YAML: found unhashable key",
    }.items():
        with pytest.raises(ConfigError) as caught:
            parse_yaml(text, where="x", error=ConfigError)
        assert str(caught.value) == message
    assert parse_yaml("a: 1\nb: [x, 1.5, -3, 0, 0.5]\nc: {d: yes}\n", where="x", error=ConfigError) == {
        "a": 1,
        "b": ["x", 1.5, -3, 0, 0.5],
        "c": {"d": True},
    }
    assert parse_yaml("", where="x", error=ConfigError) is None


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """A named pipe as a model's config.json, weights or tracker made the command wait for ever."""
    os.mkfifo(tmp_path / "config.json")
    with expect_error(DataError, "config.json"):
        read_json(tmp_path / "config.json", error=DataError)
    with expect_error(CheckpointError):
        load_torch_file(tmp_path / "config.json")
