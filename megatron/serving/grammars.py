"""Forms that requests give their texts (schemas, patterns, choices, grammars), checked before the engine sees them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.inference.constrained import Vocabulary
from megatron.serving.bounded_process import ProcessPool
from megatron.serving.errors import ApiError
from megatron.serving.grammar_process import sent
from megatron.serving.model import ServedModel

_KEPT = 256
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Form:
    """The form of a text: ``kind`` and ``source``, from the field ``param``. ``strict``: nothing of it is relaxed."""

    kind: str
    source: Any
    param: str
    strict: bool = False


@dataclass(frozen=True)
class Grammar:
    """A form that can be followed, as ``source`` in the library's own words. ``param``: the field that it comes from.

    ``relaxed``: keywords that it doesn't keep exactly.
    """

    source: str
    param: str
    relaxed: tuple[str, ...] = ()


def form_of(fields: Mapping[str, Any]) -> Form | None:
    """The form that a request gives its text; None for any. Raises ApiError for two."""
    form, other = fields["response_format"], fields["structured_outputs"]
    kinds = dict(other or {})
    if form is not None and form["type"] != "text":
        kinds[form["type"]] = form.get("json_schema")
    param = "response_format" if other is None else "structured_outputs"
    if other is not None and len(kinds) != 1:
        raise ApiError(f"the text can have one form, and {len(kinds)} are given: give one", param=param)
    match kinds:
        case {"json_schema": None}:
            raise ApiError("response_format of the type json_schema has no json_schema", param=param)
        case {"json_schema": {"schema": schema} as named}:
            return Form("json_schema", schema, param, strict=bool(named.get("strict")))
        case {"json": schema}:
            return Form("json_schema", schema, param)
    return next((Form(kind, source, param) for kind, source in kinds.items()), None)


@dataclass(eq=False)
class Grammars:
    """Makes grammars of forms in processes that have limits. The latest are kept, also what is wrong with them, unless
    it is the time that they took.
    """

    model: ServedModel
    seconds: float = 5.0
    _answers: OrderedDict[bytes, asyncio.Task[dict[str, Any]]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.pool = ProcessPool(
            "megatron.serving.grammar_process",
            "schema or grammar",
            seconds=self.seconds,
            first=lambda: sent(Vocabulary.of(self.model.tokenizer, self.model.end_ids)),
        )

    async def checked(self, form: Form) -> Grammar:
        """The grammar of a form. Raises ApiError for one that can't be followed, and when the processes are busy."""
        text = await asyncio.to_thread(json.dumps, [form.kind, form.source, form.strict])
        if len(text) > _LARGEST:
            raise ApiError(
                f"{form.param} has {len(text):,} characters; at most {_LARGEST:,} are read", param=form.param
            )
        key = hashlib.sha256(text.encode()).digest()
        if (task := self._answers.get(key)) is None:
            question = {"kind": form.kind, "form": form.source, "strict": form.strict}
            task = self._answers[key] = asyncio.create_task(self.pool.ask(question))
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        try:
            answer = await asyncio.shield(task)  # others wait for it, too
        finally:
            if self._answers.get(key) is task and _may_change(task):
                del self._answers[key]
        if "error" in answer:
            raise ApiError(answer["error"], param=form.param)
        return Grammar(answer["grammar"], form.param, tuple(answer["relaxed"]))

    async def close(self) -> None:
        """End the processes."""
        await self.pool.close()


def _may_change(task: asyncio.Task[dict[str, Any]]) -> bool:
    """Whether the machine had too much to do for an answer, which isn't so for ever."""
    return task.done() and (task.cancelled() or task.exception() is not None or "is_late" in task.result())
