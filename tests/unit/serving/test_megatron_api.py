"""/api: fields, defaults, ranges and messages of Megatron-LM's server; each refusal has status 400."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.harness.serving import Running, ask, byte_tokenizer, served

TOKENIZER = byte_tokenizer()
TEMPERATURE = "temperature must be a positive number less than or equal to 100.0"
TOP_K = "top_k must be equal to or greater than 0 and less than or equal to 1000"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompts argument required"),
    ({"prompts": None}, "prompts argument required"),
    ({"max_len": 3}, "max_len is no longer used.  Replace with tokens_to_generate"),
    ({"sentences": ["a"]}, "sentences is no longer used.  Replace with prompts"),
    ({"prompts": "a"}, "prompts is not a list of strings"),
    ({"prompts": ["a", 1]}, "prompts is not a list of strings"),
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": ["a"] * 129}, "Maximum number of prompts is 128"),
    ({"prompts": [""]}, "Empty prompts require add_BOS=true"),
    ({"tokens_to_generate": 1.5}, "tokens_to_generate must be an integer greater than 0"),
    ({"tokens_to_generate": True}, "tokens_to_generate must be an integer greater than 0"),
    ({"tokens_to_generate": -1}, "tokens_to_generate must be an integer greater than or equal to 0"),
    ({"tokens_to_generate": 0}, "tokens_to_generate=0 implies logprobs should be True"),
    ({"logprobs": 1}, "logprobs must be a boolean value"),
    ({"temperature": "x"}, TEMPERATURE),
    ({"temperature": 0}, TEMPERATURE),
    ({"temperature": 100.5}, TEMPERATURE),
    ({"temperature": True}, TEMPERATURE),
    ({"top_k": 1.5}, "top_k must be an integer equal to or greater than 0 and less than or equal to 1000"),
    ({"top_k": 1001}, TOP_K),
    ({"top_k": -1}, TOP_K),
    ({"top_p": "x"}, "top_p must be a positive float less than or equal to 1.0"),
    ({"top_p": 0.5, "top_k": 3}, "cannot set both top-k and top-p samplings."),
    ({"top_p": 1.5}, "top_p must be less than or equal to 1.0"),
    ({"top_p_decay": "x"}, "top_p_decay must be a positive float less than or equal to 1.0"),
    ({"top_p_decay": 0.5}, "top_p_decay cannot be set without top_p"),
    ({"top_p": 0.5, "top_p_decay": 1.5}, "top_p_decay must be less than or equal to 1.0"),
    ({"top_p_bound": "x"}, "top_p_bound must be a positive float less than or equal to top_p"),
    ({"top_p_bound": 0.5}, "top_p_bound cannot be set without top_p"),
    ({"top_p": 0.5, "top_p_bound": 0.6}, "top_p_bound must be greater than 0 and less than top_p"),
    ({"add_BOS": 1}, "add_BOS must be a boolean value"),
    ({"stop_on_double_eol": "x"}, "stop_on_double_eol must be a boolean value"),
    ({"stop_on_eol": 0}, "stop_on_eol must be a boolean value"),
    ({"prevent_newline_after_colon": []}, "prevent_newline_after_colon must be a boolean value"),
    ({"no_log": {}}, "no_log must be a boolean value"),
    ({"random_seed": 1.5}, "random_seed must be integer"),
    ({"random_seed": -1}, "random_seed must be a positive integer"),
    ({"beam_width": 1.5}, "beam_width must be integer"),
    ({"beam_width": 0}, "beam_width must be an integer from 1 to 1,000"),
    ({"beam_width": 1001}, "beam_width must be an integer from 1 to 1,000"),
    ({"beam_width": 2, "prompts": ["a", "b"]}, "When doing beam_search, batch size must be 1"),
    ({"beam_width": 2, "stop_token": "x"}, "stop_token must be an integer"),
    ({"beam_width": 2, "stop_token": 5000}, "stop_token has the token id 5000; this model has 0 to"),
    ({"beam_width": 2, "length_penalty": "x"}, "length_penalty must be a float"),
    ({"beam_width": 2, "temperature": 0.5}, "temperature has no effect with beam_width"),
    ({"beam_width": 2, "stop_on_eol": True}, "stop_on_eol has no effect with beam_width"),
    ({"beam_width": 2, "tokens_to_generate": 0, "logprobs": True}, "beam_width needs tokens_to_generate above 0"),
    ({"beam_width": 9}, "beam search with 9 beams: give 1 to 8"),
    ({"stop_token": 5}, "stop_token cannot be set without beam_width"),
    ({"length_penalty": 1.0}, "length_penalty cannot be set without beam_width"),
    (
        {"prompts": ["a", "bb"], "tokens_to_generate": 511},
        "prompts[1] has 2 tokens; with tokens_to_generate 511 that "
        "makes 513, and a text has at most 512 here, the prompt included: shorten it, or lower tokens_to_generate to",
    ),
    (
        {"prompts": ["a" * 512]},
        "prompts[0] has 512 tokens, and a text has at most 512 here, the prompt included: shorten",
    ),
    ({"prompts": ["a"], "tokens_to_generate": 512}, "prompts[0] has 1 token; with"),
    ({"tokens_to_genrate": 5}, '"tokens_to_genrate" is not a field of /api (did you mean tokens_to_generate?)'),
]


def generated(running: Running, **fields: Any) -> Any:
    """The answer to a request that must succeed."""
    reply = ask(running.url, "/api", {"prompts": ["hello"], **fields}, method="PUT")
    assert reply.status == 200, reply.body
    return reply.json


def test_refusals_have_megatron_lms_sentences_and_status_400(running: Running) -> None:
    """Its server sends most of them with status 200, so that clients take the sentence for a text."""
    for number, (fields, message) in enumerate(REFUSED):
        body = fields if not fields or "prompts" in fields else {"prompts": ["a"], **fields}
        reply = ask(running.url, "/api", body, method=("PUT", "POST")[number % 2])
        assert reply.status == 400, (fields, reply.body)
        assert reply.json["message"] == reply.message and reply.message.startswith(message), (fields, reply.message)


def test_other_refusals_have_a_message_too() -> None:
    """Megatron-LM's clients read it, and failed on a missing key, a wrong method and an error of the server."""
    with served(keys=("secret",)) as running:
        key = {"authorization": "Bearer secret"}
        replies = [
            ask(running.url, "/api", {"prompts": ["a"]}),
            ask(running.url, "/api", b"{}", method="DELETE", headers=key),
        ]
        running.server.engine.check = lambda requests: 1 / 0  # type: ignore[method-assign, assignment]
        replies.append(ask(running.url, "/api", {"prompts": ["a"]}, headers=key))
        assert [reply.status for reply in replies] == [401, 405, 500]
        assert all(reply.json["message"] == reply.message for reply in replies)
        assert "message" not in ask(running.url, "/v1/completions", {"prompt": "a"}).json


def test_numbers_may_be_whole(running: Running) -> None:
    """JSON writers spell 1.0 as 1; Megatron-LM's server refuses that for floats."""
    assert generated(running, top_p=1)["text"] and generated(running, temperature=1, top_p=0, top_k=2.0)["text"]


def test_segments_are_the_text_and_logprobs_are_of_all_tokens_but_the_first(running: Running) -> None:
    """The prompt is in both, as clients of Megatron-LM expect; the key logprobs is always there."""
    answer = generated(running, prompts=["hello the world", "é"], tokens_to_generate=5, logprobs=True, random_seed=3)
    assert set(answer) == {"text", "segments", "logprobs"}
    for prompt, text, segments, logprobs in zip(("hello the world", "é"), *answer.values(), strict=True):
        assert "".join(segments) == text and text.startswith(prompt)
        assert len(logprobs) == len(segments) - 1
    assert generated(running)["logprobs"] is None
    scored = generated(running, prompts=["hello"], tokens_to_generate=0, logprobs=True)
    assert scored["text"] == ["hello"] and len(scored["logprobs"][0]) == 4
    assert generated(running, prompts=[""], add_BOS=True, tokens_to_generate=2)["segments"][0][0] == "<|endoftext|>"


def test_a_seed_and_a_number_make_a_text(running: Running) -> None:
    """Prompt i has seed s + i, so its text doesn't depend on its neighbours."""
    both = generated(running, prompts=["one", "hello"], random_seed=4)["text"]
    alone = generated(running, prompts=["hello"], random_seed=5)["text"]
    assert both[1] == alone[0] != generated(running, prompts=["hello"], random_seed=6)["text"][0]


def test_beams_are_the_likeliest_texts(running: Running) -> None:
    """All of them, the best first, each with the score that its log-probabilities make; one beam is the greedy text."""
    settings = {"tokens_to_generate": 6, "logprobs": True}
    answer = generated(running, beam_width=4, length_penalty=0.5, **settings)
    assert len(set(answer["text"])) == len(answer["scores"]) == 4 and answer["scores"] == sorted(answer["scores"])[::-1]
    for text, segments, logprobs, score in zip(*(answer[key] for key in ("text", "segments", "logprobs", "scores"))):
        assert "".join(segments) == text and text.startswith("hello")
        new = len(segments) - len(TOKENIZER.tokenize("hello"))
        assert score == pytest.approx(sum(logprobs[-new:]) / new**0.5)
    (greedy,) = generated(running, top_k=1, **settings)["text"]
    assert generated(running, beam_width=1, **settings)["text"] == [greedy]
    body = {"prompt": "hello", "max_tokens": 1, "use_beam_search": True, "return_token_ids": True}
    (first,) = ask(running.url, "/v1/completions", body).json["choices"][0]["token_ids"]
    ended = generated(running, beam_width=2, stop_token=first, length_penalty=0, **settings)
    assert min(map(len, ended["segments"])) == len(TOKENIZER.tokenize("hello")) + 1


def test_a_newline_ends_a_text_whatever_its_ids_are(running: Running) -> None:
    """Megatron-LM's server knows the ids of GPT-2 alone; here a token may be two newlines."""
    settings = {"random_seed": 0, "tokens_to_generate": 300, "prompts": ["hello\n"] * 12}
    whole, prompt = generated(running, **settings)["segments"], len(TOKENIZER.tokenize("hello\n"))
    for field, stop in (("stop_on_eol", "\n"), ("stop_on_double_eol", "\n\n")):
        found = generated(running, **settings, **{field: True})["segments"]
        has_ended = [stop in "".join(each[prompt:]) for each in whole]
        assert any(has_ended)
        for each, text, ended in zip(whole, found, has_ended, strict=True):
            assert text == each[: len(text)]
            assert stop not in "".join(text[prompt:-1])
            assert stop in "".join(text[prompt:]) if ended else text == each


def test_no_newline_follows_a_colon(running: Running) -> None:
    """The prompt ends with one, and the likeliest token is a newline."""
    prompts = [f"{number}:" for number in range(1000)]
    settings = {"top_k": 1, "tokens_to_generate": 1}
    for at in range(0, 1000, 100):
        texts = generated(running, prompts=prompts[at : at + 100], **settings)["text"]
        found = [prompt for prompt, text in zip(prompts[at:], texts) if text == f"{prompt}\n"]
        if found:
            (text,) = generated(running, prompts=found[:1], **settings, prevent_newline_after_colon=True)["text"]
            assert text.startswith(found[0]) and not text.endswith("\n")
            return
    raise AssertionError("no newline followed a colon")


def test_the_line_of_megatron_lms_readme_works(running: Running) -> None:
    """curl with PUT, a JSON content type with a charset, and nothing else."""
    command = ["curl", "-s", f"{running.url}/api", "-X", "PUT", "-H", "Content-Type: application/json; charset=UTF-8"]
    try:
        done = subprocess.run(
            [*command, "-d", '{"prompts":["Hello world"], "tokens_to_generate":1}'], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no curl")
    assert b'"text":["Hello world' in done.stdout
