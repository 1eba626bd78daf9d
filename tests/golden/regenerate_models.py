"""The page of published models that convert, written by ``python -m tests.golden.regenerate_models``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from megatron.core.conversion.huggingface.listing import PublishedType, published_types
from megatron.core.conversion.huggingface.nearest import REASONS

PAGE = "docs/published_models.md"
_INTRODUCTION = """# Published models

Written by `python -m tests.golden.regenerate_models` from the tables of types; do not edit.
`python tools/checkpoint/convert.py --list` prints the same types.

The type is `model_type` in a model's `config.json`. Models of these types convert from and to Hugging Face, with the
same bytes there and back. Any other model is refused, with the setting or tensor that is the reason.
[From Hugging Face, train on, and back](checkpoints.md#from-hugging-face-train-on-and-back) shows the steps around it.
"""


def page() -> str:
    """The whole document, in Markdown."""
    lines = [_INTRODUCTION]
    lines += ["Often asked for, and not available:", ""]
    for reason in dict.fromkeys(REASONS.values()):
        names = (f"`{name}`" for name, why in REASONS.items() if why == reason)
        lines.append(f"- {', '.join(names)}: {reason}.")
    lines.append("")
    for family, types in groupby(published_types(), lambda each: each.family):
        lines += [*_section(family, list(types)), ""]
    return "\n".join(lines)


def _section(family: str, types: list[PublishedType]) -> Iterator[str]:
    yield f"## {family}"
    yield ""
    yield "| `model_type` | class in transformers | what converts | only with |"
    yield "|---|---|---|---|"
    for each in types:
        classes, only = (", ".join(f"`{word}`" for word in words) for words in (each.classes, each.only))
        yield f"| `{each.model_type}` | {classes} | {each.converts} | {only} |"
    yield from ("", "```bash")
    for each in types:
        load = each.example or f"models/{each.model_type}"
        yield f"python tools/checkpoint/convert.py --from hf --load {load} --to megatron --save runs/{each.model_type}"
    yield "```"


def write(root: Path) -> None:
    """Write the document under the repository's root."""
    (root / PAGE).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write(Path.cwd())
