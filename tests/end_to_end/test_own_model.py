"""examples/own_model: a family in one folder outside the package trains, resumes, is planned, converted and proved."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import ROOT, launch, losses, run
from tests.harness.sentences import check_line

SCRIPT = "examples/own_model/pretrain_own.py"
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --position-embedding-type none "
    "--normalization RMSNorm --swiglu --disable-bias-linear --forget-floor 0.25 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 4 --mock-data --vocab-size 300 --eval-iters 0 --num-workers 0"
)
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved half-way, on four ranks, and resumed by the same command."""
    folder = tmp_path_factory.mktemp("own") / "checkpoints"
    flags = f"{MODEL} {LAYOUT} --log-interval 1 --save-interval 2 --exit-interval 2"
    first, second = (losses(run(SCRIPT, flags, "--save", str(folder), "--load", str(folder), ranks=4)) for _ in "12")
    assert (list(first), list(second)) == ([1, 2], [3, 4])
    assert first[1] > second[4]
    return folder


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package on the path, with what pip writes of its entry point; commands are processes of their own."""
    info = tmp_path / "recurrent_family-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recurrent-family\nVersion: 0.1\n")
    project = (ROOT / "examples/own_model/pyproject.toml").read_text()
    value = project.partition('[project.entry-points."megatron.families"]\n')[2].partition("\n")[0].replace('"', "")
    (info / "entry_points.txt").write_text(f"[megatron.families]\n{value}\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}/examples/own_model")


def test_it_trains_and_resumes_in_stages_and_without_an_installation_tools_say_so(checkpoints: Path) -> None:
    """A user's family had to be written into the package; a tool that doesn't know it must not guess."""
    said = run("tools/checkpoint/convert.py", f"--from megatron --load {checkpoints} --to hf --save x/y", expect=2)
    check_line(said, "recurrent")
    check_line(said, "install")


def test_it_is_planned(checkpoints: Path) -> None:
    """The dry run's figures come from the family's own modules, and it compares with the checkpoint as a start does."""
    other = f"{MODEL} --lr 3e-2".replace("--lr 1e-2 ", "")
    said = run(SCRIPT, f"{other} {LAYOUT} --world-size 4 --dry-run --load {checkpoints}", expect=2)
    assert "--override-opt_param-scheduler" in said
    said = run(SCRIPT, f"{MODEL} {LAYOUT} --world-size 4 --dry-run")
    check_line(said, "model", "50,880")
    assert "Recurrence" not in said  # no module that doesn't say what it costs
    said = run(SCRIPT, f"{MODEL} --context-parallel-size 2 --world-size 2 --dry-run", expect=2)
    check_line(said, "--context-parallel-size")


def greedy(folder: Path, prompt: list[int], *, count: int) -> list[int]:
    """A text by the example's class for transformers, each token the most likely one."""
    model = importlib.import_module("recurrent.transformers_model").RecurrentForCausalLM.from_pretrained(folder)
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@pytest.mark.slow  # tests/unit/conversion proves conversions, also of families outside the project
def test_installed_it_converts_both_ways_with_proofs(
    checkpoints: Path, installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the family's own table, against a model of transformers' that shares no code with ours."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples/own_model")
    convert = "tools/checkpoint/convert.py"
    there = launch(convert, f"--from megatron --load {checkpoints} --to hf --save {tmp_path}/hf")
    back = launch(
        convert, f"--from hf --load {tmp_path}/hf --to megatron --save {tmp_path}/back --model-type recurrent"
    )
    assert all("proof: largest difference " in said for said in (there, back))
    generated = launch(
        "tools/text_generation_cli.py",
        f"--load {tmp_path}/back --tokens-to-generate 3 --temperature 0",
        "--prompt",
        "5 9 17",
    )
    # a tool for GPTs takes a family that inherits from it
    assert " ".join(map(str, greedy(tmp_path / "hf", [5, 9, 17], count=3))) in generated.splitlines()


@pytest.mark.slow  # that the layers compute the same at TP 2 x PP 2 is what their parts' own tests prove
def test_installed_it_is_equal_to_one_rank(installed: None) -> None:
    """What a user trusts before a month of training."""
    said = launch("tools/check_parity.py", f"--model-type recurrent --shrink {MODEL} {LAYOUT} --world-size 4")
    assert said.count("  equal") == 5
