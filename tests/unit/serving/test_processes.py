"""What the HTTP server's process gets, and what it asks of the engine's."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from pathlib import Path

import pytest

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request, Update
from megatron.core.inference.statistics import Statistics
from megatron.serving.app import Server
from megatron.serving.http_process import HttpParts
from megatron.serving.messages import Report
from megatron.serving.model import ServedModel
from megatron.serving.settings import ServerConfig
from megatron.serving.templates import Templates
from tests.harness.serving import byte_tokenizer, slow_table
from tests.unit.inference.test_detokenizer import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokenizer_reaches_the_other_process(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind](tmp_path)
    model = ServedModel(
        name="a",
        tokenizer=tokenizer,
        max_length=8,
        fingerprint="",
        end_ids=frozenset({1}),
        templates=Templates("{{ messages }}", {"bos_token": "<s>"}),
    )
    parts = HttpParts(Engine(slow_table()).limits, model, ServerConfig(port=0), ("key",))
    found: HttpParts = pickle.loads(pickle.dumps(parts))
    assert (found.limits, found.config, found.keys) == (parts.limits, parts.config, parts.keys)
    ids = list(range(min(20, tokenizer.vocab_size)))
    assert found.model.tokenizer.detokenize(ids) == tokenizer.detokenize(ids)
    assert found.model.templates is not None
    assert found.model.templates.source == "{{ messages }}"


def test_a_request_that_cannot_be_sent_or_was_left_holds_no_place() -> None:
    """It counted against the queue for ever, and held up the end of the server."""
    ours, theirs = multiprocessing.Pipe()
    tokenizer = byte_tokenizer()
    model = ServedModel(name="a", tokenizer=tokenizer, max_length=8, fingerprint="", end_ids=frozenset({1}))
    engine = Server.connected(theirs, Engine(slow_table()).limits, model, ServerConfig(port=0)).engine
    request = Request(id="a", prompt=(1,), max_tokens=2)

    async def run() -> None:
        unsent = Request(id="b", prompt=(lambda: 1,), max_tokens=2)  # type: ignore[arg-type]
        with pytest.raises((AttributeError, pickle.PicklingError)), engine.open([unsent]):
            pass
        assert engine.unfinished == 0
        engine.start()
        with engine.open([request]):
            assert engine.unfinished == 1
        assert engine.unfinished == 0
        ours.send(Report([Update(request_id="a", text="late")], Statistics(steps=7)))
        while engine.statistics.steps != 7:
            await asyncio.sleep(0.001)
        assert engine.failure is None
        ours.close()
        while engine.failure is None:
            await asyncio.sleep(0.001)
        assert engine.failure == "its process has ended"
        engine.stop()

    asyncio.run(asyncio.wait_for(run(), 60))
