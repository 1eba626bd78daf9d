"""tools/run_text_generation_server.py as a user starts it: a trained model, a port, signals, and a rank that dies."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import SERVER, TINY, run, started, starting
from tests.harness.sentences import check_line
from tests.harness.serving import ask

GREEDY = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "logprobs": 1, "echo": True}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("served") / "checkpoints"
    run("pretrain_gpt.py", f"{TINY} --train-iters 10 --save {folder} --save-interval 10")
    return str(folder)


def choices(url: str) -> Any:
    """What a greedy request brings."""
    reply = ask(url, "/v1/completions", GREEDY)
    assert reply.status == 200, reply.body
    return [(choice["text"], choice["logprobs"]["tokens"]) for choice in reply.json["choices"]]


def children(process: int) -> list[int]:
    """Processes that it has started, in the order of their start."""
    return sorted(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


def test_a_model_is_served_until_sigterm(checkpoints: str, tmp_path: Path) -> None:
    """The model's name is its folder's; a text that takes longer than the shutdown may is cut, and the code is 0."""
    log = tmp_path / "log"
    with started(log, "--load", checkpoints, "--shutdown-timeout", "0.3") as (process, url):
        assert ask(url, "/v1/models").json["data"][0]["id"] == "checkpoints"
        (text, _) = choices(url)[0]
        said = run("tools/text_generation_cli.py", "--tokens-to-generate 8 --temperature 0", "--load", checkpoints,
                   "--prompt", "1 2 3")  # fmt: skip
        exactness, _, continued = said.partition("\n")
        assert continued.strip() == text
        assert exactness == "generation in float32 on cpu"  # a server has several texts at once, and says more
        assert log.read_text().startswith(f"{exactness}, not batch-invariant: ")
        assert ask(url, "/v1/completions", GREEDY).json["system_fingerprint"].startswith("iteration-10-tokenizer-")
        assert ask(url, "/health").status == 200
        form = {"structured_outputs": {"regex": "( ?[1-3])+"}}
        reply = ask(url, "/v1/completions", {"prompt": [1], "max_tokens": 8, **form})
        assert reply.status == 200, reply.body
        assert re.fullmatch("[1-3 ]+", reply.json["choices"][0]["text"])
        taken = run(SERVER, "", "--load", checkpoints, "--port", url.rpartition(":")[2], expect=2)
        check_line(taken, "Address already in use", hide=[r"(?<=--port )\d+"])
        body = {"prompt": [1], "n": 100, "max_tokens": 31, "ignore_eos": True, "stream": True}
        replies: list[bytes] = []
        client = threading.Thread(target=lambda: replies.append(ask(url, "/v1/completions", body).body))
        client.start()
        while 'num_requests_running{model_name="checkpoints"} 0.0' in ask(url, "/metrics").body.decode():
            assert client.is_alive()
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
        client.join()
        assert replies[0].endswith((b"data: [DONE]\n\n", b'"code":"shutting_down"}}\n\n'))
    assert "POST /v1/completions 200" in log.read_text() and "Traceback" not in log.read_text()
    with socket.socket() as free, pytest.raises(ConnectionRefusedError):
        free.connect(("127.0.0.1", int(url.rpartition(":")[2])))


def is_running(process: int) -> bool:
    """Whether it has not ended, also if nobody has asked for its code yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow  # two servers; tests/unit/serving has each process alone
def test_the_engine_and_http_are_two_processes_that_end_together(checkpoints: str, tmp_path: Path) -> None:
    """HTTP took time from the engine, or one of both was left alone: a port that nobody answers, a model that nobody
    can ask. The HTTP server needs no torch, and so little memory.
    """
    with started(tmp_path / "log", "--load", checkpoints) as (process, url):
        assert choices(url)
        http = children(process.pid)[-1]
        assert "libtorch" not in Path(f"/proc/{http}/maps").read_text()
        os.kill(http, signal.SIGKILL)
        assert process.wait(120) == 1
    check_line((tmp_path / "log").read_text(), "error", "signal 9")
    with started(tmp_path / "log", "--load", checkpoints) as (process, url):
        http = children(process.pid)[-1]
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while is_running(http):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow  # four servers; one signal is above
def test_a_signal_to_both_processes_lets_texts_end(checkpoints: str, tmp_path: Path) -> None:
    """As a terminal's Ctrl-C and a service manager send it: the HTTP server counted it twice, and cut the texts. One
    that comes before it listens is not lost.
    """
    body = {"prompt": [1], "n": 24, "max_tokens": 31, "ignore_eos": True, "stream": True}
    with started(tmp_path / "log", "--load", checkpoints) as (process, url), ThreadPoolExecutor(1) as clients:
        reply = clients.submit(ask, url, "/v1/completions", body)
        while 'generation_tokens_total{model_name="checkpoints"} 0.0' in ask(url, "/metrics").body.decode():
            assert not reply.done()
        for each in (*children(process.pid), process.pid):
            os.kill(each, signal.SIGINT)
        assert len(reply.result().events) > 24 * 20
        assert process.wait(120) == 0
    with starting(tmp_path / "log", "--load", checkpoints) as process:
        while len(children(process.pid)) < 2:  # that of the HTTP server is the second
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.slow  # four processes; tests/parallel/test_workers.py has the engine on ranks
def test_two_ranks_serve_one_text_and_a_dead_one_ends_both(checkpoints: str, tmp_path: Path) -> None:
    """The server would answer /health for ever, and no request, if nobody noticed. Its own sentence comes first (there
    was a CancelledError's traceback before it, as the launcher sends SIGTERM, too), and again in torchrun's report.
    """
    log = tmp_path / "log"
    with started(tmp_path / "alone", "--load", checkpoints) as (_, url):
        alone = choices(url)
    with started(log, "--load", checkpoints, ranks=2) as (process, url):
        assert choices(url) == alone
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        assert process.wait(120) != 0
    said = log.read_text()
    first, again = re.findall("error: .*", said)
    assert first == again and first.startswith("error: rank 1 of 2 is gone") and "SIGKILL" in said
    assert said.index(first) < said.index("Traceback"), "torchrun's own comes below the sentence"
    assert "CancelledError" not in said and "[rank0]" not in said


@pytest.mark.slow  # tests/unit/serving proves each bound
def test_hostile_requests_hold_nobody_up(checkpoints: str, tmp_path: Path) -> None:
    """Bodies of 8 MB stopped /health for up to 28 s, and a chain of 2,000 references ended the server."""
    size = 8_000_000
    chain = {"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(2000)}}
    chain["$defs"] |= {"2000": {"type": "integer"}}  # type: ignore[operator]
    hostile: list[tuple[str, Any]] = [
        ("/tokenize", {"prompt": "1 2 3 " * (size // 6)}),
        ("/tokenize", b'{"prompt": [' + b"[]," * 600_000 + b"1]}"),
        ("/detokenize", b'{"tokens": [' + b"5," * 1_000_000 + b"5]}"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 5, "structured_outputs": {"json": chain}}),
        ("/v1/completions", {"prompt": [1], "n": 128, "max_tokens": 30, "ignore_eos": True,
                             "logit_bias": {str(token): 1 for token in range(300)}}),
    ]  # fmt: skip
    with started(tmp_path / "log", "--load", checkpoints) as (process, url):
        before, slowest, began = choices(url), 0.0, time.monotonic()
        (http,) = (each for each in children(process.pid) if is_http(each))
        with ThreadPoolExecutor(len(hostile)) as pool:
            replies = [pool.submit(ask, url, path, body) for path, body in hostile * 2]
            while not all(each.done() for each in replies):
                start = time.monotonic()
                assert ask(url, "/health").status == 200
                slowest = max(slowest, time.monotonic() - start)
                time.sleep(0.02)
        statuses = {each.result().status for each in replies}
        assert statuses <= {200, 400, 429} and 400 in statuses, statuses
        took = time.monotonic() - began  # long on a busy machine, where each answer takes its share of that
        assert slowest < max(10.0, took / 3), (slowest, took)
        assert choices(url) == before and http in children(process.pid)
        memory = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{http}/status").read_text())
        assert memory is not None and int(memory[1]) < 1_000_000


def is_http(process: int) -> bool:
    """Whether a child of the server is its HTTP server, and not the one that tracks Python's resources."""
    return b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes()
