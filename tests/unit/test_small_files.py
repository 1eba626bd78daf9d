"""Files of settings that are too large, too deep or of other types: each comes to one sentence, at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
    wrong: tuple[dict[str, Any], ...] = (
        {"layers": "abc"},
        {"layers": True},
        {"layers": 1e9},
        {"layers": 100},
        {"name": None},
        {"seed": [1]},
        {"share": float("nan")},
        {"kind": "c"},
        {"words": ["a", 1]},
        {"files": {"f": {"size": -0.5}}},
        {"files": {"f": {}}},
        {"layer": 1},
    )
    for change in wrong:
        with expect_error(ConfigError, "x"):
            as_kind({**WHOLE, **change}, Outer, where="x", error=ConfigError)
    with expect_error(ConfigError, "1"):
        as_kind([1], Outer, where="x", error=ConfigError)
    check_kinds({"a": None, "c": "anything"}, {"a": int, "b": int}, where="x", error=ConfigError)
    with expect_error(ConfigError, '"1"'):
        check_kinds({"a": "1"}, {"a": int}, where="x", error=ConfigError)


def test_hostile_json_ends_at_once(tmp_path: Path) -> None:
    """Nested 100,000 deep it was a RecursionError; 4,301 digits were a sentence about Python's interpreter."""
    for text in (
        "[" * 100_000,
        "[" * 101 + "]" * 101,
        '{"a":' * 500 + "1" + "}" * 500,
        '{"a": ' + "9" * 4301 + "}",
        '{"a": 1, "a": 2}',
        "{,}",
        "",
    ):
        with expect_error(ConfigError, "x"):
            parse_json(text, where="x", error=ConfigError)
    assert parse_json("[" * 100 + "]" * 100, where="x", error=ConfigError)
    with expect_error(ConfigError):
        parse_json(b'"\xff"', where="x", error=ConfigError)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)
    with expect_error(ConfigError, "large.json", "16", "MiB"):
        read_json(tmp_path / "large.json", error=ConfigError)


def test_hostile_yaml_ends_at_once() -> None:
    """A few lines of aliases stand for more values than fit into memory; 010 is eight and 1:30 ninety to YAML."""
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))
    for text in (
        bomb,
        "a: &a {b: 1}\nc:\n  <<: *a\n",
        "[" * 100_000,
        "a: 1\nb: 2\na: 3\n",
        "a: 010",
        "a: 1:30",
        "a: 2024-01-01",
        "a: " + "9" * 4301,
        "a: !!python/object/apply:os.system ['true']",
        "a: [",
        'a: !!float "_"',
        'a: !!bool "x"',
        'a: !!int ""',
        'a: !!timestamp "x"',
        "? [a, {}]\n: 1",
    ):
        with expect_error(ConfigError, "x"):
            parse_yaml(text, where="x", error=ConfigError)
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
