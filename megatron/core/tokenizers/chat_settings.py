"""How a model writes conversations and ends its answers: stored with fine-tuning data and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """A chat template and the tokens that end an answer.

    ``template``: Jinja source that writes a conversation as text; None for data without conversations. ``end_tokens``:
    ids that end an answer, beside the tokenizer's own end of a document, in ascending order.
    """

    template: str | None
    end_tokens: tuple[int, ...]


def learned_after(before: ChatSettings | None, now: ChatSettings | None) -> ChatSettings | None:
    """Settings of a model that had those of ``before`` and then learned ``now``; None where there are none at all.

    It writes conversations as it learned last, and still ends its answers as before, too.
    """
    if before is None or now is None:
        return now or before
    ends = {*before.end_tokens, *now.end_tokens}
    return ChatSettings(template=now.template or before.template, end_tokens=tuple(sorted(ends)))


def without_ids_from(chat: ChatSettings | None, size: int) -> ChatSettings | None:
    """Settings for a vocabulary of ``size`` ids, which may be smaller than the one that they are of."""
    if chat is None:
        return None
    return replace(chat, end_tokens=tuple(each for each in chat.end_tokens if each < size))


def common_settings(sources: Mapping[str, ChatSettings | None]) -> tuple[ChatSettings | None, str]:
    """Settings of data made of several ``sources``, by name, and a remark where these differ, or nothing.

    The template is the first one that there is; what ends an answer of any of them is an end token.
    """
    known = {name: each for name, each in sources.items() if each is not None}
    if not known:
        return None, ""
    ends = {token for each in known.values() for token in each.end_tokens}
    with_template = [name for name, each in known.items() if each.template is not None]
    first = with_template[0] if with_template else next(iter(known))
    settings = ChatSettings(template=known[first].template, end_tokens=tuple(sorted(ends)))
    differ = {name: _differences(known[first], known[name]) for name in known if name != first}
    remarks = [f"{name} has {' and '.join(what)}" for name, what in differ.items() if what]
    if not remarks:
        return settings, ""
    return settings, (
        f"conversations are not written alike: {'; '.join(remarks)} than {first}, whose chat template is stored in "
        f"checkpoints, with all end tokens ({_listed(settings.end_tokens)})"
    )


def _differences(first: ChatSettings, other: ChatSettings) -> list[str]:
    found = []
    if other.template not in (None, first.template):
        found.append("another chat template")
    if other.end_tokens != first.end_tokens:
        found.append(f"other end tokens ({_listed(other.end_tokens)})")
    return found


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids)) or "none"
