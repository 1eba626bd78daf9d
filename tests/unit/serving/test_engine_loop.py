"""The engine's side of the connection to the HTTP server: grammars, failures, and a server that goes away."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megatron.core.inference.constrained import ConstraintCompiler, Vocabulary
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Finish, Request, StopRules, Update
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.step_plan import StepPlan
from megatron.errors import ConfigError
from megatron.serving import engine_loop
from megatron.serving.engine_loop import EngineLoop
from megatron.serving.messages import Abort, Report, Submission
from tests.harness.sentences import check_sentence
from tests.harness.serving import LONG, SlowTable, byte_tokenizer, slow_table
from tests.harness.table_model import RunningTable


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
    found, end = list[Update](), time.monotonic() + 60
    while sum(update.finish is not None for update in found) < requests:
        assert connection.poll(end - time.monotonic()), "no report came"
        report: Report = connection.recv()
        found += report.updates
    return found


def wait_until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` holds; fail when it doesn't for long."""
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def failure_of(connection: Connection) -> str | None:
    """The next failure that is reported."""
    for _ in range(20):
        assert connection.poll(60), "no report came"
        report: Report = connection.recv()
        if report.failure is not None:
            return report.failure
    return None


def of(name: str, **settings: Any) -> Request:
    """A request for a long text."""
    stop = StopRules(token_ids=frozenset({byte_tokenizer().eod}))
    return Request(id=name, prompt=(1, 2), stop=stop, **{"max_tokens": 200, **settings})


def test_a_grammar_is_compiled_here_and_shared() -> None:
    """A compiled one cannot be sent. Requests of one call follow it, each from its beginning."""
    tokenizer, made = byte_tokenizer(), list[str]()
    compiler = ConstraintCompiler(Vocabulary.of(tokenizer, [tokenizer.eod]))
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

    with looping(slow_table(), refused) as (loop, connection):
        connection.send(Submission([of("a")], "slow"))
        (update,) = updates_of(connection)
        assert update.finish is not None and update.finish.error == "it took more than 5 s to compile"
        connection.send(Submission([of("b", max_tokens=1)]))
        assert updates_of(connection)[-1].request_id == "b" and not loop._compiling


def test_grammars_that_take_long_hold_up_no_other_request() -> None:
    """A request that is aborted meanwhile never runs: the engine would write a whole text for nobody."""
    go_on, tokenizer = threading.Event(), byte_tokenizer()
    compiler = ConstraintCompiler(Vocabulary.of(tokenizer, [tokenizer.eod]))
    slow, quick = (compiler.regex(pattern).grammar for pattern in ("(the ){150}", "(the ){140}"))

    def compiled(grammar: str) -> Any:
        assert grammar == quick or go_on.wait(LONG)
        return compiler.compiled(grammar)

    table = slow_table()
    with looping(table, compiled) as (loop, connection):
        with table.held():
            connection.send(Submission([of("slow")], slow))
            connection.send(Submission([of("running")], quick))
            wait_until(lambda: loop.engine.has_work)
            connection.send(Abort(["slow"]))
            connection.send(Abort(["running"]))
            wait_until(lambda: loop._commands.qsize() == 2)
        last = updates_of(connection)[-1]
        assert last.request_id == "running" and last.finish is not None and last.finish.reason == "abort"
        go_on.set()
        connection.send(Submission([of("other", max_tokens=1)]))
        assert {update.request_id for update in updates_of(connection)} == {"other"}
        time.sleep(0.1)
        assert loop.engine.statistics.running == 0


def test_a_failure_is_reported_until_the_server_ends() -> None:
    """Its first report may be of an effect: the loss of a rank is noticed later. Nothing is computed any more."""
    table = slow_table()

    def burn(plan: StepPlan) -> RunningTable:
        raise RuntimeError("the table is on fire")

    with looping(table) as (loop, connection):
        table.start = burn  # type: ignore[method-assign]
        connection.send(Submission([of("a")]))
        assert failure_of(connection) == "the table is on fire" == str(loop.failure)
        table.failure = RuntimeError("rank 1 is lost")
        assert "rank 1 is lost" in [failure_of(connection) for _ in range(4)]
        del table.start
        table.failure = None
        connection.send(Submission([of("b")]))
        assert "the table is on fire" in [failure_of(connection) for _ in range(4)]
        assert not table.plans


def test_a_rank_that_is_lost_during_a_step_is_reported_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may wait for it until the collective's time is over, and /health said 200 so long."""
    table, in_a_step, may_end = slow_table(), threading.Event(), threading.Event()

    def start(plan: StepPlan) -> RunningTable:
        in_a_step.set()
        assert may_end.wait(60)
        raise RuntimeError("rank 1 is lost")

    monkeypatch.setattr(table, "start", start)
    with looping(table) as (_, connection):
        connection.send(Submission([of("a")]))
        assert in_a_step.wait(60)
        table.failure = RuntimeError("rank 1 is lost")
        said = failure_of(connection)
        may_end.set()
    assert said == "rank 1 is lost"


def test_an_error_outside_of_steps_is_reported_too() -> None:
    """Clients waited for ever when the engine's thread ended so."""
    with looping(slow_table()) as (_, connection):
        connection.send(Submission([None]))  # type: ignore[list-item]
        check_sentence(str(failure_of(connection)))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_server_that_goes_away_ends_the_loop(has_begun: bool) -> None:
    """Also one that had asked for texts; it would run on for nobody."""
    table = slow_table()
    with looping(table) as (loop, connection):
        with table.held():
            connection.send(Submission([of(name, max_tokens=400) for name in "abcd"]))
            if has_begun:
                wait_until(lambda: loop.engine.has_work)
            connection.close()
        loop.join(seconds=LONG)
        assert loop.engine.statistics.generated_tokens <= 4 and loop.failure is None


def test_a_token_that_the_tokenizer_cannot_write_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception ended the server: also in a prompt, whose end is read before its text begins."""
    broken, tokenizer = 5, byte_tokenizer()
    spelled = tokenizer.token_bytes

    def token_bytes(token: int) -> bytes:
        if token == broken:  # some libraries fail on ids of a padded vocabulary
            raise IndexError("piece id is out of range")
        return spelled(token)

    monkeypatch.setattr(tokenizer, "token_bytes", token_bytes)
    ours, theirs = multiprocessing.Pipe()
    engine = Engine(slow_table(), tokenizer=tokenizer)
    loop = EngineLoop(engine, ours, None)  # type: ignore[arg-type]
    loop.start()
    try:
        forced = Sampling(allowed_ids=frozenset({broken}))
        written, read = of("written", sampling=forced), replace(of("read"), prompt=(1, broken))
        found_by = replace(of("beams", max_tokens=3), sampling=forced, beams=BeamSearch(width=2))
        for request in (written, read, found_by):
            theirs.send(Submission([request]))
            finish = updates_of(theirs)[-1].finish
            assert finish is not None and finish.reason == "error", request.id
            assert not finish.is_refusal
            check_sentence(str(finish.error))
        theirs.send(Submission([of("other", max_tokens=1, sampling=Sampling(allowed_ids=frozenset({7})))]))
        assert updates_of(theirs)[-1].finish == Finish("length")
        assert loop.failure is None and engine.statistics.cache_usage == 0
    finally:
        theirs.close()
        loop.join()
        ours.close()


def test_long_prompts_are_taken_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine took all choices of a prompt before its next step, and neighbours waited meanwhile."""
    monkeypatch.setattr(engine_loop, "_TOKENS_AT_ONCE", 100)
    prompt = (1, 2) * 20
    with looping(slow_table(), None) as (loop, connection):
        loop._commands.put(Submission([replace(of(str(n), max_tokens=1), prompt=prompt) for n in range(9)]))
        taken, waiting, submit, step = 0, list[int](), loop.engine.submit, loop.engine.step

        def counted(request: Request) -> None:
            nonlocal taken
            taken += 1
            submit(request)

        def stepped() -> list[Update]:
            waiting.append(taken)
            return step()

        monkeypatch.setattr(loop.engine, "submit", counted)
        monkeypatch.setattr(loop.engine, "step", stepped)
        connection.send(Submission([replace(of(f"next {n}", max_tokens=1), prompt=prompt) for n in range(12)]))
        connection.send(Abort(["next 11"]))
        updates_of(connection, requests=20)
        steps = [later - earlier for earlier, later in pairwise([0, *waiting])]
        assert max(steps) <= 3 and not loop._arrived, waiting
