"""The engine's side of the connection to the HTTP server: grammars, failures, and a server that goes away."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megatron.core.inference.constrained import ConstraintCompiler
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request, StopRules, Update
from megatron.errors import ConfigError
from megatron.serving.engine_loop import EngineLoop
from megatron.serving.messages import Abort, Report, Submission
from tests.harness.serving import SlowTable, byte_tokenizer, slow_table


@contextmanager
def looping(table: SlowTable, compiled: Any = None) -> Iterator[tuple[EngineLoop, Connection]]:
    """An engine's loop, and the other end of its connection."""
    ours, theirs = multiprocessing.Pipe()
    loop = EngineLoop(Engine(table, tokenizer=byte_tokenizer()), ours, compiled)
    loop.start()
    try:
        yield loop, theirs
    finally:
        theirs.close()
        loop.join()
        assert not [each.name for each in threading.enumerate() if each.name.startswith("engine")]
        ours.close()


def updates_of(connection: Connection, *, requests: int = 1) -> list[Update]:
    """Updates until so many requests have ended."""
    found, end = list[Update](), time.monotonic() + 5
    while sum(update.finish is not None for update in found) < requests:
        assert connection.poll(end - time.monotonic()), "no report came"
        report: Report = connection.recv()
        found += report.updates
    return found


def of(name: str, **settings: Any) -> Request:
    """A request for a long text."""
    stop = StopRules(token_ids=frozenset({byte_tokenizer().eod}))
    return Request(id=name, prompt=(1, 2), stop=stop, **{"max_tokens": 200, **settings})


def test_a_grammar_is_compiled_here_and_shared() -> None:
    """A compiled one cannot be sent. Requests of one call follow it, each from its beginning."""
    tokenizer, made = byte_tokenizer(), list[str]()
    compiler = ConstraintCompiler(tokenizer, end_ids=[tokenizer.eod])
    grammar = compiler.choice(["in", "on"]).grammar

    def compiled(source: str) -> Any:
        made.append(source)
        return compiler.compiled(source)

    with looping(slow_table(), compiled) as (_, connection):
        requests = [of(name, seed=seed) for seed, name in enumerate("abc")]
        connection.send(Submission(requests, grammar))
        texts = dict.fromkeys("abc", "")
        for update in updates_of(connection, requests=3):
            texts[update.request_id] += update.text
    assert set(texts.values()) <= {"in", "on"}
    assert made == [grammar]


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    def refused(grammar: str) -> Any:
        raise ConfigError("it took more than 5 s to compile")

    with looping(slow_table(), refused) as (_, connection):
        connection.send(Submission([of("a")], "slow"))
        (update,) = updates_of(connection)
        assert update.finish is not None and update.finish.error == "it took more than 5 s to compile"
        connection.send(Submission([of("b", max_tokens=1)]))
        assert updates_of(connection)[-1].request_id == "b"


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_never_runs() -> None:
    """The abort came before the request, and so the engine wrote a whole text for nobody. Others don't wait."""
    go_on, tokenizer = threading.Event(), byte_tokenizer()
    compiler = ConstraintCompiler(tokenizer, end_ids=[tokenizer.eod])

    def slowly(grammar: str) -> Any:
        assert go_on.wait(5)
        return compiler.compiled(grammar)

    grammar = compiler.regex("(the ){150}").grammar
    with looping(slow_table(seconds=0.001), slowly) as (loop, connection):
        connection.send(Submission([of("constrained")], grammar))
        connection.send(Abort(["constrained"], grammar))
        connection.send(Submission([of("other", max_tokens=1)]))
        assert updates_of(connection)[-1].request_id == "other"
        go_on.set()
        (last,) = updates_of(connection)
        assert last.request_id == "constrained" and last.finish is not None and last.finish.reason == "abort"
        assert loop.engine.statistics.generated_tokens == 1


def test_a_failure_is_reported_until_the_server_ends() -> None:
    """Its first report may be of an effect: the loss of a rank is noticed later."""
    table = slow_table()
    with looping(table) as (loop, connection):
        table.failure = RuntimeError("the table is on fire")
        connection.send(Submission([of("a")]))
        failures = [connection.recv().failure for _ in range(2)]
        while failures[-1] is None:
            failures.append(connection.recv().failure)
        assert failures[-1] == "the table is on fire" and loop.failure is table.failure
        table.failure = RuntimeError("rank 1 is lost")
        connection.send(Submission([of("b")]))
        assert connection.recv().failure == "rank 1 is lost"


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_server_that_goes_away_ends_the_loop(seconds: float) -> None:
    """Also one that had asked for texts; it would run on for nobody."""
    with looping(slow_table(seconds=0.01)) as (loop, connection):
        connection.send(Submission([of(name, max_tokens=400) for name in "abcd"]))
        time.sleep(seconds)
        connection.close()
        loop.join(seconds=2)
        assert loop.engine.statistics.generated_tokens < 200 and loop.failure is None
