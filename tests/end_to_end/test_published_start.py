"""docs/start_from_published.md is pasted into shells: a published model is trained, cut off, resumed, written back."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.documents import commands
from tests.end_to_end.commands import ROOT, losses, run
from tests.end_to_end.test_checkpoint_commands import make_reader

transformers = pytest.importorskip("transformers", reason="a published model is written with it")

FEWER = {
    "--save-interval 100": "--save-interval 2",
    "--train-iters 500": "--train-iters 4 --eval-iters 0 --num-workers 0 --log-interval 1 --lr-warmup-iters 1",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader of the document stands."""
    return make_reader(tmp_path_factory.mktemp("reader"))


def typed(number: int) -> tuple[str, list[str], int]:
    """Script, words and ranks of one of the document's commands, with fewer iterations."""
    command = [*commands((ROOT / "docs/start_from_published.md").read_text())][number]
    for many, few in FEWER.items():
        command = command.replace(many, few)
    program, *words = shlex.split(command)
    ranks = int(words.pop(0).removeprefix("--nproc_per_node=")) if program == "torchrun" else 1
    return words[0], words[1:], ranks


@pytest.mark.slow  # tests/unit/conversion/test_starting.py starts from published models at each kind of layout
def test_the_document(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On four ranks; restarted when the published model is gone, the command ends as if it had not been stopped, and
    the model is that of the run.
    """
    monkeypatch.chdir(folder)
    script, words, ranks = typed(0)
    run(script, "", *words, ranks=ranks)
    script, words, ranks = typed(1)
    shown = run(script, "--dry-run --world-size 4", *words)
    assert "checkpoint: none yet, starts from the published weights in models/llama, 39,072 parameters" in shown
    assert "--save-hf: models/tuned can be written, after the last iteration" in shown
    assert not Path("runs").exists()
    assert not Path("models/tuned").exists()

    first = run(script, "--exit-interval 3", *words, ranks=ranks)
    assert "no checkpoint in runs/tuned yet: starting from the published weights in models/llama" in first
    assert re.search(r"proof: largest difference \S+ between logits", first)
    assert sorted(losses(first)) == [1, 2, 3]
    assert not Path("models/tuned").exists()
    shutil.move("models/llama", "models/gone")
    second = run(script, "", *words, ranks=ranks)
    assert "successfully loaded checkpoint from runs/tuned/iter_0000003" in second
    assert sorted(losses(second)) == [4]
    model, tokenizer = _in_transformers(Path("models/tuned"))
    assert (model.config.model_type, model.config.vocab_size, len(tokenizer)) == ("llama", 320, 300)

    shutil.move("models/gone", "models/llama")
    elsewhere = [word.replace("tuned", "whole") for word in words]
    whole = run(script, "", *elsewhere, ranks=ranks)
    assert losses(whole) == {**losses(first), **losses(second)}
    expected = _in_transformers(Path("models/whole"))[0].state_dict()
    assert all(tensor.equal(expected[name]) for name, tensor in model.state_dict().items())


def _in_transformers(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def test_one_rank_reports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another family: one sentence for all ranks, before they meet."""
    monkeypatch.chdir(folder)
    flags = "--mock-data --micro-batch-size 1 --train-iters 2 --lr 1e-3"
    said = run("pretrain_bert.py", f"--load-hf models/llama {flags}", ranks=2, expect=1)
    assert said == "error: --load-hf models/llama holds a GPT: start it with pretrain_gpt.py\n"
