"""The flag mechanism by itself: what a field becomes, what it converts, and what it refuses."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, field, replace
from inspect import signature
from typing import Any, Literal

import pytest

from megatron.config.flags import FlagSpec, Settings, flag, flags_of, one_of
from megatron.config.parse import parse_groups
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error


class ToolConfig(Settings):
    """A tool's flags, one of every kind."""

    size: int = flag("SI units.", at_least=1)
    rate: float = flag("A rate.", default=0.5, above=0, below=1)
    word: str | None = flag("A word.", default=None, aliases=("--wort",))
    kind: Literal["red", "green"] = flag(
        "A kind.",
        default="red",
        renamed_values={"rouge": ("red", "French")},
        refused_values={"blue": "it is sold out"},
    )
    level: Literal[0, 1] = flag("A level.", default=0)
    many: tuple[int, ...] = flag("Many numbers.", default=())
    three: tuple[int, int, int] | None = flag("Three numbers.", default=None, at_least=0)
    switch: bool = flag("A switch.", default=False)
    shine: bool = flag("Do not shine.", default=True, off="--dull")
    odd_name: int = flag("A flag with an own spelling.", default=1, name="--odd_name", aliases=("--odd-name",))
    found: int | None = flag("Resolved, not given.", default=None, internal=True)


def parsed(*argv: str) -> ToolConfig:
    (tool,) = parse_groups(["--size", "3", *argv], ToolConfig, prog="tool")
    assert isinstance(tool, ToolConfig)
    return tool


def specs() -> dict[str, FlagSpec]:
    return {spec.field: spec for spec in flags_of(ToolConfig)}


@pytest.mark.parametrize(
    ("argv", "field_name", "value"),
    [
        (["--size", "4"], "size", 4),
        (["--size=5"], "size", 5),
        (["--rate", "1e-3"], "rate", 1e-3),
        (["--word", "two words"], "word", "two words"),
        (["--wort", "x"], "word", "x"),
        (["--word", "-1"], "word", "-1"),
        (["--word="], "word", ""),
        (["--kind", "green"], "kind", "green"),
        (["--kind", "rouge"], "kind", "red"),
        (["--level", "1"], "level", 1),
        (["--many", "1", "-2", "3"], "many", (1, -2, 3)),
        (["--three", "1", "2", "3"], "three", (1, 2, 3)),
        (["--switch"], "switch", True),
        (["--switch", "--no-switch"], "switch", False),
        (["--dull"], "shine", False),
        (["--dull", "--shine"], "shine", True),
        (["--odd_name", "2"], "odd_name", 2),
        (["--odd-name", "2"], "odd_name", 2),
        (["--size", "1", "--size", "2"], "size", 2),
    ],
)
def test_values(argv: list[str], field_name: str, value: object) -> None:
    """Every kind of field takes its spelling and converts what follows."""
    assert getattr(parsed(*argv), field_name) == value


def test_defaults() -> None:
    """What is not given keeps its default."""
    assert parsed() == ToolConfig(size=3)


@pytest.mark.parametrize(
    "argv",
    [
        ["--size", "x"],
        ["--size", "1.5"],
        ["--size"],
        ["--size", "1", "2"],
        ["--size", "0"],
        ["--rate", "0"],
        ["--rate", "1"],
        ["--rate", "nan"],
        ["--rate", "inf"],
        ["--kind", "gren"],
        ["--kind", "blue"],
        ["--level", "2"],
        ["--three", "1", "2"],
        ["--three", "1", "-2", "3"],
        ["--many"],
        ["--switch", "on"],
        ["--swich"],
        ["--siz", "3"],
        ["--zzz"],
        ["--found", "3"],
        ["--switch", "--", "x"],
    ],
)
def test_refusals(argv: list[str]) -> None:
    """A wrong value is one sentence with the value, the flag, and what would do; nothing is abbreviated."""
    with expect_error(ConfigError) as caught:
        parsed(*argv)
    assert caught.value.exit_code == 2


def test_all_at_once() -> None:
    """A user who made three mistakes hears of three."""
    with expect_error(ConfigError, "4", "'stray'", "--level"):
        parse_groups(["stray", "--rate", "2", "--level", "x"], ToolConfig, prog="tool")


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names the group, each flag with what it takes and its default, and leaves with code 0."""
    with pytest.raises(SystemExit) as caught:
        parse_groups(["--size", "x", "--help"], ToolConfig, prog="tool", about="Does things.")
    assert caught.value.code in (0, None)
    text = capsys.readouterr().out
    assert text.startswith("usage: tool --flag value ... [@FILE]\n\nDoes things.\n")
    assert "\ntool: A tool's flags, one of every kind.\n" in text
    for line in (
        "  --size N                        SI units. (required)",
        "  --rate X                        A rate. (default: 0.5)",
        "  --kind {red,green}              A kind. (default: red)",
        "  --many N ...                    Many numbers.",
        "  --three N N N                   Three numbers.",
        "  --switch                        A switch.",
        "  --dull                          Do not shine.",
    ):
        assert line in text.splitlines()
    assert "--found" not in text


def test_field_without_help_is_refused_at_import() -> None:
    """Nobody adds a setting without saying what it does."""
    with pytest.raises(TypeError, match=r"Bare\.x needs flag"):

        class Bare(Settings):
            x: int = 1

    with pytest.raises(TypeError, match=r"Blank\.x needs flag"):

        class Blank(Settings):
            x: int = flag(" ", default=1)


def test_boolean_that_is_on_names_what_turns_it_off() -> None:
    """A switch that is on by default would otherwise be no switch at all."""
    with pytest.raises(TypeError, match=r"On\.x is on by default"):

        class On(Settings):
            x: bool = flag("Something.", default=True)


class WortConfig(Settings):
    """A group whose flag is called what a flag of another group is also called."""

    wort: bool = flag("A switch of that name.", default=False)


def test_no_two_flags_have_one_name() -> None:
    """``--keep-last 3`` kept three checkpoints in training and was a switch about batches in tasks."""
    with pytest.raises(AssertionError, match="two fields claim --wort"):
        parse_groups(["--size", "3"], ToolConfig, WortConfig, prog="tool")


def test_types_without_a_spelling_are_refused_at_import() -> None:
    """A field that no word on a command line can mean is a programming error."""
    with pytest.raises(TypeError, match="cannot be of type"):

        class Strange(Settings):
            x: dict[str, int] = flag("A mapping.", default=None)


def test_fields_of_ordinary_dataclasses_are_no_flags() -> None:
    """dataclasses.field in place of flag() is noticed, too."""
    with pytest.raises(TypeError, match="needs flag"):

        class Plain(Settings):
            x: list[int] = field(default_factory=list)


@pytest.mark.parametrize(("values", "text"), [(["a"], "a"), (["a", "b"], "a or b"), ([1, 2, 3], "1, 2 or 3")])
def test_one_of(values: list[Any], text: str) -> None:
    """Lists in messages read like sentences."""
    assert one_of(values) == text


def test_stand_ins_are_within_bounds() -> None:
    """Other rules run on with a stand-in, which must not fail by itself."""
    for spec in specs().values():
        assert spec.out_of_bounds(spec.placeholder()) is None


def test_settings_are_frozen_dataclasses() -> None:
    """Their methods are inherited, not made for each group; users of dataclasses find what they know."""
    tool = ToolConfig(size=2)
    assert tool == ToolConfig(size=2) != ToolConfig(size=3)
    assert hash(tool) == hash(ToolConfig(size=2))
    assert tool != WortConfig(), "another group with other fields"
    assert replace(tool, size=3) == ToolConfig(size=3)
    assert repr(tool).startswith("ToolConfig(size=2, ")
    size = signature(ToolConfig).parameters["size"]
    assert (size.kind, size.annotation, size.default) == (size.KEYWORD_ONLY, "int", size.empty)
    with pytest.raises(FrozenInstanceError, match="size"):
        tool.size = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="size"):
        del tool.size
    mistaken: list[tuple[dict[str, Any], str]] = [({}, "needs size"), ({"size": 2, "sise": 3}, "has no sise")]
    for arguments, words in mistaken:
        with pytest.raises(TypeError, match=rf"ToolConfig\(\) {words}"):
            ToolConfig(**arguments)
