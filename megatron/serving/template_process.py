"""The process in which chat templates run: an untrusted template may loop for ever, and only a process can be stopped.

Reads one JSON object a line, and answers each with a line: ``{"text": …}`` or ``{"error": …}``.
"""

from __future__ import annotations

import json
import resource
import sys
from functools import lru_cache
from typing import Any

from megatron.core.tokenizers.conversations import ChatTemplate
from megatron.core.tokenizers.messages import normalized_messages
from megatron.errors import MegatronError

_MOST_MEMORY = 2 << 30
_MOST_TEXT = 1 << 23


@lru_cache(maxsize=8)
def _template(source: str, tokens: str) -> ChatTemplate:
    return ChatTemplate(source, tokens=json.loads(tokens))


def answered(asked: dict[str, Any]) -> dict[str, str]:
    """``asked`` has ``source``, ``tokens``, ``messages``, ``begin_answer``, ``continue_last`` and ``variables``."""
    try:
        template = _template(asked["source"], json.dumps(asked["tokens"]))
        text = template.prompt(asked["messages"], begin_answer=asked["begin_answer"], variables=asked["variables"])
    except MegatronError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": f"the chat template needs more than {_MOST_MEMORY >> 30} GiB"}
    if asked["continue_last"]:
        last = (normalized_messages(asked["messages"])[-1]["content"] or "").strip()
        start = text.rfind(last)
        if start < 0:
            return {"error": "the chat template doesn't write the last message as it is, so it cannot be continued"}
        text = text[: start + len(last)]
    if len(text) > _MOST_TEXT:
        return {"error": f"the chat template writes {len(text):,} characters; at most {_MOST_TEXT:,} are read"}
    return {"text": text}


def main() -> None:
    """Answer lines until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), flush=True)  # noqa: T201  (the answer)


if __name__ == "__main__":
    main()
