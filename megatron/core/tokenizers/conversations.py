"""Conversations and prompt–completion pairs as tokens, and which of them a model is trained on.

A ChatFormat writes turns with a text around them. What is trained on and what is only read are encoded separately, so
each token belongs wholly to one of them, and a prompt has the same tokens as when the trained model is asked.

A ChatTemplate is a tokenizer's own Jinja template. One that marks answers with ``{% generation %}`` defines what is
trained on. With one that doesn't, an answer is what a message of the learned role adds to the messages before it and
their generation prompt. Templates come from strangers, so they run in jinja2's sandbox.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.tokenizers.base import Tokenizer, encoded_texts
from megatron.core.tokenizers.huggingface import special_tokens
from megatron.core.tokenizers.messages import NoText, normalized_messages, normalized_tools
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError
from megatron.small_files import read_json, read_text

OWN = "tokenizer"
"""Value of ``--chat-template`` for the tokenizer's own template."""

_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


class Part(NamedTuple):
    """A piece of text, and whether it is trained on."""

    text: str
    is_target: bool


@dataclass(frozen=True)
class ChatFormat:
    """How turns are written; ``{role}`` in ``turn_start`` is the speaker. ``learned``: the role that is trained on."""

    turn_start: str = "<|im_start|>{role}\n"
    turn_end: str = "<|im_end|>\n"
    learned: str = "assistant"

    def parts(self, record: Mapping[str, Any]) -> list[Part]:
        """Parts of ``{"messages": [{"role": …, "content": …}, …]}`` or ``{"prompt": …, "completion": …}``.

        Raises DataError for a record that is neither, or that has nothing to learn.
        """
        parts = list[Part]()
        if "messages" in record:
            if not isinstance(record["messages"], list):
                raise DataError('"messages" is not a list')
            for number, message in enumerate(record["messages"]):
                if not isinstance(message, dict) or "role" not in message or "content" not in message:
                    raise DataError(f'message {number} has no "role" and "content"')
                role = _text(message["role"], f"role of message {number}")
                content = _text(message["content"], f"content of {number}")
                # The role's name is never trained on, a turn's end is.
                parts.append(Part(self.turn_start.replace("{role}", role), False))
                parts.append(Part(content + self.turn_end, role == self.learned))
        elif "prompt" in record and "completion" in record:
            parts.append(Part(_text(record["prompt"], "prompt"), False))
            parts.append(Part(_text(record["completion"], "completion"), True))
        else:
            raise DataError('neither "messages" nor "prompt" and "completion" (keys are {})'.format(", ".join(record)))
        if not any(part.is_target and part.text for part in parts):
            raise DataError(f"nothing to learn: no turn of the {self.learned}, or an empty completion")
        return [
            Part("".join(part.text for part in group), is_target)
            for is_target, group in groupby(parts, key=lambda part: part.is_target)
        ]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name} is not a string")
    return value


def encode(parts: list[Part], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a conversation with the end of a document, and for each whether it is trained on.

    The end is trained on if the last part is. Raises DataError for text that can't be expressed.
    """
    ids, learned = list[int](), list[bool]()
    for part, found in zip(parts, tokenizer.tokenize_batch([part.text for part in parts])):
        ids += found
        learned += [part.is_target] * len(found)
    return [*ids, tokenizer.eod], [*learned, parts[-1].is_target]


class Span(NamedTuple):
    """Characters ``[start, stop)`` of a conversation."""

    start: int
    stop: int


class ChatTemplate:
    """A compiled template. ``tokens``: the special tokens by role (``bos_token``), which templates refer to.

    ``learned``: the role that is trained on.

    Raises ConfigError without the jinja2 library, DataError for an invalid template.
    """

    def __init__(self, source: str, *, tokens: Mapping[str, str], learned: str = "assistant") -> None:
        self.source, self.tokens = source, tokens
        self.marks_answers = _GENERATION.search(source) is not None
        self._learned = learned
        self._begin, self._end = (f"\x00{secrets.token_hex(8)}\x00" for _ in range(2))
        self._template = _compiled(source, self._begin, self._end)

    def render(self, record: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """The text of ``{"messages": […]}`` (and of ``"tools"``, if the template uses them), and its answers in order.

        Raises DataError for a conversation that the template rejects, and for one whose answers can't be located.
        """
        messages = normalized_messages(record.get("messages"))
        variables = {"tools": normalized_tools(record.get("tools")), "documents": record.get("documents")}
        if self.marks_answers:
            return self._cut(self._write(messages, variables))
        return self._compared(messages, variables)

    def prompt(self, messages: Sequence[Any], *, begin_answer: bool, variables: Mapping[str, Any]) -> str:
        """The text that a model continues: a conversation and, with ``begin_answer``, the beginning of its answer.

        ``messages`` are as clients and data sets write them. ``variables``: what else the template may use. Raises
        DataError for messages that can't be read, and for a conversation that the template rejects.
        """
        text = self._write(normalized_messages(list(messages)), variables, prompt=begin_answer)
        return text.replace(self._begin, "").replace(self._end, "")

    def _write(self, messages: Sequence[Any], variables: Mapping[str, Any], *, prompt: bool = False) -> str:
        settings = {"tools": None, "documents": None, **variables, **self.tokens}
        written = [{**each, "content": NoText()} if each["content"] is None else each for each in messages]
        settings |= {"messages": written, "add_generation_prompt": prompt}
        try:
            text: str = self._template.render(settings)
        except Exception as error:  # templates may raise anything
            raise DataError(f"the chat template rejects the conversation: {error}") from None
        return text

    def _cut(self, marked: str) -> tuple[str, list[Span]]:
        """The text without the marks, and the answers that were between them."""
        text, spans, start = "", list[Span](), 0
        for piece in re.split(f"({self._begin}|{self._end})", marked):
            if piece == self._begin:
                start = len(text)
            elif piece == self._end:
                spans.append(Span(start, len(text)))
            else:
                text += piece
        return text, spans

    def _compared(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> tuple[str, list[Span]]:
        whole, spans = self._write(messages, variables), list[Span]()
        for number, message in enumerate(messages):
            if message.get("role") != self._learned:
                continue
            before = self._write(messages[:number], variables, prompt=True) if number else ""
            until = self._write(messages[: number + 1], variables)
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

    # The environment that templates are written for: whitespace around blocks, and the functions they may call.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.tests["none"] = lambda value: value is None or isinstance(value, NoText)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda words: datetime.now().strftime(words)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"--chat-template is not a Jinja template: {error}") from None


def load_template(choice: str, tokenizer_model: str | None, *, learned: str) -> ChatTemplate:
    """The template that ``--chat-template`` names: a file, or ``tokenizer`` for the tokenizer's own.

    Raises ConfigError when there is none, DataError for an invalid one.
    """
    folder = _folder(tokenizer_model)
    source = own_template(tokenizer_model) if choice == OWN else _read(Path(choice))
    if source is None:
        raise ConfigError(
            f"--chat-template {OWN}: {folder} has no chat_template.jinja and no chat_template in "
            "tokenizer_config.json: name a file, or describe turns with --turn-start and --turn-end"
        )
    tokens = {role: word for role, word in special_tokens(folder).items() if role.endswith("_token")}
    template = ChatTemplate(source, tokens=tokens, learned=learned)
    if template.marks_answers and learned != "assistant":
        raise ConfigError(f"--learned-role {learned}: the chat template marks the answers itself; leave it out")
    return template


def _folder(tokenizer_model: str | None) -> Path:
    path = Path(tokenizer_model or ".")
    return path if path.is_dir() else path.parent


def own_template(tokenizer_model: str | None) -> str | None:
    """The template in the tokenizer's folder, if there is one."""
    folder = _folder(tokenizer_model)
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    found = read_json(path, dict[str, Any], error=DataError).get("chat_template") if path.is_file() else None
    if isinstance(found, list):  # several by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _read(path: Path) -> str:
    try:
        return read_text(path, where=f"--chat-template {path}", error=DataError)
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}; name a file of Jinja, or {OWN}") from None


def encode_spans(text: str, spans: Sequence[Span], tokenizer: RustTokenizer) -> tuple[list[int], list[bool]]:
    """Ids of the text, in which special tokens are spelled out, and for each whether it is trained on.

    Tokens with any character in a span are trained on. Raises DataError when there are none, and for lone surrogates.
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
