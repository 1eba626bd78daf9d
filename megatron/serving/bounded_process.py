"""Processes for what strangers send and only a process can stop: chat templates, schemas, grammars.

Each answers questions, one JSON object a line, within limits of time and memory. One that takes too long, or has ended,
is replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.serving.errors import ApiError

_SECONDS_TO_START = 60.0
_LONGEST_LINE = 1 << 27
_NICENESS = 5  # the engine and the HTTP server go first
_READY: dict[str, Any] = {"ready": True}


@dataclass(eq=False)
class ProcessPool:
    """``size`` processes that run ``module``; they start with the first questions.

    ``what``: what the questions hold, as messages call it. ``seconds``: the longest time for an answer. ``first``:
    makes what each process reads before its first question. More than ``most_waiting`` questions are refused, and one
    that has waited for ``seconds_to_wait`` is, too.
    """

    module: str
    what: str
    seconds: float = 5.0
    size: int = 2
    most_waiting: int = 256
    seconds_to_wait: float = 15.0
    first: Callable[[], Any] = lambda: None
    _idle: list[_Process] = field(default_factory=list)
    _busy: set[_Process] = field(default_factory=set)
    _waiting: int = 0

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.size)

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question, which has ``error`` where there is none. Raises ApiError when all are busy.

        With ``is_late`` the error is that of a time limit: on a machine with less to do there may be an answer.
        """
        if self._waiting >= self.most_waiting:
            raise self._busy_error(429)
        self._waiting += 1
        try:
            await asyncio.wait_for(self._free.acquire(), self.seconds_to_wait)
        except asyncio.TimeoutError:
            raise self._busy_error(503) from None
        finally:
            self._waiting -= 1
        process = self._idle.pop() if self._idle else _Process(self)
        self._busy.add(process)
        try:
            return await process.ask(question)
        finally:
            self._busy.discard(process)
            self._idle.append(process)
            self._free.release()

    async def close(self) -> None:
        """End the processes."""
        for process in (*self._idle, *self._busy):
            await process.close()

    def _busy_error(self, status: int) -> ApiError:
        return ApiError(
            f"the server is busy with {self.what}s of other requests: {self._waiting:,} wait; try again in "
            f"{self.seconds:g} s",
            status=status,
            code="busy",
            headers={"retry-after": f"{self.seconds:.0f}"},
        )


@dataclass(eq=False)
class _Process:
    pool: ProcessPool
    _running: asyncio.subprocess.Process | None = None

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        line = await asyncio.to_thread(_line, question)
        if self._running is None or self._running.returncode is not None:
            ready = await self._start()
            if ready != _READY:
                await self.close()
                return ready
        return await self._exchange(line, self.pool.seconds)

    async def close(self) -> None:
        """End the process."""
        running, self._running = self._running, None
        if running is not None and running.returncode is None:
            running.kill()
            await running.wait()

    async def _start(self) -> dict[str, Any]:
        first = await asyncio.to_thread(lambda: _line(self.pool.first()))
        self._running = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self.pool.module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # of a library that ends its process
            limit=_LONGEST_LINE,
        )
        return await self._exchange(first, _SECONDS_TO_START)

    async def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        running, said, what = self._running, b"", self.pool.what
        assert running is not None and running.stdin is not None and running.stdout is not None, "it has started"
        try:
            said = await asyncio.wait_for(_asked(running.stdin, running.stdout, line), seconds)
        except asyncio.TimeoutError:
            return {"error": f"the {what} takes more than {seconds:g} s: make it simpler", "is_late": True}
        except ConnectionError:
            pass  # the process has ended without an answer, which is reported below
        except ValueError:
            return {"error": f"the answer to the {what} has more than {_LONGEST_LINE:,} characters"}
        finally:
            if not said:  # also when the client has left: the answer would be taken for that of the next question
                await self.close()
        if not said:
            return {"error": f"the {what} ended its process: it needs too much memory or is nested too deeply"}
        answer: dict[str, Any] = await asyncio.to_thread(json.loads, said)
        return answer


def answer_lines(start: Callable[[Any], Callable[[Any], dict[str, Any]]], *, most_memory: int) -> None:
    """In a bounded process, answer lines until there are no more, with at most ``most_memory`` bytes.

    ``start`` makes of the first line what answers all others, or raises what the answer to them would be.
    """
    resource.setrlimit(resource.RLIMIT_AS, (most_memory, most_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICENESS)
    answered: Callable[[Any], dict[str, Any]] | None = None
    for line in sys.stdin:
        answer = _READY
        try:
            if answered is None:
                answered = start(json.loads(line))
            else:
                answer = answered(json.loads(line))
        except MemoryError:
            answer = {"error": f"more than {most_memory >> 30} GiB of memory are needed: make it simpler"}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


async def _asked(writer: asyncio.StreamWriter, reader: asyncio.StreamReader, line: bytes) -> bytes:
    writer.write(line)
    await writer.drain()
    return await reader.readline()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
