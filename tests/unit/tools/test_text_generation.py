"""tools/text_generation_cli.py: as a client of a real server, in conversations, and over files of JSON lines."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request
from megatron.errors import ConfigError, DataError
from tests.harness.evaluation import SmallGPT2, small_gpt2
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.harness.serving import Running, ask, byte_tokenizer, served, slow_table
from tools import text_generation_cli
from tools.generation.batch import in_order
from tools.generation.client import _message, api_of
from tools.generation.settings import GenerateConfig

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
    check_sentence(said.err, "64")


def test_prompts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    """A form feed or U+2028 inside a prompt made two of it."""
    path = tmp_path / "prompts"
    path.write_bytes("a\r\n\nb\x0cc\u2028d\n".encode())
    config = GenerateConfig(prompt=("x",), prompt_file=str(path))
    assert text_generation_cli.prompts_of(config) == ["x", "a", "b\x0cc\u2028d"]


def test_client_asks_for_more_prompts_than_one_request_takes(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of more than 128 prompts was refused; each has the seed that it has alone."""
    path = tmp_path / "prompts"
    path.write_text("".join(f"{number}\n" for number in range(130)))
    flags = ["--tokens-to-generate", "2", "--seed", "7"]
    text_generation_cli.main([server.url.removeprefix("http://"), "--prompt-file", str(path), *flags])
    said = capsys.readouterr().out
    (alone,) = ask(server.url, "/api", {"prompts": ["129"], "tokens_to_generate": 2, "random_seed": 136}).json["text"]
    assert said.startswith("-- 1\n0") and said.endswith(f"-- 130\n{alone}\n")


def test_client_says_what_the_server_refuses(server: Running) -> None:
    address = server.url.removeprefix("http://")
    with expect_error(DataError, "400"):
        text_generation_cli.main([address, "--prompt", "Hello", "--tokens-to-generate", "9999"])
    with expect_error(ConfigError, "http://127.0.0.1:1/api"):
        text_generation_cli.main(["127.0.0.1:1", "--prompt", "Hello"])


def test_client_says_which_flags_a_server_is_not_asked_for() -> None:
    """It once said that there was no flag --chat, which there is."""
    for words, facts in {
        "--chat --stop a": ["--chat", "--stop a", "PUT /api", "--load"],
        "--load runs/a": ["--load runs/a", "run_text_generation_server.py"],
        "--no-such-flag": ["--no-such-flag"],
    }.items():
        with expect_error(ConfigError, *facts):
            text_generation_cli.main(["localhost:5000", *words.split()])
    with expect_error(ConfigError, "--request-timeout 3", "HOST:PORT"):
        text_generation_cli.main(["--load", "somewhere", "--request-timeout", "3"])


def test_client_takes_addresses_as_browsers_show_them(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    for address in (server.url, f"{server.url}/", f"{server.url}/api", server.url.replace("http", "HTTP")):
        text_generation_cli.main([address, "--prompt", "Hello", "--seed", "1", "--tokens-to-generate", "3"])
    assert len({*capsys.readouterr().out.splitlines()}) == 1
    assert api_of("https://models.example.org") == "https://models.example.org/api"
    assert api_of("[::1]:5000") == "http://[::1]:5000/api"
    for wrong in ("localhost", "ftp://localhost:1", "localhost:99999", "localhost:5000/v1", "Hello there"):
        with expect_error(ConfigError, wrong, "HOST:PORT"):
            text_generation_cli.main([wrong, "--prompt", "Hello"])


def test_client_does_not_wait_for_ever() -> None:
    """A machine that takes connections and says nothing, before an answer or in the middle of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        asked = [address, "--prompt", "Hello", "--request-timeout"]
        with expect_error(DataError, "/api", "0.1", "--request-timeout"):
            text_generation_cli.main([*asked, "0.1"])
        listener.accept()[0].close()
        half = threading.Thread(target=lambda: halves.append(listener.accept()[0]))
        halves = list[socket.socket]()
        half.start()
        sending = threading.Timer(0.05, lambda: halves[0].sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"))
        sending.start()
        with expect_error(DataError, "/api", "0.3"):
            text_generation_cli.main([*asked, "0.3"])
        half.join()
        halves[0].close()


@pytest.mark.parametrize("body", ['{"message": "no"}', '{"error": {"message": "no"}}', '{"error": "no"}', '"no"', "no"])
def test_client_finds_the_sentence_in_any_refusal(body: str) -> None:
    """Of this server, of a proxy before it, and of Megatron-LM's."""
    assert _message(body.encode()) == "no"


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
        with expect_error(DataError, "401"):
            text_generation_cli.main(words)
        monkeypatch.setenv("MEGATRON_API_KEY", "secret")
        capsys.readouterr()  # where the server listens
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
    with expect_error(ConfigError, "--chat-template FILE"):
        text_generation_cli.main([*settings, "--chat"])


@pytest.fixture
def batch(gpt2: SmallGPT2, tmp_path: Path) -> Batch:
    texts = ("The keeper", "After the storm", "It was", "Sailors", "On clear nights")
    return Batch(gpt2, tmp_path, [{"prompt": text, "id": n} for n, text in enumerate(texts)])


@dataclass
class Batch:
    """A file of questions and the command that answers it."""

    gpt2: SmallGPT2
    folder: Path
    records: list[dict[str, Any]]

    def __post_init__(self) -> None:
        self.questions, self.answers = self.folder / "questions.jsonl", self.folder / "answers.jsonl"
        self.ask(self.records)

    def ask(self, records: Sequence[dict[str, Any] | str]) -> None:
        lines = (each if isinstance(each, str) else json.dumps(each) for each in records)
        self.questions.write_text("".join(f"{line}\n" for line in lines))

    def run(self, *more: str) -> list[dict[str, Any]]:
        words = ["--load", str(self.gpt2.native), "--tokens-to-generate", "9", "--inference-max-requests", "2"]
        words += ["--input-jsonl", str(self.questions), "--output-jsonl", str(self.answers)]
        text_generation_cli.main([*words, *more])
        return [json.loads(line) for line in self.answers.read_bytes().splitlines()]


def test_a_killed_batch_goes_on(batch: Batch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its answers are those of an uninterrupted one, byte for byte."""
    found = batch.run()
    whole = batch.answers.read_bytes()
    assert [{"prompt": each["prompt"], "id": each["id"]} for each in found] == batch.records
    assert all(each["completion_tokens"] <= 9 and each["seed"] == 1234 + each["id"] for each in found)
    for length in (0, len(whole) // 3, len(whole) - 1, len(whole)):
        batch.answers.write_bytes(whole[:length])
        batch.run()
        assert batch.answers.read_bytes() == whole
    check_line(capsys.readouterr().out, "answers.jsonl", "4 of 5 answers")


def test_a_batch_goes_on_with_the_settings_it_began_with(batch: Batch, tmp_path: Path) -> None:
    """Else one file would hold answers of two temperatures, or of two checkpoints, and nobody could tell which."""
    batch.run()
    begun = b"".join(batch.answers.read_bytes().splitlines(keepends=True)[:2])
    batch.answers.write_bytes(begun)
    other = small_gpt2(tmp_path / "other", layers=1)
    for more in (("--temperature", "0"), ("--seed", "5"), ("--tokens-to-generate", "8"), ("--load", str(other.native))):
        with expect_error(ConfigError, "1"):
            batch.run(*more)
        assert batch.answers.read_bytes() == begun
    assert len(batch.run("--inference-max-requests", "3")) == 5  # which changes no text


def test_files_of_something_else_stay_as_they_are(batch: Batch) -> None:
    """A file of notes without a line end was once emptied, and questions were taken for answers."""
    batch.run()
    whole, lines = batch.answers.read_bytes(), batch.answers.read_bytes().splitlines(keepends=True)
    for held, fact in {
        b"my notes": "end",
        b"".join(lines[:2]) + b"my notes": "end",
        whole + b'{"prompt"': "end",
        b"my notes\n": "line 1",
        batch.questions.read_bytes(): "line 1",
        whole + lines[0]: "line 6",
        lines[0] + lines[2]: "line 2",
    }.items():
        batch.answers.write_bytes(held)
        with expect_error(ConfigError, batch.answers, fact):
            batch.run()
        assert batch.answers.read_bytes() == held
    asked = batch.questions.read_bytes()
    for path in (batch.questions, batch.folder / "." / "questions.jsonl"):
        with expect_error(ConfigError, "questions.jsonl", "--input-jsonl"):
            batch.run("--output-jsonl", str(path))
        assert batch.questions.read_bytes() == asked


def test_all_questions_are_checked_before_the_first_is_answered(batch: Batch) -> None:
    for line, facts in {
        "{broken": ["JSON"],
        '{"prompt": 3}': ['"prompt"'],
        '{"prompt": "a", "messages": []}': ['"prompt"', '"messages"'],
        json.dumps({"prompt": "sea " * 80}): ["tokens"],
        '{"prompt": "a", "text": "b"}': ["text"],
        '{"prompt": "a", "min_tokens": 5, "max_tokens": 4}': ["min_tokens 5", "max_tokens 4"],
        '{"prompt": "a", "logprobs": 3}': ["logprobs"],
        '{"prompt": "a", "tokens_to_generate": 3}': ["tokens_to_generate"],
        '{"prompt": "a", "max_tokens": "3"}': ["max_tokens"],
        '{"prompt": "a", "max_tokens": 0}': ["max_tokens"],
        '{"prompt": "a", "temperature": -1}': ["temperature"],
        '{"messages": [{"role": "user"}]}': ["messages[0]", '"user"', "content"],
    }.items():
        batch.ask([*batch.records, line])
        with expect_error(DataError, f"{batch.questions}:6", *facts):
            batch.run()
        assert not batch.answers.exists()


def test_a_line_has_settings_of_its_own(batch: Batch) -> None:
    """They were once ignored, and a line's seed was replaced by another."""
    plain = batch.run()
    first = plain[0]["prompt"]
    batch.answers.unlink()
    cut = plain[0]["text"][3:6]
    batch.ask(
        [
            {"prompt": first, "max_tokens": 3, "min_p": None},
            {"prompt": first, "seed": 1234, "id": 7},
            {"prompt": first, "seed": 1234, "stop": cut},
            {"prompt": first, "temperature": 0, "metadata": {"n": 1}},
            {"prompt": first, "top_k": 1},
        ]
    )
    short, same, stopped, *greedy = batch.run()
    assert short["completion_tokens"] == 3 and plain[0]["text"].startswith(short["text"])
    assert (same["text"], same["seed"], same["id"]) == (plain[0]["text"], 1234, 7)
    assert stopped["text"] == plain[0]["text"].partition(cut)[0] and stopped["finish_reason"] == "stop"
    assert greedy[0]["text"] == greedy[1]["text"] and greedy[0]["metadata"] == {"n": 1}
    whole = batch.answers.read_bytes()
    batch.answers.write_bytes(whole[: len(whole) // 2])
    batch.run()
    assert batch.answers.read_bytes() == whole


def test_results_are_in_order_whatever_ends_first() -> None:
    """Also when a later question is answered long before an earlier one, and more wait than the engine may know."""
    engine = Engine(slow_table(max_requests=2), tokenizer=byte_tokenizer())
    requests = [Request(id=str(n), prompt=(1, n), max_tokens=1 + 7 * (n % 3 == 0)) for n in range(12)]
    assert [each.request_id for each in in_order(engine, requests)] == [str(n) for n in range(12)]


def test_flags_that_exclude_each_other() -> None:
    for words, facts in {
        "--chat --prompt a": ["--prompt", "--chat"],
        "--input-jsonl a": ["--input-jsonl", "--output-jsonl"],
        "--prompt a --min-tokens 65": ["--min-tokens 65", "--tokens-to-generate 64"],
        "--system a": ["--system"],
        "--chat-template a --prompt b": ["--chat-template"],
    }.items():
        with expect_error(ConfigError, *facts):
            text_generation_cli.main(["--load", "somewhere", *words.split()])
