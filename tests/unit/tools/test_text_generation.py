"""tools/text_generation_cli.py: as a client of a real server, in conversations, and over files of JSON lines."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.errors import ConfigError, DataError
from tests.harness.evaluation import SmallGPT2, small_gpt2
from tests.harness.serving import Running, ask, byte_tokenizer, served, slow_table
from tools import text_generation_cli
from tools.generation.batch import in_order

TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> SmallGPT2:
    return small_gpt2(tmp_path_factory.mktemp("gpt2"))


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user enters, before the end of the input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_is_megatrons_client(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number of tokens was once evaluated as Python; here it is a number, and a wrong one ends nothing."""
    typed(monkeypatch, "Hello", "__import__('os')", "Hello", "8")
    text_generation_cli.main([server.url.removeprefix("http://"), "--temperature", "0"])
    said = capsys.readouterr()
    asked = {"prompts": ["Hello"], "tokens_to_generate": 8, "top_k": 1}
    (text,) = ask(server.url, "/api", asked, method="PUT").json["text"]
    assert said.out.endswith(f"Megatron Response: \n{text}\nEnter prompt: ")
    assert said.err == "error: give a whole number of tokens, such as 64\n"


def test_client_says_what_the_server_refuses(server: Running) -> None:
    address = server.url.removeprefix("http://")
    with pytest.raises(DataError, match=r"/api answers 400: .*tokens"):
        text_generation_cli.main([address, "--prompt", "Hello", "--tokens-to-generate", "9999"])
    with pytest.raises(ConfigError, match="http://127.0.0.1:1/api: .*is a server running there"):
        text_generation_cli.main(["127.0.0.1:1", "--prompt", "Hello"])


def test_client_sends_its_key_and_its_seed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with served(keys=["secret"]) as server:
        words = [
            server.url.removeprefix("http://"),
            "--prompt",
            "One",
            "Two",
            "--seed",
            "5",
            "--tokens-to-generate",
            "4",
        ]
        with pytest.raises(DataError, match="/api answers 401"):
            text_generation_cli.main(words)
        monkeypatch.setenv("MEGATRON_API_KEY", "secret")
        text_generation_cli.main(words)
        asked = {"prompts": ["One", "Two"], "tokens_to_generate": 4, "random_seed": 5}
        texts = ask(server.url, "/api", asked, method="PUT", headers={"authorization": "Bearer secret"}).json["text"]
    assert capsys.readouterr().out == "".join(f"-- {n}\n{text}\n" for n, text in enumerate(texts, start=1))


def test_holds_a_conversation(
    gpt2: SmallGPT2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A turn continues all that was said before it, as the template writes it."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = ["--load", str(gpt2.native), "--temperature", "0", "--tokens-to-generate", "6"]
    typed(monkeypatch, "the sea", "the log")
    text_generation_cli.main([*settings, "--chat", "--chat-template", str(tmp_path / "chat.jinja")])
    said = capsys.readouterr().out
    prompt = "user: the sea\nassistant:"
    text_generation_cli.main([*settings, "--prompt", prompt])
    first = capsys.readouterr().out.removeprefix(prompt)
    assert said.startswith(first)
    prompt = f"{prompt} {first[:-1]}\nuser: the log\nassistant:"
    text_generation_cli.main([*settings, "--prompt", prompt])
    assert said == first + capsys.readouterr().out.removeprefix(prompt)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; give one with --chat-template FILE"):
        text_generation_cli.main([*settings, "--chat"])


def test_a_killed_batch_goes_on(gpt2: SmallGPT2, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answers are those of an uninterrupted one, byte for byte."""
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    texts = ["The keeper", "After the storm", "It was", "Sailors", "On clear nights"]
    questions.write_text("".join(json.dumps({"prompt": text, "id": n}) + "\n" for n, text in enumerate(texts)))
    words = ["--load", str(gpt2.native), "--tokens-to-generate", "9", "--inference-max-requests", "2"]
    words += ["--input-jsonl", str(questions), "--output-jsonl", str(answers)]
    text_generation_cli.main(words)
    whole = answers.read_bytes()
    records = [json.loads(line) for line in whole.splitlines()]
    assert [(each["prompt"], each["id"]) for each in records] == list(zip(texts, range(5)))
    assert all(each["completion_tokens"] <= 9 and each["seed"] == 1234 + each["id"] for each in records)
    for length in (0, len(whole) // 3, len(whole) - 1, len(whole)):
        answers.write_bytes(whole[:length])
        text_generation_cli.main(words)
        assert answers.read_bytes() == whole
    assert "answers.jsonl has 4 of 5 answers; the others follow" in capsys.readouterr().out

    questions.write_text(questions.read_text().replace("It was", "It is"))
    with pytest.raises(ConfigError, match="answers.jsonl: line 3 answers another question"):
        text_generation_cli.main(words)
    assert answers.read_bytes() == whole
    for line, message in {
        "{broken": r"questions.jsonl:6 is not JSON",
        '{"prompt": 3}': r"questions.jsonl:6 is no question",
        json.dumps({"prompt": "sea " * 80}): r"questions.jsonl:6: the prompt has \d+ tokens",
    }.items():
        questions.write_text(
            "".join(json.dumps({"prompt": text, "id": n}) + "\n" for n, text in enumerate(texts)) + line
        )
        with pytest.raises(DataError, match=message):
            text_generation_cli.main(words)
        assert answers.read_bytes() == whole


def test_results_are_in_order_whatever_ends_first() -> None:
    """Also when a later question is answered long before an earlier one, and more wait than the engine may know."""
    engine = Engine(slow_table(max_requests=2), tokenizer=byte_tokenizer())
    requests = [Request(id=str(n), prompt=(1, n), max_tokens=1 + 7 * (n % 3 == 0)) for n in range(12)]
    assert [each.request.id for each in in_order(engine, requests)] == [str(n) for n in range(12)]


def test_flags_that_exclude_each_other() -> None:
    for words, message in {
        "--chat --prompt a": "--prompt and --chat are different ways to ask; keep one",
        "--input-jsonl a": "--input-jsonl and --output-jsonl belong together",
        "--system a": "--system is the first message of a conversation, and there is none",
        "--chat-template a --prompt b": "--chat-template writes conversations, and there is none",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            text_generation_cli.main(["--load", "somewhere", *words.split()])
