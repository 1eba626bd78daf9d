"""Generation with a T5: the encoder reads the prompt, and the text is the decoder's."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.models.t5.generation import likeliest_answer
from megatron.core.models.t5.model import T5Model
from megatron.core.parallel.environment import launch_environment
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer
from megatron.errors import ConfigError, DataError
from megatron.serving.serve import served_model
from megatron.serving.settings import ServerConfig
from megatron.training.checkpoints.trained_model import trained_model
from megatron.training.evaluation.generating import generation_engine
from tests.harness.runs import PIECES, saved_model
from tests.harness.scripts import run_script
from tests.harness.sentences import expect_error
from tests.harness.serving import ask, listening
from tools import text_generation_cli
from tools.generation.families import GENERATIVE

PROMPTS = ["the cat sat on a mat.", "the dogs"]
WORDS = f"--vocab-extra-ids 3 --vocab-size {len(PIECES) + 5}"
FLAGS = "--position-embedding-type relative --decoder-seq-length 8 --untie-embeddings-and-output-weights --seed 7"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A checkpoint, and what its model says to ``PROMPTS`` when the whole text is read for every token."""
    folder = tmp_path_factory.mktemp("t5")
    run = saved_model(folder, "t5", WORDS, flags=FLAGS)
    tokenizer, model = cast("WordPieceTokenizer", run.tokenizer), cast("T5Model", run.models[0].eval())
    begin, end = tokenizer.decoder_start, tokenizer.eos
    assert begin is not None and end is not None
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.tokenize(prompt)
        answer = likeliest_answer(model, ids, begin=begin, end=end, most=7, device=torch.device("cpu"))
        texts.append(tokenizer.detokenize(answer[: answer.index(tokenizer.eod)] if tokenizer.eod in answer else answer))
    assert len(set(texts)) == 2, "an answer to every text would show little"
    return f"{folder}/saved", texts


def test_the_encoder_reads_the_prompt(
    said: tuple[str, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the answer in lines of JSON is the text alone."""
    folder, texts = said
    words = ["--load", folder, "--tokens-to-generate", "7", "--temperature", "0"]
    text_generation_cli.main([*words, "--prompt", *PROMPTS])
    printed = capsys.readouterr().out
    assert printed == "".join(f"-- {n}\n{PROMPTS[n - 1]}\n=> {texts[n - 1]}\n" for n in (1, 2))

    (tmp_path / "asked").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
    text_generation_cli.main([*words, "--input-jsonl", f"{tmp_path}/asked", "--output-jsonl", f"{tmp_path}/answers"])
    answers: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    assert [each["text"] for each in answers] == texts
    assert [each["prompt_tokens"] for each in answers] == [7, 3]


@pytest.mark.slow  # tests/parallel/test_workers.py has the same engine on the same stages
def test_one_rank_may_have_the_encoder(said: tuple[str, list[str]], tmp_path: Path) -> None:
    folder, texts = said
    words = ["--load", folder, "--tokens-to-generate", "7", "--temperature", "0", "--prompt", *PROMPTS]
    words += ["--pipeline-model-parallel-size", "2"]
    ended = run_script("tools/text_generation_cli.py", words, ranks=2, log=tmp_path / "log")
    assert ended.code == 0, ended.output
    assert all(f"{prompt}\n=> {text}\n" in ended.output for prompt, text in zip(PROMPTS, texts))


def test_the_encoder_reads_a_conversation(
    said: tuple[str, list[str]], template: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chat template writes it."""
    folder, texts = said
    words = ["--load", folder, "--tokens-to-generate", "7", "--temperature", "0"]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPTS[0]}\n"))
    text_generation_cli.main([*words, "--chat", "--chat-template", template])
    assert capsys.readouterr().out == f"{texts[0]}\n"


def test_what_a_t5_cannot_do_is_said(said: tuple[str, list[str]], tmp_path: Path) -> None:
    folder, _ = said
    words = ["--load", folder, "--tokens-to-generate", "7"]
    with expect_error(ConfigError, "--chat-template FILE"):
        text_generation_cli.main([*words, "--chat"])
    with expect_error(DataError, "1", "30 tokens", "16"):
        text_generation_cli.main([*words, "--prompt", "cat " * 30])
    with expect_error(DataError, "1", "64", "16", "15"):
        text_generation_cli.main(["--load", folder, "--prompt", "cat"])
    saved_model(tmp_path, "t5", None, flags=FLAGS)
    with expect_error(ConfigError, "NullTokenizer"):
        text_generation_cli.main(["--load", f"{tmp_path}/saved", "--prompt", "1 2"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A chat template that writes the messages alone, with the tokens around a whole text."""
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    return str(path)


@pytest.fixture(scope="module")
def url(said: tuple[str, list[str]], template: str) -> Iterator[str]:
    """Of a server of the checkpoint."""
    choice = TrainedModelConfig(load=said[0])
    config = ServerConfig(port=0, no_access_log=True, chat_template=template)
    with (
        trained_model(choice, GENERATIVE, launch_environment({})) as trained,
        generation_engine(trained, InferenceConfig()) as engine,
    ):
        assert engine is not None
        model = served_model(trained, config, max_length=engine.limits.max_length)
        with listening(engine, model, config) as (_, address):
            yield address


def test_a_server_answers_with_the_decoders_text(said: tuple[str, list[str]], url: str) -> None:
    """Whole, as a stream, of token ids, and with log-probabilities; prompts are counted as the encoder reads them."""
    body = {"prompt": PROMPTS, "max_tokens": 7, "temperature": 0, "skip_special_tokens": False, "logprobs": 0}
    answer = ask(url, "/v1/completions", body | {"return_token_ids": True}).json
    assert [each["text"] for each in answer["choices"]] == said[1]
    assert answer["usage"]["prompt_tokens"] == 10 and len(answer["choices"][0]["prompt_token_ids"]) == 7
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["text_offset"][0] == 0 and all(value <= 0 for value in logprobs["token_logprobs"])
    ids = [each["prompt_token_ids"] for each in answer["choices"]]
    assert [each["text"] for each in ask(url, "/v1/completions", body | {"prompt": ids}).json["choices"]] == said[1]
    events = ask(url, "/v1/completions", body | {"prompt": PROMPTS[0], "stream": True}).events
    assert "".join(each["choices"][0]["text"] for each in events) == said[1][0]
    assert ask(url, "/v1/completions", {"prompt": "cat " * 16, "temperature": 0}).status == 200


def test_megatron_lms_endpoint_and_chat_answer_too(said: tuple[str, list[str]], url: str) -> None:
    """With the decoder's text alone, which doesn't continue the prompt."""
    answer = ask(url, "/api", {"prompts": PROMPTS, "tokens_to_generate": 7, "top_k": 1, "logprobs": True}).json
    assert [text.removesuffix(" [SEP]") for text in answer["text"]] == said[1]  # the end is in its texts
    for segments, logprobs in zip(answer["segments"], answer["logprobs"], strict=True):
        assert len(segments) == len(logprobs) and all(value <= 0 for value in logprobs)
    beams = ask(url, "/api", {"prompts": PROMPTS[:1], "tokens_to_generate": 7, "beam_width": 3}).json
    assert len(set(beams["text"])) == len(beams["scores"]) == 3
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0, "skip_special_tokens": False}
    reply = ask(url, "/v1/chat/completions", {**body, "max_tokens": 7}).json
    assert reply["choices"][0]["message"]["content"] == said[1][0] and reply["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (
            "/api",
            {"prompts": ["cat"], "tokens_to_generate": 0, "logprobs": True},
            "tokens_to_generate",
            "tokens_to_generate=0 scores prompts, and the",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "cat"}], "continue_final_message": True},
            "continue_final_message",
            "continue_final_message goes on with a message, and the",
        ),
        ("/v1/completions", {"prompt": "cat", "echo": True}, "echo", "echo begins a text with its prompt, and the"),
        (
            "/v1/completions",
            {"prompt": "cat", "prompt_logprobs": 1},
            "prompt_logprobs",
            "prompt_logprobs score a prompt",
        ),
        (
            "/v1/completions",
            {"prompt": "cat " * 17},
            "prompt",
            "17 tokens, and the encoder reads at most 16",
        ),
        ("/v1/completions", {"prompt": "cat", "max_tokens": 16}, "max_tokens", "lower max_tokens to 15"),
        ("/v1/completions", {"prompt": "cat", "max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be 1 or more$"),
    ],
    ids=["api", "chat going on", "echo", "scores", "long", "room", "none"],
)
def test_a_server_refuses_what_continues_prompts(
    url: str, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    reply = ask(url, path, body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert re.search(message, reply.message)


def test_the_end_of_a_decoders_text_is_named(url: str) -> None:
    """/tokenizer_info named [SEP], which ends documents, as the end of its texts; and max_tokens 0 was said to work."""
    assert ask(url, "/tokenizer_info").json["eos_token"] == "[EOS]"
