"""inspect_checkpoint.py answers what is in a checkpoint, if it is whole, what changed, and if a run could load it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.checkpointing import storage
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import read_run_state
from megatron.core.checkpointing.manifest import MANIFEST, Manifest, checksum
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.loading import check_same_model
from megatron.training.checkpoints.saving import Saver
from tests.harness.runs import TINY_RUN, tiny_run
from tests.harness.sentences import check_line, expect_error
from tools.checkpoint import inspect_checkpoint as tool

FLAGS = f"{TINY_RUN} --mock-data --train-iters 3"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 1 and 2 of a run, the second with other weights."""
    root = tmp_path_factory.mktemp("run")
    run = tiny_run(ParallelContext.single(), f"--mock-data --swiglu --save {root} --save-interval 1")
    for iteration in (1, 2):
        run.progress.iteration, run.progress.consumed_samples = iteration, 8 * iteration
        with torch.no_grad():
            run.models[0].get_parameter("decoder.final_layernorm.weight")[3] += 0.25 * (iteration - 1)
        Saver(run).save()
    return root


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The exit code of the tool, and what it printed."""

    def run(*words: str | Path) -> tuple[int, str]:
        code = tool.main([str(word) for word in words])
        return code, capsys.readouterr().out

    return run


Said = Callable[..., tuple[int, str]]


def test_the_page(root: Path, said: Said) -> None:
    """Sizes, types, layout, progress, versions and what was set, without reading a number."""
    with mock.patch.object(storage.CheckpointReader, "load_box", side_effect=AssertionError("tensor data was read")):
        code, text = said(root)
    assert code == 0
    assert text.startswith(f"{root}/iter_0000002\n")
    for words in (
        "iteration 2, 16 samples consumed",
        "model       gpt, 9,840 parameters in 28 tensors",
        "exp_avg (9,840 in 28 tensors), exp_avg_sq (9,840 in 28 tensors)",
        "saved by 1 rank (nothing split); loads at any layout",
        f"torch {torch.__version__}",
        "hidden_size                        16",
        "activation                         swiglu",
        "embedding.word_embeddings.weight                    fp32  51 x 16  (816)",
    ):
        assert words in text, words
    check_line(said(root, "--ckpt-step", "1")[1], "iteration 1", "8")


def test_another_family(said: Said, tmp_path: Path) -> None:
    """The checkpoint says that it is a BERT: its own settings are shown, and whether its own command could load it."""
    run = tiny_run(
        ParallelContext.single(),
        f"--mock-data --bert-no-binary-head --save {tmp_path} --save-interval 1",
        family=FAMILIES["bert"],
    )
    Saver(run).save()
    _, text = said(tmp_path)
    assert "model       bert, " in text and "bert_binary_head                   False" in text
    assert said(tmp_path, "--can-load", *FLAGS.split(), "--bert-no-binary-head")[0] == 0
    code, text = said(tmp_path, "--can-load", *FLAGS.split())
    assert (code, text[:3]) == (1, "no:")
    check_line(text, "--bert-binary-head")
    check_line(said(tmp_path, "--can-load", *FLAGS.split(), "--fim-rate", "0.5")[1], "--fim-rate", "BERT")


def test_json(root: Path, said: Said) -> None:
    """Scripts get the same, whole."""
    found = json.loads(said(root, "--json")[1])
    assert (found["iteration"], found["parameters"], found["dtypes"]) == (2, 9840, {"fp32": 9840})
    assert found["tensors"]["decoder.final_layernorm.bias"] == {"shape": [16], "dtype": "fp32"}
    assert found["state"]["config"]["model"]["activation"] == "swiglu"
    assert found["layout"]["tp"] == 1


def test_verify_names_the_damaged_file(root: Path, said: Said, tmp_path: Path) -> None:
    """And leaves with an exit code that a script sees."""
    assert said(root, "--verify") == (0, f"{root}/iter_0000001: whole\n{root}/iter_0000002: whole\n")
    assert said(root, "--verify", "--ckpt-step", "1") == (0, f"{root}/iter_0000001: whole\n")
    with expect_error(CheckpointError, "1", "--ckpt-step 2"):
        said(root / "iter_0000001", "--verify", "--ckpt-step", "2")
    shutil.copytree(root, tmp_path / "copy")
    data = tmp_path / "copy/iter_0000002/__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    code, text = said(tmp_path / "copy", "--verify")
    assert code == 1
    assert "iter_0000001: whole" in text
    check_line(text, "iter_0000002", "__0_0.distcp")
    listed = tmp_path / "copy/iter_0000001/manifest.json"
    listed.write_text(dataclasses.replace(Manifest.read(listed.parent), files={}).to_json())
    code, text = said(listed.parent, "--verify")
    assert (code, "manifest.json does not list .metadata" in text) == (1, True)
    (tmp_path / "copy/iter_0000001/run.json").unlink()
    shutil.copy(root / "iter_0000001/manifest.json", listed)
    check_line(said(tmp_path / "copy/iter_0000001", "--verify")[1], "run.json")


def test_diff(root: Path, said: Said) -> None:
    """Two iterations differ in one number; a checkpoint equals itself."""
    first, second = root / "iter_0000001", root / "iter_0000002"
    code, text = said("--diff", first, second)
    assert code == 1
    assert text.splitlines() == [
        "setting progress.consumed_samples: 8 and 16",
        "setting progress.iteration: 1 and 2",
        "tensor model.decoder.final_layernorm.weight: up to 0.25",
        "83 tensors are equal, 1 differ",
    ]
    assert said("--diff", first, first) == (0, "84 tensors are equal, 0 differ\n")


def test_diff_of_other_shapes_and_names(root: Path, said: Said, tmp_path: Path) -> None:
    """What only one of the two has, and what changed its size."""
    run = tiny_run(
        ParallelContext.single(),
        f"--mock-data --swiglu --save {tmp_path} --save-interval 1 --vocab-size 60 --no-save-optim",
    )
    Saver(run).save()
    code, text = said("--diff", root, tmp_path)
    assert code == 1
    assert "setting config.model.vocab_size: 51 and 61" in text or "setting config.tokenizer.vocab_size" in text
    check_line(text, "model.embedding.word_embeddings.weight", "[51", "16]", "[61", "16]")
    check_line(text, root, "optimizer.exp_avg.decoder.final_layernorm.bias")


@pytest.mark.parametrize(
    "more",
    [
        "--swiglu",
        "--swiglu --tensor-model-parallel-size 2",
        "--swiglu --bf16 --micro-batch-size 8",
        "--use-checkpoint-args --finetune",
        "--swiglu --no-load-optim",
        "--swiglu --vocab-size 50 --train-iters 99 --lr 3 --override-opt_param-scheduler",
        "--swiglu --train-iters 99 --lr 3 --use-checkpoint-opt_param-scheduler",
        "--swiglu --lr 3 --finetune",
        "--swiglu --optimizer sgd --no-load-optim",
        "--swiglu --micro-batch-size 1 --world-size 8",
    ],
)
def test_what_can_load(more: str, root: Path, said: Said) -> None:
    """Layout, precision and batch never stand in the way, nor a schedule or optimizer where flags say what counts."""
    code, text = said(root, "--can-load", *FLAGS.split(), *more.split())
    assert (code, text[:5]) == (0, "yes: ")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("", "is of another architecture: --activation is swiglu in the checkpoint and gelu_tanh here"),
        ("--swiglu --num-layers 4", "--num-layers is 2 in the checkpoint and 4 here"),
        ("--swiglu --hidden-size 32", "--hidden-size is 16 in the checkpoint and 32 here"),
        ("--swiglu --vocab-size 77", "is 51 in the checkpoint and 78 here"),
        ("--swiglu --ckpt-step 7", "holds no usable checkpoint of --ckpt-step 7"),
        ("--swiglu --num-attention-heads 3", "is not divisible by"),
        ("--swiglu --lr 3", "max_lr: 3.0 from the flags (--lr), 0.01 in the checkpoint"),
        ("--swiglu --train-iters 9", "(for 1 rank and batches of 8; --world-size says how many there are)"),
        ("--swiglu --train-iters 9 --world-size 4", "72 from the flags"),
        ("--swiglu --optimizer sgd", "lacks optimizer.momentum, which --optimizer sgd continues from"),
        ("--swigllu", "there is no flag --swigllu (did you mean --swiglu?)"),
    ],
)
def test_what_cannot_load_and_why(more: str, reason: str, root: Path, said: Said) -> None:
    """The sentence that training would end with, before a job waits in a queue for it."""
    code, text = said(root, "--can-load", *FLAGS.split(), *more.split())
    assert code == 1
    assert text.startswith("no: ")
    assert reason in text


def test_flags_that_are_younger_than_the_checkpoint(root: Path) -> None:
    """A run saved before there were windows had none: --window-size trained it on as another model."""
    folder = find_checkpoint(root, verify=False)
    state = read_run_state(folder)
    model = {name: value for name, value in state["config"]["model"].items() if name != "window_size"}
    older = {**state, "config": {**state["config"], "model": model}}

    def check(more: str) -> None:
        run = tiny_run(ParallelContext.single(), f"--mock-data --swiglu {more}")
        check_same_model(older, folder, model_name="gpt", config=run.config, tokenizer=run.tokenizer)

    check("")
    with expect_error(CheckpointError, "--window-size", "3", "0"):
        check("--window-size 3,0")


def test_weights_alone_need_to_be_asked_for(said: Said, tmp_path: Path) -> None:
    """A checkpoint without optimizer state loads only where a run says so."""
    Saver(tiny_run(ParallelContext.single(), f"--mock-data --save {tmp_path} --save-interval 1 --no-save-optim")).save()
    code, text = said(tmp_path, "--can-load", *FLAGS.split())
    assert code == 1
    check_line(text, "optimizer")
    assert said(tmp_path, "--can-load", *FLAGS.split(), "--finetune")[0] == 0


def test_mistakes(tmp_path: Path) -> None:
    """Nothing there, nothing named."""
    with expect_error(CheckpointError, f"{tmp_path}/nowhere"):
        tool.main([str(tmp_path / "nowhere")])
    with expect_error(CheckpointError):
        tool.main([str(tmp_path), "--verify"])
    with expect_error(ConfigError):
        tool.main([])
    for words, fact in (
        ("x --json --verify", "--verify"),
        ("--diff x y --can-load --lr 1", "--can-load"),
        ("x --diff y z", "x"),
        ("--diff y z --ckpt-step 3", "--ckpt-step 3"),
    ):
        with expect_error(ConfigError, fact):
            tool.main(words.split())


def test_a_fine_tuned_model_has_a_command_of_its_own(root: Path, said: Said, tmp_path: Path) -> None:
    """No command that pretrains loads it; "unknown model" would send its owner looking for a newer version."""
    shutil.copytree(root / "iter_0000002", tmp_path / "iter_0000002")
    run = tmp_path / "iter_0000002" / "run.json"
    text = run.read_text()
    run.write_text(text.replace('"model": "gpt"', '"model": "bert-mnli"'))
    manifest = Manifest.read(tmp_path / "iter_0000002")
    files = {**manifest.files, "run.json": checksum(run)}
    (tmp_path / "iter_0000002" / MANIFEST).write_text(dataclasses.replace(manifest, files=files).to_json())
    code, answer = said(tmp_path, "--can-load", *FLAGS.split())
    assert code == 1
    check_line(answer, "BERT", "tasks/main.py", "--task MNLI")
