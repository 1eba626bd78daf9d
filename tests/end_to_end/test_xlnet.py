"""examples/xlnet: a family with samples, attention and loss of its own trains, resumes, is planned and converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import ROOT, assert_same_tensors, launch, losses, run, tensors
from tests.harness.sentences import check_line

SCRIPT = "examples/xlnet/pretrain_xlnet.py"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 12 --mem-len 8 --num-predict 4 "
    "--position-embedding-type relative --apply-residual-connection-post-layernorm --no-first-attention-norm "
    "--disable-bias-linear --add-mlp-bias --add-output-layer-bias --activation gelu --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 4 --mock-data --vocab-size 300 --num-workers 0 --log-interval 1"
)
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four iterations in one go at TP 2 x PP 2, with dropout, saved after two as well."""
    folder = tmp_path_factory.mktemp("xlnet") / "checkpoints"
    said = run(SCRIPT, f"{MODEL} {LAYOUT} --eval-iters 1 --save {folder} --save-interval 2", ranks=4)
    assert list(losses(said)) == [1, 2, 3, 4]
    assert "validation loss at iteration 4" in said
    return folder


def test_it_resumes_bit_for_bit(checkpoints: Path, tmp_path: Path) -> None:
    """Memory that was carried from batch to batch would be lost where a run is stopped."""
    flags = f"{MODEL} {LAYOUT} --eval-iters 0 --load {checkpoints} --ckpt-step 2 --save {tmp_path} --save-interval 4"
    assert list(losses(run(SCRIPT, flags, ranks=4))) == [3, 4]
    assert_same_tensors(checkpoints / "iter_0000004", tmp_path / "iter_0000004")


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_layout(checkpoints: Path) -> None:
    """The parameters of two streams are logical tensors as all others are."""
    flags = f"{MODEL} --load {checkpoints} --ckpt-step 2 --hidden-dropout 0 --eval-iters 1"
    assert list(losses(run(SCRIPT, flags))) == [3, 4]


def test_it_is_planned() -> None:
    """Figures come from the family's own modules, and none is left out for want of costs."""
    said = run(SCRIPT, f"{MODEL} {LAYOUT} --world-size 4 --dry-run")
    assert "37,485 in the model" in said
    assert "TwoStreamAttention" not in said
    rows = run(SCRIPT, f"{MODEL} {LAYOUT} --num-predict 3 --world-size 4 --dry-run", expect=2)
    check_line(rows, "--num-predict")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mem-len 30 --segments-per-sample 2", "use --segments-per-sample 4, or a smaller --mem-len"),
        ("--mem-len 1000000", "--segments-per-sample 64 and --seq-length 12; use a smaller --mem-len"),
        ("--num-predict 12", "--num-predict 12 leaves none of --seq-length 12 tokens given; use at most 11"),
        ("--reset-attention-mask", "XLNet reads whole segments of a stream of documents; leave --reset-attention-mask"),
        ("--qk-layernorm", "--qk-layernorm is not available for XLNet"),
        ("--position-embedding-type rope", "--position-embedding-type rope is not available for XLNet; use relative"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(flags: str, said: str) -> None:
    """A flag without an effect, or a memory that isn't there, would train another model than the one asked for."""
    assert said in run(SCRIPT, f"{MODEL} {flags} --dry-run --world-size 1", expect=2)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package on the path, with what pip writes of its entry point; commands are processes of their own."""
    info = tmp_path / "xlnet_family-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: xlnet-family\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[megatron.families]\nxlnet = xlnet:FAMILY\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}/examples/xlnet")


@pytest.mark.slow  # transformers is imported twice; logits are compared in process by tests/unit/models/test_xlnet.py
def test_installed_it_converts_both_ways_with_proofs(checkpoints: Path, installed: None, tmp_path: Path) -> None:
    """Logits of two segments, the second with the memory of the first, against transformers' own model."""
    pytest.importorskip("transformers")
    convert = "tools/checkpoint/convert.py"
    there = launch(convert, f"--from megatron --load {checkpoints} --to hf --save {tmp_path}/hf")
    back = launch(convert, f"--from hf --load {tmp_path}/hf --to megatron --save {tmp_path}/back --model-type xlnet")
    assert all("proof: largest difference " in said for said in (there, back))
    first, second = tensors(checkpoints / "iter_0000004"), tensors(next((tmp_path / "back").glob("iter_*")))
    assert all(torch.equal(first[name], second[name]) for name in second)
