"""Conversations written down by a tokenizer's own Jinja template, and which characters of them are answers.

A template that marks answers with ``{% generation %}`` says itself what is learned. Of one that doesn't, an answer is
what a message of the learned role adds to the messages before it and their generation prompt.

Templates come from strangers, so they run in jinja2's sandbox.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.tokenizers.base import encoded_texts
from megatron.core.tokenizers.huggingface import special_tokens
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError
from megatron.small_files import read_json, read_text

OWN = "tokenizer"
"""What ``--chat-template`` calls the template beside the tokenizer."""

_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


class Span(NamedTuple):
    """Characters ``[start, stop)`` of a conversation."""

    start: int
    stop: int


class ChatTemplate:
    """A compiled template. ``tokens``: the special tokens by role (``bos_token``), which templates name.

    Raises ConfigError without the jinja2 library, DataError for what is no template.
    """

    def __init__(self, source: str, *, tokens: Mapping[str, str], learned: str = "assistant") -> None:
        self.marks_answers = _GENERATION.search(source) is not None
        self._tokens, self._learned = tokens, learned
        self._begin, self._end = (f"\x00{secrets.token_hex(8)}\x00" for _ in range(2))
        self._template = _compiled(source, self._begin, self._end)

    def render(self, record: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """The text of ``{"messages": […]}`` (``"tools"`` too, if the template knows them), and its answers in order.

        Raises DataError for a conversation that the template refuses, and for one whose answers can't be told.
        """
        messages = record.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError('"messages" is not a list of objects')
        if self.marks_answers:
            return self._cut(self._write(messages, record))
        return self._compared(messages, record)

    def _write(self, messages: Sequence[Any], record: Mapping[str, Any], *, prompt: bool = False) -> str:
        settings = {"tools": record.get("tools"), "documents": record.get("documents"), **self._tokens}
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=prompt, **settings)
        except Exception as error:  # a template may raise anything
            raise DataError(f"the chat template rejects the conversation: {error}") from None
        return text

    def _cut(self, marked: str) -> tuple[str, list[Span]]:
        """The text without the marks, and what stood between them."""
        text, spans, start = "", list[Span](), 0
        for piece in re.split(f"({self._begin}|{self._end})", marked):
            if piece == self._begin:
                start = len(text)
            elif piece == self._end:
                spans.append(Span(start, len(text)))
            else:
                text += piece
        return text, spans

    def _compared(self, messages: Sequence[Any], record: Mapping[str, Any]) -> tuple[str, list[Span]]:
        whole, spans = self._write(messages, record), list[Span]()
        for number, message in enumerate(messages):
            if message.get("role") != self._learned:
                continue
            before = self._write(messages[:number], record, prompt=True) if number else ""
            until = self._write(messages[: number + 1], record)
            if not (until.startswith(before) and whole.startswith(until)):
                raise DataError(
                    f"the chat template writes message {number} differently once others follow, so the answers cannot "
                    "be located: mark them in the template with {% generation %} and {% endgeneration %}"
                )
            spans.append(Span(len(before), len(until)))
        return whole, spans


def _compiled(source: str, begin: str, end: str) -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(
            "--chat-template needs the jinja2 library: pip install jinja2, or describe turns with --turn-start and "
            "--turn-end"
        ) from None

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}``, written between two marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{begin}{caller()}{end}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The same surroundings as templates are written for: how blocks take whitespace along, and what they may call.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda words: datetime.now().strftime(words)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"--chat-template is not a Jinja template: {error}") from None


def _as_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def load_template(choice: str, tokenizer_model: str | None, *, learned: str) -> ChatTemplate:
    """The template that ``--chat-template`` names: a file, or ``tokenizer`` for the tokenizer's own.

    Raises ConfigError when nothing is there, DataError for what is no template.
    """
    folder = Path(tokenizer_model or ".")
    folder = folder if folder.is_dir() else folder.parent
    source = _own_template(folder) if choice == OWN else _read(Path(choice))
    tokens = {role: word for role, word in special_tokens(folder).items() if role.endswith("_token")}
    template = ChatTemplate(source, tokens=tokens, learned=learned)
    if template.marks_answers and learned != "assistant":
        raise ConfigError(f"--learned-role {learned}: the chat template marks the answers itself; leave it out")
    return template


def _own_template(folder: Path) -> str:
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    found = read_json(path, dict[str, Any], error=DataError).get("chat_template") if path.is_file() else None
    if isinstance(found, list):  # several by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    if not isinstance(found, str):
        raise ConfigError(
            f"--chat-template {OWN}: {folder} has no chat_template.jinja and no chat_template in "
            "tokenizer_config.json: name a file, or describe turns with --turn-start and --turn-end"
        )
    return found


def _read(path: Path) -> str:
    try:
        return read_text(path, where=f"--chat-template {path}", error=DataError)
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}; name a file of Jinja, or {OWN}") from None


def encode_spans(text: str, spans: Sequence[Span], tokenizer: RustTokenizer) -> tuple[list[int], list[bool]]:
    """Ids of the text, which holds its special tokens spelled out, and for each whether it is to be learned.

    Learned are the tokens of which any character is in a span. Raises DataError when there are none, and for half of
    a surrogate pair.
    """
    encoded_texts([text])  # refuses lone surrogates
    encoding = tokenizer.pipeline.encode(text, add_special_tokens=False)
    learned = [False] * len(encoding.ids)
    spans = [span for span in spans if span.start < span.stop]
    at = 0
    for number, (start, stop) in enumerate(encoding.offsets):
        while at < len(spans) and spans[at].stop <= start:
            at += 1
        learned[number] = at < len(spans) and spans[at].start < stop
    if not any(learned):
        raise DataError("nothing to learn: the chat template writes no answer")
    return list(encoding.ids), learned
