"""The process in which chat templates run: a stranger's may loop for ever, and only a process can be stopped."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from megatron.core.tokenizers.conversations import ChatTemplate
from megatron.core.tokenizers.messages import normalized_messages
from megatron.serving.bounded_process import answer_lines

_MOST_MEMORY = 2 << 30
_MOST_TEXT = 1 << 23


@lru_cache(maxsize=8)
def _template(source: str, tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens=json.loads(tokens))


def answered(asked: dict[str, Any]) -> dict[str, str]:
    """``asked`` has ``source``, ``tokens``, ``messages``, ``begin_answer``, ``continue_last`` and ``variables``. Raises
    DataError.
    """
    template = _template(asked["source"], json.dumps(asked["tokens"]))
    text = template.prompt(asked["messages"], begin_answer=asked["begin_answer"], variables=asked["variables"])
    if asked["continue_last"]:
        last = (normalized_messages(asked["messages"])[-1]["content"] or "").strip()
        start = text.rfind(last)
        if start < 0:
            return {"error": "the chat template doesn't write the last message as it is, so it cannot be continued"}
        text = text[: start + len(last)]
    if len(text) > _MOST_TEXT:
        return {"error": f"the chat template writes {len(text):,} characters; at most {_MOST_TEXT:,} are read"}
    return {"text": text}


if __name__ == "__main__":
    answer_lines(lambda _: answered, most_memory=_MOST_MEMORY)
