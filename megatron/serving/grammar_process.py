"""The process in which schemas and grammars are compiled first: the library for it ends a process whose stack is full.

What has been compiled here needs no more stack than a small part of the engine's threads have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megatron.core.inference.constrained import Constraint, ConstraintCompiler, Vocabulary
from megatron.serving.bounded_process import answer_lines

STACK_OF_ENGINE = 1 << 26
"""Bytes of stack for threads that compile or follow what has been compiled here."""

_MOST_MEMORY = 2 << 30
_STACK = STACK_OF_ENGINE >> 4


def sent(vocabulary: Vocabulary) -> dict[str, Any]:
    """A vocabulary as the first line of the process."""
    return {
        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
        "end_ids": list(vocabulary.end_ids),
        "special_ids": list(vocabulary.special_ids),
        "bos": vocabulary.bos,
    }


def compiler_of(line: dict[str, Any]) -> ConstraintCompiler:
    """The compiler for a vocabulary that was ``sent``."""
    tokens = [token.encode("latin-1") for token in line.pop("tokens")]
    return ConstraintCompiler(Vocabulary(tokens=tokens, **line))


def start(line: Any) -> Callable[[Any], dict[str, Any]]:
    """What answers questions for a vocabulary; raises ConfigError without the library."""
    compiler = compiler_of(line)

    def answered(asked: Any) -> dict[str, Any]:
        found = list[Constraint | BaseException]()

        def compile_form() -> None:
            try:
                found.append(_compiled(compiler, asked["kind"], asked["form"], strict=asked["strict"]))
            except BaseException as error:  # for the thread that waits
                found.append(error)

        thread = start_with_stack(threading.Thread(target=compile_form), _STACK)
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return {"grammar": found[0].grammar, "relaxed": found[0].relaxed}

    return answered


def start_with_stack(thread: threading.Thread, size: int) -> threading.Thread:
    """Start a thread that has a stack of ``size`` bytes."""
    before = threading.stack_size(size)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _compiled(compiler: ConstraintCompiler, kind: str, form: Any, *, strict: bool) -> Constraint:
    match kind:
        case "json_object":
            return compiler.json_object()
        case "json_schema":
            return compiler.json_schema(form, strict=strict)
        case "regex":
            return compiler.regex(form)
        case "choice":
            return compiler.choice(form)
        case _:
            return compiler.grammar(form)


if __name__ == "__main__":
    answer_lines(start, most_memory=_MOST_MEMORY)
