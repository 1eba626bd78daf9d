"""Prompts of a run: lines of JSON, as texts of tokens, in an order that depends on the seed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.flags import plural_s
from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.sample_order import RecentEpochs
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.conversations import ChatTemplate, own_template, template_tokens
from megatron.core.tokenizers.messages import normalized_messages
from megatron.core.tokenizers.text_files import parse_line
from megatron.errors import DataError
from megatron.small_files import check_regular, shown

_TAKEN = ("prompt", "messages", "tools", "documents")
LEARNED = "--grpo-prompts"
"""The flag that names prompts to learn from."""
RESERVED = ("prompts", "completions", "completion_ids")
"""Arguments of reward functions that no field of a prompt may have the name of."""


@dataclass(frozen=True)
class Prompt:
    """A line: ``prompt``, a text or messages, and the ``fields`` that the reward function gets. ``where``: its file and
    line.
    """

    prompt: str | list[dict[str, Any]]
    fields: dict[str, Any]
    variables: dict[str, Any]
    where: str

    @property
    def is_conversation(self) -> bool:
        """Whether it consists of messages."""
        return not isinstance(self.prompt, str)


def read_prompts(files: Sequence[str], *, flag: str = LEARNED) -> list[Prompt]:
    """The prompts of all files, which ``flag`` names; raises DataError for a file or line that can't be used."""
    found = [_prompt(where, record) for file in files for where, record in _records(Path(file), flag)]
    if not found:
        raise DataError(f'{flag} {" ".join(files)} holds no prompts; give lines such as {{"prompt": "2+3="}}')
    check_same_fields(found)
    return found


def check_same_fields(prompts: Sequence[Prompt]) -> None:
    """Raise DataError where a prompt has other fields than the first."""
    first = set(prompts[0].fields)
    for each in prompts:
        if differing := first ^ set(each.fields):
            raise DataError(
                f"{each.where} and {prompts[0].where} don't both have the field {shown(min(differing))}, and the "
                "reward function gets a list of each field: give all lines the same fields, null where there is nothing"
            )


def _records(path: Path, flag: str) -> Iterator[tuple[str, Any]]:
    check_regular(path, where=f"{flag} {path}", error=DataError)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield where, parse_line(line)
            except DataError as error:
                raise DataError(f"{where} is {error}") from None


def _prompt(where: str, record: Any) -> Prompt:
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise DataError(f'{where} is no prompt: it needs either "prompt" (a text or messages) or "messages"')
    value = record.get("prompt", record.get("messages"))
    if not isinstance(value, str):
        try:
            value = normalized_messages(value)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    if taken := [name for name in RESERVED if name in record]:
        raise DataError(f"{where} has the field {taken[0]}, which is an argument of the reward function: rename it")
    fields = {name: each for name, each in record.items() if name not in _TAKEN}
    return Prompt(value, fields, {name: record[name] for name in ("tools", "documents") if name in record}, where)


class PromptTexts:
    """Tokens of prompts that leave room for an answer, by number. ``left_out``: how many are longer than ``longest``
    tokens. ``flag``: names their files.

    Raises DataError for messages without a chat template, and where no prompt leaves room.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        chat: ChatSettings | None,
        *,
        tokenizer_model: str | None,
        longest: int,
        seed: int,
        flag: str = LEARNED,
    ) -> None:
        self.flag = flag
        texts = _texts(prompts, chat, tokenizer_model)
        start = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        tokens = [tuple(ids) or (start,) for ids in tokenizer.tokenize_batch(texts)]
        fitting = [number for number, ids in enumerate(tokens) if len(ids) <= longest]
        self.left_out = len(prompts) - len(fitting)
        if not fitting:
            raise DataError(
                f"{flag}: the shortest of {len(prompts):,} prompt{plural_s(len(prompts))} has "
                f"{min(map(len, tokens))} tokens, and --seq-length less --grpo-max-new-tokens leaves {longest}: give a "
                "larger --seq-length, or less of the other"
            )
        self.prompts, self.tokens = [prompts[each] for each in fitting], [tokens[each] for each in fitting]
        self._epochs = RecentEpochs(lambda epoch: random_state(seed, epoch).permutation(len(self.tokens)))

    @cached_property
    def digest(self) -> str:
        """Hex digest of all tokens and fields."""
        lengths = np.array([len(ids) for ids in self.tokens])
        fields = repr([each.fields for each in self.prompts])
        return digest_of("prompts", lengths, np.array([id for ids in self.tokens for id in ids]), fields)

    def at(self, place: int) -> int:
        """The number of the prompt at this place of the endless order, in which all are shuffled anew each time."""
        epoch, index = divmod(place, len(self.tokens))
        return self._epochs[epoch].item(index)


def _texts(prompts: Sequence[Prompt], chat: ChatSettings | None, tokenizer_model: str | None) -> list[str]:
    template: ChatTemplate | None = None
    found = list[str]()
    for each in prompts:
        if isinstance(each.prompt, str):
            found.append(each.prompt)
            continue
        if template is None:
            source = chat.template if chat is not None and chat.template is not None else own_template(tokenizer_model)
            if source is None:
                raise DataError(
                    f"{each.where} holds messages, and neither the model nor its tokenizer has a chat template: give "
                    "prompts as texts"
                )
            template = ChatTemplate(source, tokens=template_tokens(tokenizer_model))
        try:
            found.append(template.prompt(each.prompt, begin_answer=True, variables=each.variables))
        except DataError as error:
            raise DataError(f"{each.where}: {error}") from None
    return found
