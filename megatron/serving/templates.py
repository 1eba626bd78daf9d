"""Conversations as text: chat templates, run in a process that has limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.serving.bounded_process import ProcessPool
from megatron.serving.errors import ApiError


@dataclass(eq=False)
class Templates:
    """Writes conversations with the server's template ``source``, or with a request's own.

    ``tokens``: special tokens that templates refer to by role (``bos_token``). ``seconds``: for one conversation.
    """

    source: str
    tokens: Mapping[str, str]
    seconds: float = 5.0
    _pool: ProcessPool | None = None

    async def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        source: str | None = None,
        begin_answer: bool = True,
        continue_last: bool = False,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of a conversation; raises ApiError where the template refuses it, is wrong, or takes too long."""
        if self._pool is None:  # here, since a pool belongs to the process and the event loop that use it
            self._pool = ProcessPool("megatron.serving.template_process", "chat template", seconds=self.seconds)
        answer = await self._pool.ask(
            {
                "source": source or self.source,
                "tokens": dict(self.tokens),
                "messages": list(messages),
                "begin_answer": begin_answer and not continue_last,
                "continue_last": continue_last,
                "variables": dict(variables),
            }
        )
        if "error" in answer:
            raise ApiError(answer["error"], param="chat_template" if source else "messages")
        return str(answer["text"])

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await self._pool.close()
