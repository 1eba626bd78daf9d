"""Conversations as text, and which of it a model is trained on.

A ChatFormat writes turns with a text around them.

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
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from megatron.core.tokenizers.huggingface import special_tokens
from megatron.core.tokenizers.messages import normalized_messages
from megatron.core.tokenizers.records import Conversation
from megatron.errors import ConfigError, DataError
from megatron.small_files import has_file, read_json, read_text

OWN = "tokenizer"
"""Value of ``--chat-template`` for the tokenizer's own template."""

IMAGE = "<image>"
"""Stands for an image in contents. A template that writes images itself gets contents as lists of parts."""
_WRITES_IMAGES = re.compile(r"""['"]image['"]""")
_TOKEN, _NAMES_IMAGES = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_]{1,60}\]"), re.compile("(?i)im(a)?g")
_READS_TEXTS = re.compile(r"\bis (not )?string\b")
_GENERATION = re.compile(r"{%[-+]?\s*generation\s*[-+]?%}")


class Span(NamedTuple):
    """Characters ``[start, stop)`` of a conversation."""

    start: int
    stop: int


@dataclass(frozen=True)
class Written:
    """A conversation as text, and the answers in it that are trained on, in order.

    ``answers``: with their ends, where the format has any. ``is_marked``: the format itself says what is trained on.
    """

    text: str
    answers: Sequence[Span]
    is_marked: bool = False


class Writer(Protocol):
    """Writes conversations as text."""

    @property
    def source(self) -> str:
        """The format as a Jinja template."""
        ...

    def write(self, conversation: Conversation) -> Written:
        """The text; raises DataError for a conversation that can't be written, or in which nothing is learned."""
        ...


@dataclass(frozen=True)
class ChatFormat:
    """How turns are written; ``{role}`` in ``turn_start`` is the speaker. ``learned``: the role that is trained on.

    ``begin``: the text before the first turn.
    """

    turn_start: str = "<|im_start|>{role}\n"
    turn_end: str = "<|im_end|>\n"
    learned: str = "assistant"
    begin: str = ""

    @property
    def source(self) -> str:
        """The format as a Jinja template, which writes the same text."""
        start = " ~ message.role ~ ".join(map(_jinja_text, self.turn_start.split("{role}")))
        answer = _jinja_text(self.turn_start.replace("{role}", self.learned))
        begin = f"{{{{- {_jinja_text(self.begin)} }}}}\n" if self.begin else ""
        return (
            f"{begin}{{%- for message in messages %}}\n"
            "    {%- if message.tool_calls %}{{ raise_exception('this chat format has no tool calls') }}{% endif %}\n"
            f"    {{{{- {start} ~ message.content ~ {_jinja_text(self.turn_end)} }}}}\n"
            "{%- endfor %}\n"
            f"{{%- if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
        )

    def write(self, conversation: Conversation) -> Written:
        """The text of a conversation; the role's name is never trained on, a turn's end is. Raises DataError."""
        text, answers = self.begin, list[Span]()
        if conversation.tools:
            raise DataError("tools are not written by --turn-start and --turn-end: give --chat-template")
        for number, (name, message) in enumerate(zip(conversation.names, conversation.messages)):
            if unwritten := next((what for what in ("tool_calls", "reasoning_content") if message.get(what)), None):
                raise DataError(
                    f"{name} has {unwritten.removesuffix('_content')}, which --turn-start and --turn-end don't write: "
                    "give --chat-template"
                )
            text += self.turn_start.replace("{role}", message["role"])
            start, text = len(text), f"{text}{message['content']}{self.turn_end}"
            if message["role"] == self.learned and conversation.has_loss(number):
                answers.append(Span(start, len(text)))
        check_learned(conversation, self.learned, len(answers))
        return Written(text, answers)


def _jinja_text(text: str) -> str:
    """A text as a literal of Jinja's, whose escapes are JSON's but for those of rare characters."""
    return json.dumps(text, ensure_ascii=False)


def check_learned(conversation: Conversation, learned: str, count: int) -> None:
    """Raise DataError for a conversation that has nothing to learn."""
    if count:
        return
    turns = sum(message["role"] == learned for message in conversation.messages)
    why = f"each turn of the {learned} has weight 0 or is in the prompt" if turns else f"no turn of the {learned}"
    raise DataError(f"nothing to learn: {why}")


class _NoText(str):
    """The content of a message that has none: an empty text that templates also take for none.

    Templates of models with tools ask whether a content is none before they write calls; others add it to a text or
    trim it, which fails for None or writes the word "None".
    """

    __slots__ = ()

    @override
    def __eq__(self, other: object) -> bool:
        return other is None or super().__eq__(other)

    @override
    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class ChatTemplate:
    """A compiled template. ``tokens``: the special tokens by role (``bos_token``), which templates refer to.

    ``learned``: the role that is trained on. ``image``: what stands for an image in written texts, whatever the
    template writes for one (``<IMG_CONTEXT>``, ``<start_of_image>``).

    Raises ConfigError without the jinja2 library, DataError for an invalid template.
    """

    def __init__(
        self, source: str, *, tokens: Mapping[str, str], learned: str = "assistant", image: str = IMAGE
    ) -> None:
        self.source, self.tokens, self._image = source, tokens, image
        self.marks_answers = _GENERATION.search(source) is not None
        self._learned = learned
        self._begin, self._end = (f"\x00{secrets.token_hex(8)}\x00" for _ in range(2))
        self._template = _compiled(source, self._begin, self._end)

    def write(self, conversation: Conversation) -> Written:
        """The text of a conversation, and its answers.

        Raises DataError for a conversation that the template rejects, and for one whose answers can't be located.
        """
        if self.marks_answers:
            return self._cut(conversation)
        return self._compared(conversation)

    def prompt(self, messages: Sequence[Any], *, begin_answer: bool, variables: Mapping[str, Any]) -> str:
        """The text that a model continues: a conversation and, with ``begin_answer``, the beginning of its answer.

        ``messages`` are as clients and data sets write them. ``variables``: what else the template may use. Raises
        DataError for messages that can't be read, and for a conversation that the template rejects.
        """
        text = self._write(normalized_messages(list(messages)), variables, prompt=begin_answer)
        return text.replace(self._begin, "").replace(self._end, "")

    def _write(self, messages: Sequence[Any], variables: Mapping[str, Any], *, prompt: bool = False) -> str:
        text = self._rendered(
            [{**each, "content": self._content(each["content"])} for each in messages], variables, prompt=prompt
        )
        if not any(IMAGE in (each["content"] or "") for each in messages):
            return text
        if self._written_image is not None:
            text = text.replace(self._written_image, IMAGE)
        return text.replace(IMAGE, self._image)

    @cached_property
    def _written_image(self) -> str | None:
        """What the template writes for an image; None where it writes none."""
        if not _WRITES_IMAGES.search(self.source):
            return None
        parts = [{"type": "image"}, {"type": "text", "text": "x"}]
        try:
            plain, shown = (self._rendered([{"role": "user", "content": each}], {}) for each in (parts[1:], parts))
        except DataError:
            return None
        found = list(dict.fromkeys(each for each in _TOKEN.findall(shown) if each not in plain))
        return next((each for each in found if _NAMES_IMAGES.search(each)), None)

    def _rendered(self, messages: Sequence[Any], variables: Mapping[str, Any], *, prompt: bool = False) -> str:
        settings = {"tools": None, "documents": None, **variables, **self.tokens}
        settings |= {"messages": messages, "add_generation_prompt": prompt}
        try:
            text: str = self._template.render(settings)
        except Exception as error:  # templates may raise anything
            raise DataError(
                f"the chat template rejects the conversation: {str(error) or type(error).__name__}"
            ) from None
        return text

    def _content(self, text: str | None) -> Any:
        """A content as this template reads it: a text, or a list of parts where it writes images."""
        if text is None:
            return _NoText()
        if not _WRITES_IMAGES.search(self.source) or (IMAGE not in text and _READS_TEXTS.search(self.source)):
            return text
        first, *others = text.split(IMAGE)
        parts = [{"type": "text", "text": first}]
        for each in others:
            parts += [{"type": "image"}, {"type": "text", "text": each.removeprefix("\n")}]
        return [part for part in parts if part.get("text") != ""]

    def _cut(self, conversation: Conversation) -> Written:
        """The text without the marks, and the answers that were between them."""
        text, spans, start = "", list[Span](), 0
        for piece in re.split(
            f"({self._begin}|{self._end})", self._write(conversation.messages, conversation.variables)
        ):
            if piece == self._begin:
                start = len(text)
            elif piece == self._end:
                spans.append(Span(start, len(text)))
            else:
                text += piece
        answers = [number for number, each in enumerate(conversation.messages) if each["role"] == self._learned]
        if not all(conversation.has_loss(number) for number in answers):
            if len(spans) != len(answers):
                raise DataError(
                    f"the chat template marks {len(spans)} stretches of text for {len(answers)} turns of the "
                    f"{self._learned}, so those of weight 0 cannot be told apart: write each within one "
                    "{% generation %} and {% endgeneration %}"
                )
            spans = [span for span, number in zip(spans, answers) if conversation.has_loss(number)]
        check_learned(conversation, self._learned, len(answers) and sum(span.start < span.stop for span in spans))
        return Written(text, spans, is_marked=True)

    def _compared(self, conversation: Conversation) -> Written:
        messages, variables = conversation.messages, conversation.variables
        whole, spans = self._write(messages, variables), list[Span]()
        for number, message in enumerate(messages):
            if message["role"] != self._learned or not conversation.has_loss(number):
                continue
            before = self._write(messages[:number], variables, prompt=True) if number else ""
            until = self._write(messages[: number + 1], variables)
            if not (until.startswith(before) and whole.startswith(until)):
                raise DataError(
                    f"the chat template writes {conversation.names[number]} differently once others follow, so the "
                    "answers cannot be located: mark them in the template with {% generation %} and {% endgeneration %}"
                )
            spans.append(Span(len(before), len(until)))
        check_learned(conversation, self._learned, len(spans))
        return Written(whole, spans)


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

        @override
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
    environment.tests["none"] = lambda value: value is None or isinstance(value, _NoText)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda words: datetime.now().strftime(words)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DataError(f"--chat-template is not a Jinja template: {error}") from None


def load_template(choice: str, tokenizer_model: str | None, *, learned: str, image: str = IMAGE) -> ChatTemplate:
    """The template that ``--chat-template`` names: a file, or ``tokenizer`` for the tokenizer's own. ``image``: as of
    ``ChatTemplate``.

    Raises ConfigError when there is none, DataError for an invalid one.
    """
    source = own_template(tokenizer_model) if choice == OWN else _read(Path(choice))
    if source is None:
        where = _folder(tokenizer_model) or "the tokenizer, which is no folder,"
        raise ConfigError(
            f"--chat-template {OWN}: {where} has no chat_template.jinja and no chat_template in "
            "tokenizer_config.json: name a file, or describe turns with --turn-start and --turn-end"
        )
    template = ChatTemplate(source, tokens=template_tokens(tokenizer_model), learned=learned, image=image)
    if template.marks_answers and learned != "assistant":
        raise ConfigError(f"--learned-role {learned}: the chat template marks the answers itself; leave it out")
    return template


def template_tokens(tokenizer_model: str | None) -> dict[str, str]:
    """The special tokens that templates refer to, by role (``bos_token``); none for a tokenizer without a folder."""
    folder = _folder(tokenizer_model)
    found = {} if folder is None else special_tokens(folder)
    return {role: word for role, word in found.items() if role.endswith("_token")}


def _folder(tokenizer_model: str | None) -> Path | None:
    """The tokenizer's folder; None for a kind of tokenizer that is named by other files."""
    if tokenizer_model is None:
        return None
    path = Path(tokenizer_model)
    return path if path.is_dir() else path.parent


def own_template(tokenizer_model: str | None) -> str | None:
    """The template in the tokenizer's folder, if there is one."""
    folder = _folder(tokenizer_model)
    if folder is None:
        return None
    if has_file(folder / "chat_template.jinja", error=DataError):
        return _read(folder / "chat_template.jinja")
    path = folder / "tokenizer_config.json"
    settings = read_json(path, dict[str, Any], error=DataError) if has_file(path, error=DataError) else {}
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _read(path: Path) -> str:
    try:
        return read_text(path, where=f"--chat-template {path}", error=DataError)
    except OSError as error:
        raise ConfigError(f"--chat-template {path}: {error.strerror}; name a file of Jinja, or {OWN}") from None
