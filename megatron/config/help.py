"""The text of ``--help``: every flag by group, with what it takes and its default."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.config.flags import FlagSpec, flags_of, one_of

_COLUMN = 34


def format_help(
    groups: Sequence[type], *, prog: str, about: str = "", defaults: Mapping[str, Any] | None = None
) -> str:
    """Usage and all flags, as wide as the terminal; 80 columns where there is none.

    ``about``: what the command does, in paragraphs. ``defaults``: the command's own by field, see ``parse_run``.
    """
    width = max(shutil.get_terminal_size().columns, 60)
    lines = [f"usage: {prog} --flag value ... [@FILE]"]
    for paragraph in filter(None, about.split("\n\n")):
        lines += ["", *textwrap.wrap(" ".join(paragraph.replace("``", "").split()), width, break_on_hyphens=False)]
    lines += ["", "@FILE holds flags as on a command line, over any number of lines, with # comments."]
    for group in filter(flags_of, groups):
        name = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", group.__name__.removesuffix("Config")).lower()
        title = (group.__doc__ or "").strip().splitlines()[0].replace("``", "")
        lines += ["", f"{name}: {title}"]
        for spec in flags_of(group):
            if not spec.options.internal:
                lines += _entry(spec, width, defaults or {})
    return "\n".join(lines) + "\n"


def _entry(spec: FlagSpec, width: int, defaults: Mapping[str, Any]) -> list[str]:
    head = f"  {usage(spec)}"
    choices = f"One of {one_of(spec.choices)}." if spec.choices and not _listed(spec) else ""
    text = " ".join(part for part in (spec.options.help, choices, default_text(spec, defaults)) if part)
    body = textwrap.wrap(text, width - _COLUMN, break_on_hyphens=False)
    short = [
        f"  {switch}".ljust(_COLUMN) + f"{spec.positive} {value}" for switch, value in spec.options.short_forms.items()
    ]
    if len(head) > _COLUMN - 2:
        return [head, *(" " * _COLUMN + line for line in body), *short]
    return [head.ljust(_COLUMN) + body[0], *(" " * _COLUMN + line for line in body[1:]), *short]


def usage(spec: FlagSpec) -> str:
    """The flag and what it takes: ``--lr NUMBER``."""
    if spec.is_switch:
        return spec.spelling
    if _listed(spec):
        value = "{" + ",".join(map(str, spec.choices)) + "}"
    else:
        value = {int: "N", float: "X", str: "TEXT"}[spec.kind]
    if spec.is_list:
        value = " ".join([value] * spec.count) if spec.count else f"{value} ..."
    return f"{spec.spelling} {value}"


def _listed(spec: FlagSpec) -> bool:
    """Whether the choices are listed after the flag; long lists are part of the text."""
    return 0 < len("".join(map(str, spec.choices))) <= 60


def default_text(spec: FlagSpec, defaults: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The default in parentheses; empty where the help text gives it. ``defaults``: see ``format_help``."""
    if spec.field in defaults:
        return "(on by default)" if defaults[spec.field] is True else f"(default: {defaults[spec.field]})"
    if defaults.get("use_checkpoint_args") and (spec.options.architecture or spec.options.from_checkpoint):
        return "(default: the checkpoint's)"
    if spec.required:
        return "(required)"
    if spec.options.derived:
        return f"(default: {spec.options.derived})"
    if spec.is_switch or spec.default is None or spec.default == ():
        return ""
    values = spec.default if isinstance(spec.default, tuple) else (spec.default,)
    return f"(default: {' '.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)})"
