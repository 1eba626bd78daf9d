"""The engine's side of the server: a thread that steps it, and one that takes what the HTTP server's process sends."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from megatron.core.inference.constrained import Constraint
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Finish, Request, Update
from megatron.errors import MegatronError
from megatron.serving.grammar_process import STACK_OF_ENGINE, start_with_stack
from megatron.serving.messages import Abort, Report, Submission

_IDLE_SECONDS = 0.5
_COMPILERS = 2  # grammars at once
_TOKENS_AT_ONCE = 1 << 15  # of prompts that the engine takes before a step: neighbours wait for no more of them
_Command = Submission | Abort | list[Update]
"""A command for the engine's thread; updates are of requests that never reach the engine."""


class EngineLoop:
    """Runs ``engine`` for the process at the other end of ``connection`` (see ``EngineClient``), until that ends.

    ``compiled``: makes a constraint of a grammar, or raises what is wrong with it.
    """

    def __init__(self, engine: Engine, connection: Connection, compiled: Callable[[str], Constraint]) -> None:
        self.engine, self._connection, self._compiled = engine, connection, compiled
        self._commands = queue.SimpleQueue[_Command]()
        self._arrived = deque[Request]()  # which the engine takes before one of the next steps
        self._compiling = set[str]()  # requests whose grammar is being compiled, and which nobody has aborted
        self._compiling_lock, self._sending_lock = threading.Lock(), threading.Lock()
        self._compilers = threading.Semaphore(_COMPILERS)
        self._is_left = threading.Event()
        self._step_tokens: list[int] = []
        self._raised: BaseException | None = None
        engine.on_step = self._step_tokens.append
        self._threads = [
            threading.Thread(target=self._run, name="engine", daemon=True),
            threading.Thread(target=self._receive, name="engine-commands", daemon=True),
            threading.Thread(target=self._watch, name="engine-watch", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:  # the engine's follows grammars
            start_with_stack(thread, STACK_OF_ENGINE)

    def join(self, *, seconds: float = 5.0) -> None:
        """Wait for the threads, which end when the other process has; for each at most ``seconds``."""
        for thread in self._threads:
            thread.join(seconds)

    @property
    def failure(self) -> BaseException | None:
        """Why no text can be generated any more: a lost rank, or the exception of a step."""
        return self.engine.error or self._raised

    def _run(self) -> None:
        try:
            while True:
                updates = self._updates(self._next_commands())
                step_tokens = self._step_tokens[:]
                self._step_tokens.clear()
                self._report(updates, step_tokens)
        except OSError:  # nobody reads reports any more
            return
        except BaseException as error:  # `_watch` reports it
            self._raised = self._raised or error

    def _next_commands(self) -> list[_Command]:
        """Commands that have arrived; without work, wait a little for one."""
        found, block = list[_Command](), self.failure is not None or not (self.engine.has_work or self._arrived)
        while True:
            try:
                found.append(self._commands.get(block=block, timeout=_IDLE_SECONDS))
            except queue.Empty:
                return found
            block = False

    def _updates(self, commands: Sequence[_Command]) -> list[Update]:
        """What the next step brings; nothing after a failure."""
        updates = list[Update]()
        if self.failure is not None:
            return updates
        try:
            for command in commands:
                match command:
                    case Submission(requests):
                        self._arrived += requests
                    case Abort(request_ids):
                        for request_id in request_ids:
                            self.engine.abort(request_id)
                        self._arrived = deque(each for each in self._arrived if each.id not in request_ids)
                    case _:
                        updates += command
            updates += self._submitted()
            if self.engine.has_work:
                updates += self.engine.step()
        except BaseException as error:  # whatever ends the engine must be said
            self._raised = self._raised or error
        return updates

    def _submitted(self) -> list[Update]:
        """Give the engine requests that have arrived, a few at once. Returns the ends of those that it can't take."""
        ended, tokens = list[Update](), 0
        while self._arrived and tokens < _TOKENS_AT_ONCE:
            request = self._arrived.popleft()
            tokens += len(request.prompt) + len(request.encoder_prompt)
            try:
                self.engine.submit(request)
            except Exception as error:  # the request's own: such as a text that the tokenizer can't write
                finish = Finish("error", error=str(error) or type(error).__name__, is_refusal=_is_refusal(error))
                ended.append(Update(request_id=request.id, finish=finish))
        return ended

    def _report(self, updates: Sequence[Update] = (), step_tokens: Sequence[int] = ()) -> None:
        failure = None if self.failure is None else str(self.failure)
        with self._sending_lock:
            self._connection.send(Report(updates, self.engine.statistics, step_tokens, failure))

    def _receive(self) -> None:
        """Take commands while a step is computed, so that the other process never waits for its end. Sends nothing, or
        both processes could wait for each other to read.
        """
        try:
            while True:
                self._take(self._connection.recv())
        except (EOFError, OSError):  # the other process has ended
            self._is_left.set()
            self._commands.put([])  # wakes the engine's thread, whose report fails then
        except BaseException as error:  # nobody takes commands any more, which `_watch` reports
            self._raised = self._raised or error

    def _watch(self) -> None:
        """Report a failure also during a step, which may wait long for a rank that is lost."""
        with suppress(OSError):  # nobody reads it any more
            while not self._is_left.wait(_IDLE_SECONDS):
                if self.failure is not None:
                    self._report()

    def _take(self, command: Submission | Abort) -> None:
        with self._compiling_lock:
            if isinstance(command, Abort):
                self._compiling.difference_update(command.request_ids)
            elif command.grammar is not None:
                self._compiling.update(request.id for request in command.requests)
                constrain = threading.Thread(target=self._constrain, args=(command,), daemon=True)
                start_with_stack(constrain, STACK_OF_ENGINE)
                return
            self._commands.put(command)

    def _constrain(self, submission: Submission) -> None:
        """Submit those of the requests that are not aborted until their grammar is compiled, which may take seconds."""
        assert submission.grammar is not None, "others need no thread"
        constraint, refusal, is_refusal = None, "", False
        with self._compilers:
            if not self._compiling.isdisjoint(request.id for request in submission.requests):
                try:
                    constraint = self._compiled(submission.grammar)
                except BaseException as error:  # their clients wait for an answer
                    refusal, is_refusal = str(error) or type(error).__name__, _is_refusal(error)
        with self._compiling_lock:
            wanted = [request for request in submission.requests if request.id in self._compiling]
            self._compiling.difference_update(request.id for request in wanted)
            if refusal:
                finish = Finish("error", error=refusal, is_refusal=is_refusal)
                self._commands.put([Update(request_id=request.id, finish=finish) for request in wanted])
            elif wanted:
                self._commands.put(Submission([replace(request, constraint=constraint) for request in wanted]))


def _is_refusal(error: BaseException) -> bool:
    """Whether an error is a sentence about the request."""
    return isinstance(error, MegatronError)
