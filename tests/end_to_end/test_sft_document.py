"""docs/sft.md is pasted into shells: chats become a model that answers and stops, here and in transformers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.documents import FENCE, commands
from tests.end_to_end.commands import ROOT, command, environment, run, serving

transformers = pytest.importorskip("transformers", reason="a published model is written with it")
torch = pytest.importorskip("torch")

DOCUMENT = (ROOT / "docs/sft.md").read_text()
SMALLER = {
    "--seq-length 1024": "--seq-length 128",
    "--lr 1e-5": "--lr 5e-3",
    "--lr 1e-3": "--lr 1e-2",
    "--train-iters 100": "--train-iters 100 --log-interval 100 --num-workers 0",
}
"""What a model of 115 k random numbers needs to learn eight conversations in seconds."""
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --position-embedding-type rope"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader of the document stands: with a downloaded model, and what the quickstart leaves, both small."""
    from tools import train_tokenizer

    reader = tmp_path_factory.mktemp("reader")
    (reader / "examples").symlink_to(ROOT / "examples")
    texts = [{"text": f"Document {n}: the quick brown fox jumps over {n * 7} lazy dogs."} for n in range(100)]
    corpus, model, quickstart = reader / "corpus.jsonl", reader / "models/base", reader / "runs/quickstart"
    corpus.write_text("".join(json.dumps(text) + "\n" for text in texts))
    for name, marks in ((model, ["--special-tokens", "<|im_start|>", "<|im_end|>"]), (quickstart / "tokenizer", [])):
        train_tokenizer.main(["--input", str(corpus), "--output-dir", str(name), "--vocab-size", "300", *marks])
    (model / "chat_template.jinja").write_text(CHATML)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    files = f"--vocab-file {quickstart}/tokenizer/vocab.json --merge-file {quickstart}/tokenizer/merges.txt"
    training = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-iters 0 --num-workers 0 --mock-data"
    run(
        "pretrain_gpt.py",
        f"{SIZES} {training} --tokenizer-type GPT2BPETokenizer {files} --save {quickstart}/checkpoints",
    )
    return reader


def typed(start: str) -> list[list[str]]:
    """Words of the document's commands that begin with ``start``, with a smaller model's settings."""
    found = []
    for line in commands(FENCE.sub(lambda block: block[0] if block[1] == "bash" else "", DOCUMENT)):
        for many, few in SMALLER.items():
            line = line.replace(many, few)
        if line.startswith(start):
            found.append(shlex.split(line)[len(start.split()) :])
    return found


def chat(words: list[str], *said: str) -> list[str]:
    """The answers of a conversation in the terminal; fails for one that doesn't end."""
    done = subprocess.run(
        command("tools/text_generation_cli.py", "", *words),
        input="".join(f"{each}\n" for each in said),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "answers end with" in done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The folder after the commands of the sections 2 and 3."""
    with pytest.MonkeyPatch.context() as context:
        context.chdir(folder)
        said = run("tools/preprocess_sft.py", "", *typed("python tools/preprocess_sft.py")[0])
        (shown,) = (block for language, block in FENCE.findall(DOCUMENT) if language == "text")
        assert re.sub(r"\d+", "N", said) == re.sub(r"\d+", "N", shown)
        report = run("pretrain_gpt.py", "", *typed("python pretrain_gpt.py")[0])
        assert "checkpoints keep the end tokens of answers, <|endoftext|> (0), <|im_end|> (2), and their chat" in report
    return folder


@pytest.mark.slow  # the same model answers on the server and in transformers
def test_it_answers_and_stops_in_the_terminal(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gave a template or an end token again: answers went on to the limit, and showed their marks."""
    monkeypatch.chdir(trained)
    words = typed("python tools/text_generation_cli.py")[0]
    assert chat(words, "Name three colours.", "And three more.") == [
        "Red, green and blue.",
        "Yellow, black and white.",
    ]


def test_it_answers_and_stops_on_the_server(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The document's request, to the document's server."""
    monkeypatch.chdir(trained)
    [words], [asked] = typed("python tools/run_text_generation_server.py"), typed("curl")
    del words[words.index("--port") : words.index("--port") + 2]
    url, body = asked[0], asked[asked.index("-d") + 1]
    with serving(tmp_path / "log", *words) as address:
        request = urllib.request.Request(
            address + url.removeprefix("http://localhost:5000"), body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            [choice] = json.load(answer)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Mars.", "stop")


def test_it_answers_and_stops_in_transformers(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's program; special tokens are shown here, so that a missing end would be seen."""
    monkeypatch.chdir(trained)
    (program,) = (block for language, block in FENCE.findall(DOCUMENT) if language == "python")
    shown, found = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(shown):
        exec(program, found)
    assert shown.getvalue() == "Mars.\n"
    assert found["tokenizer"].decode(found["answer"][0]).endswith("Mars.<|im_end|>")


@pytest.mark.slow  # the same commands with another vocabulary
def test_a_model_of_ones_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's vocabulary has no marks of turns: its answers end as its documents do."""
    monkeypatch.chdir(folder)
    said = run("tools/preprocess_sft.py", "", *typed("python tools/preprocess_sft.py")[1])
    assert 'answers        10: 10 end with "<|endoftext|>" (id 0)' in said
    assert "remark" not in said
    run("pretrain_gpt.py", "", *typed("python pretrain_gpt.py")[1])
    words = typed("python tools/text_generation_cli.py")[1]
    assert chat(words, "Which planet is red?") == ["Mars."]
