"""docs/checkpoints.md is pasted into shells: its commands run in their order, each on what the ones before left."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.documents import commands
from tests.end_to_end.commands import ROOT, run
from tests.harness.sentences import check_line
from tools.checkpoint import convert, inspect_checkpoint

transformers = pytest.importorskip("transformers", reason="the proof of Hugging Face models needs it")

TOOLS = {"tools/checkpoint/convert.py": convert.main, "tools/checkpoint/inspect_checkpoint.py": inspect_checkpoint.main}
FEWER = {
    "--save-interval 500": "--save-interval 2",
    "--train-iters 500": "--train-iters 2 --eval-iters 1 --num-workers 0",
    "2GB": "50KB",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands."""
    return make_reader(tmp_path_factory.mktemp("reader"))


def make_reader(folder: Path) -> Path:
    """The ``folder``, with the repository's scripts, a downloaded model and a corpus."""
    for name in ("tools", "pretrain_gpt.py"):
        (folder / name).symlink_to(ROOT / name)
    texts = [f"Document {n}: the quick brown fox jumps over {n * 7} lazy dogs. " * 10 for n in range(1000)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "data").mkdir()
    _download(folder / "models/llama", folder / "corpus.jsonl")
    return folder


def _download(model: Path, corpus: Path) -> None:
    """A small random Llama 3 with a tokenizer, whose embedding has more rows than the tokenizer has words."""
    from tools import train_tokenizer

    train_tokenizer.main(["--input", str(corpus), "--output-dir", str(model), "--vocab-size", "300"])
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    transformers.LlamaForCausalLM(config).save_pretrained(model)


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, str]:
    """What every command of the document prints; those that are meant to may end with code 1."""
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands((ROOT / "docs/checkpoints.md").read_text()):
            if re.match(r"(python|torchrun) ", command):
                typed = command
                for many, few in FEWER.items():
                    typed = typed.replace(many, few)
                code, found[command] = _run(typed)
                assert code == ("--diff" in command), f"{command}\n{found[command]}"
    return found


def _run(typed: str) -> tuple[int, str]:
    """Exit code and output. The tools of the document run in this process, which has loaded their libraries, what it
    trains and generates with in forked ones.
    """
    program, *words = shlex.split(typed)
    ranks = int(words.pop(0).removeprefix("--nproc_per_node=")) if program == "torchrun" else 1
    script, *words = words
    if script in TOOLS:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = TOOLS[script](words)
        return code, output.getvalue()
    return 0, run(script, "", *words, ranks=ranks)


def _of(said: dict[str, str], words: str) -> Iterator[str]:
    matching = [text for command, text in said.items() if words in command]
    assert matching, f"the document has no command with {words}"
    return iter(matching)


def test_every_conversion_is_proven(said: dict[str, str]) -> None:
    conversions = list(_of(said, "convert.py"))
    assert len(conversions) == 7
    assert all(re.search(r"proof: largest difference \S+ between logits", text) for text in conversions)


def test_the_tokenizer_travels_along(said: dict[str, str], folder: Path) -> None:
    """Training takes it from the checkpoint, and the folder that goes back has it."""
    state: Any = json.loads((folder / "runs/tuned/iter_0000002/run.json").read_text())["state"]
    assert state["tokenizer"]["name"] == "HuggingFaceTokenizer"
    kept = state["config"]["tokenizer"]["tokenizer_model"]
    assert kept == "runs/llama/iter_0000000/tokenizer"
    assert (folder / kept / "tokenizer.json").exists()
    assert state["config"]["model"]["vocab_size"] == 320
    assert state["config"]["parallel"]["tensor_model_parallel_size"] == 2
    for name in ("models/tuned", "models/from_theirs", "theirs/dist/huggingface"):
        assert (folder / name / "tokenizer.json").read_bytes() == (folder / "models/llama/tokenizer.json").read_bytes()
    (text,) = _of(said, "text_generation_cli.py")
    assert text.partition("\n")[2].startswith("Once upon a time")  # after the line on how exact it is


def test_transformers_loads_the_result(said: dict[str, str], folder: Path) -> None:
    """In parts, with the tokenizer, and different from the start: it was trained."""
    assert (folder / "models/tuned/model.safetensors.index.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "models/tuned")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "models/tuned")
    assert model.config.vocab_size == 320
    assert tokenizer.decode(tokenizer("lazy dogs")["input_ids"]) == "lazy dogs"
    (difference,) = _of(said, "--diff")
    check_line(difference, "model.embedding.word_embeddings.weight", hide=[r"(?<=up to )\S+"])
    check_line(difference, "runs/tuned", "optimizer.exp_avg.decoder.final_layernorm.weight")


def test_what_inspection_prints(said: dict[str, str]) -> None:
    assert json.loads(next(_of(said, "--json")))["layout"]["tp"] == 2
    assert next(_of(said, "--verify")) == "runs/tuned/iter_0000002: whole\n"
    assert next(_of(said, "--can-load")).startswith(
        "yes: runs/tuned/iter_0000002 (iteration 2) loads at tensor parallel"
    )


def test_every_command_of_the_document_was_run(said: dict[str, str]) -> None:
    """The tests above look some of them up; none may be left out because it starts with another word."""
    assert len(said) == 15
