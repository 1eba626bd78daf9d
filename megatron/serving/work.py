"""Threads for what takes long, so that the event loop answers everybody else meanwhile."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from megatron.serving.errors import ApiError

Parameters = ParamSpec("Parameters")
Value = TypeVar("Value")

INLINE_BYTES = 1 << 14
"""Bodies of up to this size are read in the event loop: a thread would take longer."""
LARGE_BYTES = 1 << 18
"""Larger bodies share a few threads, and hold up each other alone."""

_THREADS = 2
_MOST_WAITING = 32


class Work:
    """Runs functions in threads: those of large requests in a few of their own, in the order of their arrival."""

    def __init__(self) -> None:
        self._few = ThreadPoolExecutor(_THREADS, "large-requests")
        self._unfinished = 0

    async def run(
        self,
        is_large: bool,
        function: Callable[Parameters, Value],
        /,
        *args: Parameters.args,
        **settings: Parameters.kwargs,
    ) -> Value:
        """What ``function`` returns. Raises what it raises, and ApiError (503) for one more large request than wait."""
        if not is_large:
            return await asyncio.to_thread(function, *args, **settings)
        if self._unfinished >= _MOST_WAITING:
            raise ApiError(
                f"the server is busy with {self._unfinished} requests of more than {LARGE_BYTES >> 10} KiB; try again "
                "in 5 s",
                status=503,
                code="busy",
                headers={"retry-after": "5"},
            )
        self._unfinished += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._few, partial(function, *args, **settings))
        finally:
            self._unfinished -= 1

    def close(self) -> None:
        """Start nothing more."""
        self._few.shutdown(wait=False, cancel_futures=True)


def give_back_memory() -> None:
    """Give memory that isn't used any more back to the system, where the C library can: it keeps gigabytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
