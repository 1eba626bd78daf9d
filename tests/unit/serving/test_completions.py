"""/v1/completions and /v1/chat/completions: whole and streamed answers are the same, and lists have one length."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from megatron.core.inference.request import Request
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.tokenizers import gpt2_bpe
from megatron.serving.errors import ApiError
from megatron.serving.generating import check_scored
from megatron.serving.model import ServedModel
from megatron.serving.tokenizing import read_tokenize, tokenized
from tests.harness.sentences import expect_error
from tests.harness.serving import END, Running, ask, byte_tokenizer, served

PROMPTS: tuple[Any, ...] = ("hello the world", "é", [5, 6, 7], ["one", "two in"], [[1, 2], [3]], "")


def completed(running: Running, **fields: Any) -> Any:
    """The answer to a completion that must succeed."""
    reply = ask(running.url, "/v1/completions", {"model": "table", "prompt": "hello", "temperature": 0, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def joined(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Choices by index, put together from their chunks."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            kept = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
            kept["text"] += choice["text"]
            kept |= {name: choice[name] for name in ("finish_reason", "stop_reason")}
            if choice["logprobs"] is not None:
                lists = kept["logprobs"] or {name: [] for name in choice["logprobs"]}
                kept["logprobs"] = {name: lists[name] + choice["logprobs"][name] for name in lists}
    return found


def test_streamed_answers_are_those_that_come_whole(running: Running) -> None:
    """Text, log-probabilities, reasons and counts, for each prompt with each stop and echo."""
    stops: tuple[Any, ...] = (None, "e", ["qq", "\ufffd"], ["the", " "])
    for number, (prompt, stop, echo) in enumerate(itertools.product(PROMPTS, stops, (False, True))):
        fields = {"prompt": prompt, "stop": stop, "echo": echo, "n": 1 + number % 3, "logprobs": number % 3 or None}
        fields |= {"seed": number, "temperature": number % 2, "max_tokens": 12}
        whole = completed(running, **fields)
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        reply = ask(running.url, "/v1/completions", {**fields, **stream})
        events = reply.events
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["usage"] == whole["usage"] and events[-1]["choices"] == []
        assert [joined(events)[index] for index in range(len(whole["choices"]))] == whole["choices"]


def test_lists_of_logprobs_have_one_length_and_offsets_point_into_the_text(running: Running) -> None:
    """lm-eval takes token_logprobs[context:-1]; a list that is longer or shorter shifts every score."""
    for echo, most, wanted in itertools.product((False, True), (1, 7), (0, 1, 5)):
        answer = completed(running, prompt="the wörld on", echo=echo, max_tokens=most, logprobs=wanted)
        choice = answer["choices"][0]
        lists = choice["logprobs"]
        count = answer["usage"]["completion_tokens"] + echo * answer["usage"]["prompt_tokens"]
        assert {len(each) for each in lists.values()} == {count}
        assert (lists["token_logprobs"][0] is None) == echo
        for token, top, logprob in zip(lists["tokens"], lists["top_logprobs"], lists["token_logprobs"], strict=True):
            assert top is None or (token in top and len(top) <= wanted + 1 and top[token] >= logprob)
        ends = [*lists["text_offset"][1:], len(choice["text"])]
        pieces = [choice["text"][start:end] for start, end in zip(lists["text_offset"], ends, strict=True)]
        assert "".join(pieces) == choice["text"]
        for piece, token in zip(pieces, lists["tokens"], strict=True):  # after bytes that are no character, with U+FFFD
            assert piece.endswith(token) or not token.isascii()


def test_a_prompt_is_scored_without_generating(running: Running) -> None:
    """max_tokens 0 with echo: the text and its log-probabilities, and nothing more."""
    answer = completed(running, prompt=["hello", "the in"], echo=True, max_tokens=0, logprobs=1)
    assert [choice["text"] for choice in answer["choices"]] == ["hello", "the in"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [5, 3]
    assert answer["usage"]["completion_tokens"] == 0
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


def test_a_prompt_that_several_steps_read_is_scored_whole(running: Running) -> None:
    """All log-probabilities but those of its first part were missing: beyond 1,024 tokens, with the usual settings."""
    scored = {"prompt": ["hello the world on the in", "one"], "temperature": 0, "max_tokens": 3, "logprobs": 1}
    with served(options=SchedulerOptions(max_tokens=8, max_logits=4)) as in_parts:
        url = in_parts.url
        for more in ({"echo": True}, {"prompt_logprobs": 0}, {"echo": True, "prompt_logprobs": 2}):
            found = ask(url, "/v1/completions", {**scored, **more}).json
            assert found["choices"] == completed(running, **scored, **more)["choices"]
        streams = [ask(at, "/v1/completions", {**scored, "echo": True, "stream": True}) for at in (url, running.url)]
        assert joined(streams[0].events) == joined(streams[1].events)
        assert not any(each.status != 200 for each in streams)


def test_a_text_and_its_ids_are_the_same_prompt(running: Running) -> None:
    """Clients with a tokenizer of their own send ids."""
    ids = byte_tokenizer().tokenize("on the world")
    texts = [completed(running, prompt=prompt)["choices"][0]["text"] for prompt in ("on the world", ids, [ids])]
    assert len(set(texts)) == 1
    last = completed(running, prompt=ids, truncate_prompt_tokens=2, return_token_ids=True)["choices"][0]
    assert last["prompt_token_ids"] == ids[-2:]
    assert completed(running, prompt="", return_token_ids=True)["choices"][0]["prompt_token_ids"] == [
        byte_tokenizer().eod
    ]


def test_choices_depend_on_seed_and_number_alone(running: Running) -> None:
    """n = 3 with a seed begins with the text of n = 1, and a neighbour's prompt changes nothing."""
    fields = {"seed": 7, "temperature": 1, "max_tokens": 9}
    one = completed(running, prompt="hello", **fields)["choices"][0]["text"]
    three = completed(running, prompt="hello", n=3, **fields)["choices"]
    both = completed(running, prompt=["other", "hello"], n=2, **fields)["choices"]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]
    assert three[0]["text"] == both[2]["text"] == one
    assert len({choice["text"] for choice in three}) == 3
    sampled = completed(running, temperature=1)
    again = completed(running, temperature=1, seed=sampled["seed"])
    assert again["choices"] == sampled["choices"]


def test_cached_tokens_are_those_that_earlier_requests_have_left(running: Running) -> None:
    """Not those that choices of the same prompt share; whole blocks of 16, up to the last token but one."""
    for cached in (0, 32):
        usage = completed(running, prompt=[9] * 40, n=3, max_tokens=1)["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (40, cached)


def test_the_best_are_the_likeliest_a_token(running: Running) -> None:
    """best_of generates more texts than it answers with, and counts them all."""
    fields = {"seed": 3, "temperature": 1, "logprobs": 0, "max_tokens": 6}
    every = completed(running, n=8, **fields)["choices"]
    means = [sum(each["logprobs"]["token_logprobs"]) / len(each["logprobs"]["tokens"]) for each in every]
    best = completed(running, n=2, best_of=8, **fields)
    assert sorted(means, reverse=True)[:2] == [
        sum(each["logprobs"]["token_logprobs"]) / len(each["logprobs"]["tokens"]) for each in best["choices"]
    ]
    assert best["usage"]["completion_tokens"] == sum(len(each["logprobs"]["tokens"]) for each in every)


def test_a_search_finds_the_likeliest_texts(running: Running) -> None:
    """best_of beams, of which n are answered, the best first; those of /api."""
    body = {"prompt": "hello", "max_tokens": 6, "use_beam_search": True, "length_penalty": 0.5, "logprobs": 2}
    answer = ask(running.url, "/v1/completions", {**body, "n": 2, "best_of": 4}).json
    fields = {"prompts": ["hello"], "tokens_to_generate": 6, "beam_width": 4, "length_penalty": 0.5}
    texts = ask(running.url, "/api", fields).json["text"]
    assert [f"hello{each['text']}" for each in answer["choices"]] == [
        text.removesuffix("<|endoftext|>") for text in texts[:2]
    ]
    assert [each["index"] for each in answer["choices"]] == [0, 1] and answer["seed"] is None
    assert answer["usage"]["completion_tokens"] > 2 * 6  # of all beams
    for choice in answer["choices"]:
        assert len(choice["logprobs"]["tokens"]) in range(2, 7) and choice["finish_reason"] in ("length", "stop")
        assert all(1 <= len(each) <= 3 for each in choice["logprobs"]["top_logprobs"])
    for more, message in (
        ({"stream": True}, "use_beam_search cannot be streamed"),
        ({"temperature": 0.5}, "temperature has no effect with use_beam_search"),
        ({"stop": "a"}, "stop has no effect with use_beam_search"),
        ({"use_beam_search": False}, "length_penalty has no effect without use_beam_search"),
        ({"n": 9}, "beam search with 9 beams"),
    ):
        reply = ask(running.url, "/v1/completions", {**body, **more})
        assert reply.status == 400 and reply.message.startswith(message), reply.body


def test_the_end_of_a_document_ends_a_text_and_is_not_in_it(running: Running) -> None:
    """And its log-probability is listed, as lm-eval drops the last of each list."""
    for number in range(200):
        answer = completed(running, prompt=f"hello {number}", max_tokens=20, logprobs=0, return_token_ids=True)
        choice = answer["choices"][0]
        if choice["finish_reason"] == "stop":
            break
    assert choice["token_ids"][-1] == byte_tokenizer().eod and END not in choice["text"]
    assert choice["stop_reason"] is None and len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])
    longer = completed(running, prompt=f"hello {number}", max_tokens=20, ignore_eos=True)["choices"][0]
    assert longer["finish_reason"] == "length" and longer["text"].startswith(choice["text"])
    stopped = completed(running, prompt="hello", stop_token_ids=[choice["token_ids"][0]], max_tokens=300)["choices"][0]
    assert stopped["finish_reason"] in ("stop", "length")


def test_without_a_limit_a_text_has_16_tokens_or_what_is_left(running: Running) -> None:
    """OpenAI's default, and no refusal of a long prompt for a limit that nobody gave."""
    assert completed(running, ignore_eos=True)["usage"]["completion_tokens"] == 16
    assert completed(running, prompt=[5] * 509, ignore_eos=True)["usage"]["completion_tokens"] == 3
    assert (
        completed(running, prompt=[5] * 900, truncate_prompt_tokens=-1, max_tokens=9)["usage"]["prompt_tokens"] == 503
    )


def test_special_tokens_are_left_out_unless_asked_for(running: Running) -> None:
    """The end of a document amid a text, when it doesn't end the text."""
    for number in range(200):
        fields = {"prompt": f"hello {number}", "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
        choice = completed(running, **fields, logprobs=0)["choices"][0]
        if byte_tokenizer().eod in choice["token_ids"]:
            break
    shown = completed(running, **fields, skip_special_tokens=False, logprobs=0)["choices"][0]
    assert END not in choice["text"] and END in shown["text"]
    for each in (choice, shown):
        assert each["logprobs"]["text_offset"][-1] <= len(each["text"])
    assert choice["text"] == shown["text"].replace(END, "")


def test_texts_have_the_form_that_is_asked_for(running: Running) -> None:
    """A table of random logits writes JSON of a schema, one of a few texts, and what an expression matches."""
    pytest.importorskip("llguidance", reason="it compiles schemas")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"max_tokens": 100, "seed": 1, "temperature": 1}
    (choice,) = completed(running, **fields, response_format=asked)["choices"]
    assert choice["finish_reason"] == "length" or set(json.loads(choice["text"])) == {"a"}
    (choice,) = completed(running, **fields, structured_outputs={"choice": ["the world", "in"]})["choices"]
    assert choice["text"] in ("the world", "in")
    (choice,) = completed(running, **fields, structured_outputs={"regex": "[ab]{3}c"})["choices"]
    assert re.fullmatch("[ab]{3}c", choice["text"])


def test_a_special_token_has_its_id_where_texts_cannot_spell_it(tmp_path: Path) -> None:
    """lm-eval asks /tokenize for the end of a document by its name; it began texts with the token of "<" instead."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = gpt2_bpe.load(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), extra_ids=0)
    model = ServedModel(name="table", tokenizer=tokenizer, max_length=64, fingerprint="", end_ids=frozenset())

    def ids(text: str, **fields: Any) -> Any:
        asked = read_tokenize({"prompt": text, **fields}, model)
        return json.loads(bytes(tokenized(asked, model, None).body))["tokens"]

    assert ids(END, add_special_tokens=False) == [tokenizer.eod]
    assert ids(END) == tokenizer.tokenize(END) != [tokenizer.eod]
    assert ids(f"a{END}", add_special_tokens=False) == tokenizer.tokenize(f"a{END}")


UNSATISFIABLE: list[tuple[dict[str, Any], str]] = [
    (
        {
            "structured_outputs": {
                "json": {
                    "type": "object",
                    "properties": {"score": {"type": "integer", "multipleOf": 5}},
                    "required": ["score"],
                    "additionalProperties": False,
                    "patternProperties": {"^score$": {"type": "integer"}},
                }
            },
            "max_tokens": 200,
            # A comma after the number, and no spaces: then no further name is possible.
            "logit_bias": {
                str(byte_tokenizer().tokenize(each)[0]): 100 if each == "," else -100 for each in ", \t\r\n"
            },
        },
        "the schema or grammar cannot be followed: nothing satisfies it",
    ),
    (
        {"structured_outputs": {"choice": ["red", "green"]}, "max_tokens": 60, "min_tokens": 20},
        "none that the schema or grammar allows is left by min_tokens; leave one of them out",
    ),
    (
        {"structured_outputs": {"choice": ["red"]}, "allowed_token_ids": [65]},
        "none that the schema or grammar allows is left by allowed_token_ids; leave one of them out",
    ),
]


@pytest.mark.parametrize(("fields", "words"), UNSATISFIABLE)
def test_what_nothing_satisfies_is_a_mistake_of_the_request(
    fields: dict[str, Any], words: str, running: Running
) -> None:
    """It was a 500, as if the model had failed, with advice about sampling."""
    pytest.importorskip("llguidance", reason="the extra constrained is not installed")
    for more in ({}, {"n": 2}, {"use_beam_search": True, "n": 2})[: 3 if "min_tokens" in fields else 2]:
        reply = ask(running.url, "/v1/completions", {"prompt": "x", **fields, **more})
        error = reply.json["error"]
        assert (reply.status, error["param"], error["type"]) == (
            400,
            "structured_outputs",
            "invalid_request_error",
        ), reply.body
        assert words in reply.message, reply.message
    streamed = ask(running.url, "/v1/completions", {"prompt": "x", "stream": True, **fields})
    if streamed.status == 200:
        (last,) = (json.loads(line[6:]) for line in streamed.body.decode().split("\n\n") if '"error"' in line)
        assert words in last["error"]["message"] and last["error"]["param"] == "structured_outputs"
    else:
        assert words in streamed.message


def test_scored_prompts_are_bounded() -> None:
    """Each place of a long prompt with twenty alternatives takes a kilobyte: one request would fill the memory."""
    wide = [Request(id=str(number), prompt=(1,) * 3000, max_tokens=1, prompt_logprobs=20) for number in range(34)]
    check_scored(wide[:33], param="prompt_logprobs")
    with expect_error(ApiError, "2,142,000", "2,097,152"):
        check_scored(wide, param="prompt_logprobs")
