"""The engine's side of the server: a thread that steps it, and one that takes what the HTTP server's process sends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

from megatron.core.inference.constrained import Constraint
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Finish, Update
from megatron.errors import ConfigError
from megatron.serving.messages import Abort, Report, Submission

_IDLE_SECONDS = 0.5


class EngineLoop:
    """Runs ``engine`` for the process at the other end of ``connection`` (see ``EngineClient``), until that ends.

    ``compiled``: makes a constraint of a grammar, or raises ConfigError.
    """

    def __init__(self, engine: Engine, connection: Connection, compiled: Callable[[str], Constraint]) -> None:
        self.engine, self._connection, self._compiled = engine, connection, compiled
        self._commands = queue.SimpleQueue[Submission | Abort | Sequence[Update] | None]()
        self._step_tokens: list[int] = []
        self._raised: BaseException | None = None
        engine.on_step = self._step_tokens.append
        self._threads = [
            threading.Thread(target=self._run, name="engine", daemon=True),
            threading.Thread(target=self._receive, name="engine-commands", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def join(self, *, seconds: float = 5.0) -> None:
        """Wait until the threads have ended, which they do when the other process has."""
        for thread in self._threads:
            thread.join(seconds)

    @property
    def failure(self) -> BaseException | None:
        """Why no text can be generated any more: a lost rank, or the exception of a step."""
        return self.engine.error or self._raised

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                self._report(self._updates(commands))
        except OSError:  # nobody reads reports any more
            return

    def _next_commands(self) -> list[Submission | Abort | Sequence[Update]] | None:
        """Those that have come; without work, wait a little for one. None when the thread is to end."""
        found = list[Submission | Abort | Sequence[Update]]()
        block = self.failure is not None or not self.engine.has_work
        while True:
            try:
                command = self._commands.get(block=block, timeout=_IDLE_SECONDS)
            except queue.Empty:
                return found
            if command is None:
                return None
            found.append(command)
            block = False

    def _updates(self, commands: Sequence[Submission | Abort | Sequence[Update]]) -> list[Update]:
        """What the next step brings."""
        updates = list[Update]()
        try:
            for command in commands:
                match command:
                    case Submission(requests):
                        for request in requests:
                            self.engine.submit(request)
                    case Abort(request_ids):
                        for request_id in request_ids:
                            self.engine.abort(request_id)
                    case _:
                        updates += command
            if self.failure is None and self.engine.has_work:
                updates += self.engine.step()
        except BaseException as error:  # whatever ends the engine must be said
            self._raised = error
        return updates

    def _report(self, updates: Sequence[Update]) -> None:
        step_tokens = self._step_tokens[:]
        self._step_tokens.clear()
        failure = None if self.failure is None else str(self.failure)
        self._connection.send(Report(updates, self.engine.statistics, step_tokens, failure))

    def _receive(self) -> None:
        """Take commands while a step is computed, so that the other process never waits for its end.

        Grammars may take seconds to compile: a thread of their own does it, and keeps the order of commands about one
        request.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="engine-grammars") as grammars:
            try:
                while True:
                    command: Submission | Abort = self._connection.recv()
                    if command.grammar is None:
                        self._commands.put(command)
                    else:
                        grammars.submit(self._constrain, command)
            except (EOFError, OSError):  # the other process has ended
                pass
            self._commands.put(None)

    def _constrain(self, command: Submission | Abort) -> None:
        if isinstance(command, Abort) or command.grammar is None:
            self._commands.put(command)
            return
        try:
            constraint = self._compiled(command.grammar)
        except ConfigError as error:
            finish = Finish("error", error=str(error))
            self._commands.put([Update(request_id=request.id, finish=finish) for request in command.requests])
        else:
            self._commands.put(Submission([replace(request, constraint=constraint) for request in command.requests]))
