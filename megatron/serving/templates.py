"""Conversations as text: chat templates, run in a process that has limited time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.serving.errors import ApiError

_SECONDS = 5.0
_SECONDS_TO_START = 60.0
_LONGEST_LINE = 1 << 27
_PROCESS_ENDED = {"error": "the chat template ended its process: it needs too much memory or is nested too deeply"}


@dataclass
class Templates:
    """Writes conversations with the server's template ``source``, or with a request's own.

    ``tokens``: special tokens that templates refer to by role (``bos_token``).
    """

    source: str
    tokens: Mapping[str, str]
    seconds: float = _SECONDS
    _process: asyncio.subprocess.Process | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

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
        asked = {
            "source": source or self.source,
            "tokens": dict(self.tokens),
            "messages": list(messages),
            "begin_answer": begin_answer and not continue_last,
            "continue_last": continue_last,
            "variables": dict(variables),
        }
        async with self._lock:
            answer = await self._ask(json.dumps(asked).encode() + b"\n")
        if "error" in answer:
            raise ApiError(answer["error"], param="chat_template" if source else "messages")
        return answer["text"]

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask(self, line: bytes) -> dict[str, str]:
        limit = self.seconds
        if self._process is None or self._process.returncode is not None:
            limit += _SECONDS_TO_START
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "megatron.serving.template_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST_LINE,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        said = b""
        try:
            process.stdin.write(line)
            await process.stdin.drain()
            said = await asyncio.wait_for(process.stdout.readline(), limit)
        except asyncio.TimeoutError:
            return {"error": f"the chat template takes more than {self.seconds:g} s for this conversation"}
        except ConnectionError:
            return _PROCESS_ENDED
        except ValueError:
            return {"error": f"the chat template writes more than {_LONGEST_LINE:,} characters"}
        finally:
            if not said:  # also when the client has left: the answer would be taken for that of the next question
                await self.close()
        if not said:
            return _PROCESS_ENDED
        answer: dict[str, str] = json.loads(said)
        return answer
