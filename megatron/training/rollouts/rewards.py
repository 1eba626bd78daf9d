"""Rewards of answers from a function of the user's, which runs in a process of its own within limits."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from megatron.config.grpo import RewardSettings
from megatron.errors import ConfigError

_LONGEST_ANSWER, _KEPT, _SECONDS_TO_START = 1 << 26, 2000, 60.0
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RewardFunction:
    """A reward function in a process of its own, which ends with ``close`` or with this process.

    What it prints is dropped, but for the end, which errors show. Methods raise ConfigError, in one sentence, for
    whatever the function does wrong.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        path, name = settings.place
        environment = {key: value for key, value in os.environ.items() if key not in _OF_RANKS}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("reward_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that what it starts ends with it
        )
        self._answers, self._printed = queue.SimpleQueue[bytes](), b""
        self._readers = [
            threading.Thread(target=work, daemon=True) for work in (self._read_answers, self._read_printed)
        ]
        for reader in self._readers:
            reader.start()
        weakref.finalize(self, _end, self._process)  # at the latest when this process ends
        memory = int(settings.gigabytes * 2**30)
        self._exchange([str(path.resolve()), name, memory], "ready", least_seconds=_SECONDS_TO_START)

    def __call__(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        others: Mapping[str, Sequence[Any]],
    ) -> list[float | None]:
        """A reward for each completion, None for one that has none. ``others``: further arguments, a value for each."""
        asked = {**others, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        found: list[float | None] = self._exchange(asked, "rewards")
        return found

    def close(self) -> None:
        """End the process and all that it has started."""
        _end(self._process)
        for reader in self._readers:
            reader.join(timeout=5.0)

    def _exchange(self, question: Any, wanted: str, *, least_seconds: float = 0.0) -> Any:
        line = json.dumps(question).encode() + b"\n"
        threading.Thread(target=_write, args=(self._process.stdin, line), daemon=True).start()
        seconds = self._settings.seconds
        try:
            said = self._answers.get(timeout=max(seconds, least_seconds))
        except queue.Empty:
            self.close()
            raise self._error(
                f"took more than --reward-timeout {seconds:g} s; make it faster, or give it more time"
            ) from None
        if not said:
            how = self._how_it_ended()
            self.close()
            raise self._error(how)
        try:
            answer = json.loads(said)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not {"error", wanted} & answer.keys():
            self.close()
            raise self._error(
                "wrote into the pipe that its rewards go through; leave files alone that it hasn't opened"
            )
        if "error" in answer:
            self.close()
            raise self._error(answer["error"])
        return answer[wanted]

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"ended its process with exit code {code}; return rewards instead"
        named = signal.Signals(-code).name
        more = self._settings.gigabytes
        return f"ended its process by {named}; it may need more memory than --reward-memory-gb {more:g}"

    def _error(self, what: str) -> ConfigError:
        printed = " ".join(self._printed.decode(errors="replace").split())
        ends = f" (it printed, at last: {printed[-200:]})" if printed else ""
        return ConfigError(f"{self._settings.flag} {what}{ends}")

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as file:
            while line := file.readline(_LONGEST_ANSWER):
                self._answers.put(line)
        self._answers.put(b"")

    def _read_printed(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as file:
            while part := file.read1(1 << 16):  # type: ignore[attr-defined]
                self._printed = (self._printed + part)[-_KEPT:]


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def _write(file: IO[bytes], line: bytes) -> None:
    with suppress(BrokenPipeError, ValueError):  # the process has ended, which its reader reports
        file.write(line)
        file.flush()
