"""Training on images from files: a resumed run sees the same pictures, at any layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.end_to_end.commands import assert_same_tensors, losses, run
from tests.harness.scripts import run_script
from tests.harness.sentences import check_line
from tests.tiers import tiers
from tests.unit.tools.conftest import write_lines
from tools import preprocess_images

VISION = (
    "--vision-model-type clip --img-h 8 --img-w 8 --patch-dim 4 --disable-vision-class-token --use-tiling "
    "--max-num-tiles 3 --use-thumbnail"
)
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 64 --attention-dropout 0 --hidden-dropout 0 "
    "--vision-num-layers 1 --vision-hidden-size 8 --vision-num-attention-heads 2 --vision-ffn-hidden-size 8 "
    "--lr 1e-2 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --log-interval 1 --save-interval 100 "
    "--packing best-fit --sft --split 1,0,0 --eval-iters 0 --vocab-size 50 --tokenizer-type NullTokenizer"
)
LAYOUTS = {
    "tensor and sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "context": "--context-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2",
    "data, zero 3": "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer",
}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of numbers with none, one or two pictures of several shapes; an epoch is longer than half a run."""
    folder, records = tmp_path_factory.mktemp("images"), []
    for number in range(36):
        names = [f"{number}-{picture}.png" for picture in range(number % 3)]
        for place, name in enumerate(names):
            size = (8 + 8 * (number % 4), 8 + 8 * place)
            Image.new("RGB", size, (7 * number, 255 - 7 * number, 90 * place)).save(folder / name)
        text = "".join(" " + str((number + each) % 50) for each in range(3 + number % 7))
        marks = "<image>" * len(names)
        records.append({"images": names, "prompt": f"{marks} {number % 50}" if marks else "1", "completion": text})
    source = write_lines(folder / "in.jsonl", records)
    words = f"--tokenizer-type NullTokenizer --vocab-size 50 {VISION}".split()
    preprocess_images.main(["--input", str(source), "--output-prefix", str(folder / "data"), *words])
    return folder / "data"


def test_resume_is_bitwise_the_uninterrupted_run(prefix: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, with pictures that loader processes decode."""
    whole, halves, flags = tmp_path / "whole", tmp_path / "halves", f"{MODEL} {VISION} --data-path {prefix}"
    uninterrupted = run("pretrain_vlm.py", flags, f"--save={whole}")
    first = run("pretrain_vlm.py", flags, f"--save={halves}", f"--load={halves}", "--exit-interval=3")
    second = run("pretrain_vlm.py", flags, f"--save={halves}", f"--load={halves}", "--num-workers=0")
    assert losses(first) | losses(second) == losses(uninterrupted)
    assert list(losses(second)) == [4, 5, 6]
    (last,) = whole.glob("iter_*")
    assert_same_tensors(last, halves / last.name)


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=()))
def test_other_layouts_see_the_same_pictures(layout: str, prefix: Path, tmp_path: Path) -> None:
    """A run begun on one rank goes on at each layout as on one."""
    flags = f"{MODEL} {VISION} --data-path {prefix}"
    run("pretrain_vlm.py", flags, f"--save={tmp_path}", "--exit-interval=3")
    one = run("pretrain_vlm.py", flags, f"--load={tmp_path}")
    two = run("pretrain_vlm.py", f"{flags} {LAYOUTS[layout]}", f"--load={tmp_path}", ranks=2)
    assert list(losses(one)) == list(losses(two)) == [4, 5, 6]
    for iteration, loss in losses(one).items():
        assert float(losses(two)[iteration]) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.slow(reason="tests/end_to_end/test_failing_ranks.py has ranks of which one makes a mistake")
def test_an_image_that_one_replica_misses_ends_all(prefix: Path, tmp_path: Path) -> None:
    """The other replica would wait for its gradients; and a scheduler must not start the run again."""
    lost, flags = prefix.parent / "20-1.png", f"{MODEL} {VISION} --data-path {prefix}".replace("iters 6", "iters 20")
    shutil.move(lost, tmp_path)
    try:
        ended = run_script("pretrain_vlm.py", flags.split(), ranks=2, log=tmp_path / "log")
    finally:
        shutil.move(tmp_path / lost.name, lost)
    assert ended.codes == [2, 2]
    assert ended.output.count("error: ") == 1 and "Traceback" not in ended.output
    check_line(ended.output, lost)
