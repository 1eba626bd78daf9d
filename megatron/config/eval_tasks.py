"""The tasks that a run is measured on while it trains, as ``--eval-tasks`` names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ZERO_SHOT = ("WIKITEXT103", "LAMBADA", "LM")
"""Names of the zero-shot tasks."""
OF_IMAGES = ("CAPTION", "VQA")
"""Names of the tasks about images."""


@dataclass(frozen=True)
class EvalTask:
    """A task and its file. ``label``: its name in logs and curves."""

    name: str
    file: str
    label: str


def eval_tasks_of(words: Sequence[str]) -> list[EvalTask]:
    """The tasks of ``NAME=FILE ...``. Raises ValueError, with a sentence, for another word and for a repeated one."""
    pairs = []
    for word in words:
        name, equals, file = word.partition("=")
        if name not in (*ZERO_SHOT, *OF_IMAGES):
            known = ", ".join((*ZERO_SHOT, *OF_IMAGES))
            raise ValueError(f"{name!r} is not a zero-shot task: choose from {known}")
        if not equals or not file:
            raise ValueError(f"{word!r} has no file: give {name}=FILE")
        pairs.append((name, file))
    if len(set(pairs)) < len(pairs):
        raise ValueError("a task is given twice with the same file: remove one of them")
    names = [name for name, _ in pairs]
    return [
        EvalTask(name, file, name if names.count(name) == 1 else f"{name} {file.rpartition('/')[2]}")
        for name, file in pairs
    ]
