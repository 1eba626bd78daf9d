"""The openai package against the server: sync, async, streams, raw responses, retries and its classes of errors."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron.serving.templates import Templates
from tests.harness.serving import Running, ask, served, slow_table

openai = pytest.importorskip("openai", reason="the openai package is a test's client")
PROMPT, MODEL = "hello the world", "table"


def test_sync_async_and_streamed_texts_are_one(running: Running) -> None:
    """The client reads whole answers, streams and raw responses."""
    with openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0) as client:
        (model,) = client.models.list().data
        assert (model.id, client.models.retrieve(MODEL).id) == (MODEL, MODEL)
        whole = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, seed=1, logprobs=2)
        choice = whole.choices[0]
        assert whole.usage is not None and whole.usage.prompt_tokens == 12 and choice.logprobs is not None
        stream = client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(each.text for chunk in chunks for each in chunk.choices) == choice.text
        assert chunks[-1].usage == whole.usage
        raw = client.completions.with_raw_response.create(
            model=MODEL, prompt=PROMPT, temperature=0, extra_headers={"x-request-id": "mine-1"}, extra_body={"top_k": 5}
        )
        assert raw.headers["x-request-id"] == "mine-1" and raw.parse().id.startswith("cmpl-")
        assert raw.parse().choices[0].text == choice.text

    async def asked() -> str:
        async with openai.AsyncOpenAI(base_url=running.url + "/v1", api_key="any") as client:
            answer = await client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, stream=True)
            return "".join([chunk.choices[0].text async for chunk in answer])

    assert asyncio.run(asked()) == choice.text


def test_errors_have_the_classes_of_the_client() -> None:
    """By status; each holds the sentence, the field and the code."""
    with served(keys=("secret",)) as running:
        url = running.url + "/v1"
        with (
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError, match="API key"),
        ):
            stranger.models.list()
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="best_of 1 is less than n 2") as refused:
                client.completions.create(model=MODEL, prompt=PROMPT, n=2, best_of=1)
            assert refused.value.param == "best_of"
            with pytest.raises(openai.NotFoundError) as refused:
                client.completions.create(model="other", prompt=PROMPT)
            assert refused.value.code == "model_not_found"
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("a/b")


def test_a_busy_server_is_asked_again() -> None:
    """The client waits for what retry-after says, and gets its text."""
    with (
        served(slow_table(max_requests=1, seconds=0.01), max_queue=0) as running,
        ThreadPoolExecutor(1) as clients,
        openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0) as impatient,
        openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=3) as patient,
    ):
        first = impatient.completions.create(
            model=MODEL, prompt="a", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(first))
        with running.table.held():
            with pytest.raises(openai.RateLimitError, match="try again in 1 s") as refused:
                impatient.completions.create(model=MODEL, prompt=PROMPT)
            assert refused.value.response.headers["retry-after"] == "1"
            waiting = clients.submit(
                patient.completions.create, model=MODEL, prompt=PROMPT, max_tokens=1, extra_body={"ignore_eos": True}
            )
            running.wait_until(lambda: 'megatron_requests_refused_total{model_name="table"} 2.0' in metrics(running))
            first.close()
        answer = waiting.result()
        assert answer.usage is not None
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 1)


def metrics(running: Running) -> str:
    return ask(running.url, "/metrics").body.decode()


def test_scripts_of_named_pages_may_ask() -> None:
    """CORS: a browser asks first with OPTIONS; other origins get no permission."""
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with served(keys=("secret",), allowed_origins=("https://page.example",)) as running:
        for origin, allowed in (("https://page.example", True), ("https://other.example", False)):
            headers = {"origin": origin, **preflight}
            reply = ask(running.url, "/v1/completions", method="OPTIONS", headers=headers)
            assert (reply.status == 200, "access-control-allow-origin" in reply.headers) == (allowed, allowed)
        reply = ask(running.url, "/v1/models", headers={"origin": "https://page.example"})
        assert reply.status == 401 and reply.headers["access-control-allow-origin"] == "https://page.example"


def test_conversations_are_held_by_the_client() -> None:
    """Whole and streamed, with counts, log-probabilities and the form that it asks for; and the likeliest answers."""
    templates = Templates("{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:", {})
    with (
        served(templates=templates) as running,
        openai.OpenAI(base_url=running.url + "/v1", api_key="any", max_retries=0) as client,
    ):
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": PROMPT}],
            "max_completion_tokens": 12,
            "seed": 3,
        }
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        (choice,) = whole.choices
        assert choice.message.role == "assistant" and choice.logprobs is not None and whole.usage is not None
        assert len(choice.logprobs.content or ()) == whole.usage.completion_tokens
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        parts = [each.delta for chunk in chunks for each in chunk.choices]
        assert "".join(part.content or "" for part in parts) == choice.message.content and parts[0].role == "assistant"
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}}}
        shaped = client.chat.completions.create(**{**asked, "max_completion_tokens": 200}, response_format=form)
        assert json.loads(shaped.choices[0].message.content or "")["a"] in (1, 2)
        del asked["seed"]
        beams = client.chat.completions.create(**asked, n=3, extra_body={"use_beam_search": True})
        assert len({each.message.content for each in beams.choices}) == 3
