"""The reference of all flags, written from the groups by ``python -m tests.golden.regenerate_flags``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.config.command import CommandConfig
from megatron.config.flags import FlagSpec, flags_of, group_name
from megatron.config.help import default_text, usage
from megatron.config.legacy_flags import LEGACY_FLAGS
from megatron.config.run import CORE_GROUPS
from megatron.core.models.registry import FAMILIES
from tasks.settings import HarnessConfig, TaskConfig

REFERENCE, SNAPSHOT = "docs/flags.md", "tests/golden/flags.txt"
_OF_FAMILIES = dict.fromkeys(group for family in FAMILIES.values() for group in family.groups if flags_of(group))
_GROUPS = (*CORE_GROUPS, *_OF_FAMILIES, TaskConfig, HarnessConfig, CommandConfig)

_INTRODUCTION = """# Flags

Written by `python -m tests.golden.regenerate_flags` from the groups in `megatron/config`; do not edit.

A value comes from, in this order: the flag; `@FILE` (words as on a command line, with `#` comments) or
`--config FILE` (YAML or JSON, flat or nested by group); the checkpoint, with `--use-checkpoint-args` (fields marked
*checkpoint*); the default. The start of a run and `--dry-run` print each value that is not a default with its source.
In files a setting is named like its field: `tensor_model_parallel_size: 2`. A switch `--x` that a file turns on is
turned off by `--no-x`.
"""


def reference() -> str:
    """The whole document, in Markdown."""
    lines = [_INTRODUCTION]
    for group in _GROUPS:
        lines += [f"## {group_name(group)}", "", (group.__doc__ or "").strip().splitlines()[0], ""]
        lines += ["| flag | meaning | default |", "|---|---|---|", *map(_row, _flags(group)), ""]
    lines += ["## Flags of Megatron-LM that are no settings here", ""]
    lines += ["| flags | what becomes of them | |", "|---|---|---|", *_legacy_rows(), ""]
    return "\n".join(lines)


def snapshot() -> str:
    """One line per flag, for reviewing changes of the command line as a diff."""
    lines = []
    for group in _GROUPS:
        for spec in _flags(group):
            spellings = " ".join(spec.spellings())
            lines.append(f"{group_name(group)}.{spec.field}: {spellings} | {spec.noun} | {_default(spec)}")
    return "\n".join(lines) + "\n"


def _flags(group: type) -> Iterator[FlagSpec]:
    return (spec for spec in flags_of(group) if not spec.options.internal)


def _row(spec: FlagSpec) -> str:
    names = [usage(spec), *spec.options.aliases]
    notes = [spec.options.help]
    notes += [
        f"`{old}` means `{name}`{f': {why}' if why else ''}."
        for old, (name, why) in spec.options.renamed_values.items()
    ]
    notes += [f"`{value}`: {why}." for value, why in spec.options.refused_values.items()]
    notes += [
        f"`{switch}` is short for `{spec.positive} {value}`." for switch, value in spec.options.short_forms.items()
    ]
    notes += ["*checkpoint*"] * (spec.options.architecture or spec.options.from_checkpoint)
    return f"| {', '.join(f'`{name}`' for name in names)} | {' '.join(notes)} | {_default(spec)} |"


def _default(spec: FlagSpec) -> str:
    return default_text(spec).removeprefix("(").removesuffix(")").removeprefix("default: ") or "-"


def _legacy_rows() -> Iterator[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for spelling, legacy in LEGACY_FLAGS.items():
        word = legacy.word
        for value, meaning in {"": legacy, **legacy.values}.items():
            if meaning.sets:
                taken = ", ".join(f"`{name}`" + (f" = `{to}`" if to else "") for name, to in meaning.sets.items())
                given = f"{value} ".lstrip().replace("|", "&#124;")
                word = f"{given}taken as {taken}{f'; {word}' if word else ''}"
        rows.setdefault((legacy.verdict, word), []).append(f"`{spelling}`")
    return (f"| {', '.join(spellings)} | {verdict} | {word} |" for (verdict, word), spellings in rows.items())


def write(root: Path) -> None:
    """Write the document and the snapshot under the repository's root."""
    for name, text in ((REFERENCE, reference()), (SNAPSHOT, snapshot())):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path.cwd())
