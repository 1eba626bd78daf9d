"""Errors name the flag that the user typed, also where it is an older spelling or a fork's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.config.flags import FlagSpec, words
from megatron.config.run import RunConfig
from megatron.errors import MegatronError


def typed_spelling(run: RunConfig, spec: FlagSpec) -> str | None:
    """The flag of Megatron-LM or of a fork that set the field, or None."""
    source = run.provenance.get(spec.field, "")
    return source if source.startswith("--") else None


def as_typed(run: RunConfig, message: str) -> str:
    """The message with ``--rope-theta (here --rotary-base)`` where a line names a flag that was typed so."""
    for spec in run.flags():
        if typed := typed_spelling(run, spec):
            text = re.escape(words(run.value(spec)))
            flag = re.compile(rf"(?<![\w-]){spec.positive}(?![\w-])( {text}(?![\w.]))?")
            lines = (
                line if typed in line else flag.sub(lambda found: f"{typed} (here {found[0]})", line, count=1)
                for line in message.splitlines()
            )
            message = "\n".join(lines)
    return message


@contextmanager
def errors_as_typed(run: RunConfig) -> Iterator[None]:
    """Make errors raised in the block name flags as they were typed."""
    try:
        yield
    except MegatronError as error:
        error.args = (as_typed(run, str(error)),)
        raise
