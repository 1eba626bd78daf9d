"""Training on pairs of answers: what is computed, what the initial model's log-probabilities belong to, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.registry import FAMILIES
from megatron.core.objectives.preference import PreferenceObjective
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.rng import StreamKey
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training.checkpoints.published import digest_of_files
from megatron.training.evaluation.first_pass import before_training
from megatron.training.loop import train_from_start_to_end
from megatron.training.run.run import Run, build_run
from megatron.training.step import forward_backward, update_weights
from tests.harness.pairs import write_pairs
from tests.harness.runs import saved_model, tiny_config
from tests.harness.sentences import check_line, expect_error

GPT = FAMILIES["gpt"].train_spec
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope"
PAIRS = "--split 1,0,0 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --preference-loss dpo"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model in ``saved``, and nine pairs in ``pairs``."""
    folder = tmp_path_factory.mktemp("base")
    saved_model(folder, "gpt", flags=f"--seed 5 {NO_DROPOUT}")
    write_pairs(folder / "pairs", pairs=9, longest=16, vocab_size=50)
    return folder


def flags_of(base: Path, more: str = "") -> str:
    """A run on the pairs that starts from the model."""
    return (
        f"--pretrained-checkpoint {base}/saved --data-path {base}/pairs --data-cache-path {base}/cache {PAIRS} "
        f"{NO_DROPOUT} --tokenizer-type NullTokenizer {more}"
    )


def train(flags: str) -> Run:
    """The whole run, in fp64."""
    return train_from_start_to_end(tiny_config(flags), GPT, ParallelContext.single(dtype=torch.float64), started=0.0)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {entry.name: entry.tensor.clone() for entry in run.model_state()}


def gradients(run: Run) -> dict[str, torch.Tensor]:
    entries = ((buffer, entry) for buffer in run.buffers for bucket in buffer.buckets for entry in bucket.entries)
    return {entry.name: entry.span.of(buffer.grads) for buffer, entry in entries}


def expected(run: Run, tensors: Any, beta: float) -> torch.Tensor:
    """DPO's loss of a batch from whole logits, with the model's own log-probabilities as those of the initial one."""
    [model] = run.models
    assert isinstance(model, GPTModel)
    output = model(
        tensors["tokens"],
        tensors["position_ids"],
        rng_key=StreamKey(0),
        document_ids=tensors["document_ids"],
    )
    found = output.logits_with_gradient().log_softmax(-1).gather(2, tensors["labels"].unsqueeze(2)).squeeze(2)
    chosen, rejected = ((found * (tensors["answer"] == side)).sum(1) for side in (1, 2))
    margin = beta * (chosen - rejected)
    return -logsigmoid(margin - margin.detach()).sum()


def test_gradients_are_those_of_whole_logits() -> None:
    """The loss is computed from log-probabilities without a gradient, whose slopes then weight a cross entropy."""
    pairs = PAIRS.removeprefix("--split 1,0,0 ")
    config = tiny_config(f"--mock-data --load unread {pairs} {NO_DROPOUT} --preference-beta 0.3 --dry-run")
    run = build_run(config, GPT, ParallelContext.single(dtype=torch.float64), started=0.0)
    before_training(run)
    batch = next(run.data.training_batches(0))
    sums = forward_backward(run, batch)
    ours = {name: gradient.clone() for name, gradient in gradients(run).items()}
    run.grad_sync.zero()
    sum(expected(run, each.tensors, 0.3) for each in batch).backward()  # type: ignore[union-attr]
    for name, gradient in gradients(run).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    record = update_weights(run, sums)
    assert record.losses["dpo"] == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-7)
    assert record.losses["rewards/margins"] == pytest.approx(0, abs=1e-12)


def test_a_run_goes_on_with_the_same_initial_model(base: Path, tmp_path: Path) -> None:
    """A run that goes on has other weights than the initial ones, so log-probabilities of those must be kept: computed
    anew they would make every reward begin at 0.
    """
    whole = weights(train(flags_of(base, f"--train-iters 3 --save {tmp_path}/whole")))
    saving = f"--save {tmp_path}/run --load {tmp_path}/run --save-interval 1"
    train(flags_of(base, f"--train-iters 3 --exit-interval 2 {saving}"))
    again = train(flags_of(base, f"--train-iters 3 {saving}"))
    assert again.progress.iteration == 3
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(again).items())
    kept = tmp_path / "run" / "reference_log_probs.npz"
    content = kept.read_bytes()
    kept.unlink()
    with expect_error(CheckpointError, kept, "--finetune"):
        train(flags_of(base, f"--train-iters 3 {saving}"))
    write_pairs(tmp_path / "pairs", pairs=9, longest=16, vocab_size=50, seed=1)
    other = flags_of(base).replace(f"{base}/pairs", f"{tmp_path}/pairs")
    train(f"{other} --train-iters 1 --preference-reference {kept}")
    with expect_error(CheckpointError, kept, "--finetune"):
        train(flags_of(base, f"--train-iters 3 {saving}"))
    with expect_error(ConfigError, kept, f"{base}/pairs"):
        train(flags_of(base, f"--train-iters 1 --preference-reference {kept}"))
    kept.write_bytes(content[:-100])
    with expect_error(CheckpointError, kept):
        train(flags_of(base, f"--train-iters 3 {saving}"))


def test_log_probabilities_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    """Held to another model than the one that it starts from, a run would lose what that has learned."""
    saved_model(tmp_path, "gpt", flags=f"--seed 6 {NO_DROPOUT}")
    place = f"--preference-reference {tmp_path}/scores.npz --train-iters 1"
    train(flags_of(base, place))
    train(flags_of(base, place))  # the same model and pairs: read
    other = flags_of(base, place).replace(f"{base}/saved", f"{tmp_path}/saved")
    with expect_error(ConfigError, f"{tmp_path}/scores.npz", "--preference-reference"):
        train(other)


def test_published_weights_of_the_same_sizes_are_another_model(tmp_path: Path) -> None:
    """Scores of one fine-tuned model were taken for those of another of the same architecture, or of one with an
    adapter.
    """
    folders = [tmp_path / name for name in ("one", "other", "copy")]
    for folder, weights in zip(folders, (b"1234", b"4321", b"1234")):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "README.md").write_text(folder.name)  # no part of the model
    one, other, copy = (digest_of_files(str(folder)) for folder in folders)
    assert one == copy != other


def test_log_probabilities_have_a_place_before_they_are_computed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of scoring were lost when the file couldn't be written in the end, for want of its folder, too."""
    file = tmp_path / "file"
    file.touch()
    with monkeypatch.context() as without_scoring:
        without_scoring.setattr(PreferenceObjective, "_computed", None)
        with expect_error(ConfigError, f"--preference-reference {file}/ref.npz", file):
            train(flags_of(base, f"--train-iters 1 --preference-reference {file}/ref.npz"))
    train(flags_of(base, f"--train-iters 1 --preference-reference {tmp_path}/new/folder/ref.npz"))
    assert [each.name for each in (tmp_path / "new" / "folder").iterdir()] == ["ref.npz"]


def test_a_checkpoint_is_one_of_the_family(base: Path, tmp_path: Path) -> None:
    """Text generation, export and a plain run read it: the objective is no part of the model."""
    train(flags_of(base, f"--train-iters 1 --save {tmp_path}/run"))
    plain = f"--pretrained-checkpoint {tmp_path}/run --mock-data --train-iters 1 {NO_DROPOUT}"
    assert "lm loss" in train(plain).loss_names


def test_pairs_that_are_too_long_are_left_out(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut answer is another answer. How many are left out is said; without any left the run doesn't start."""
    run = train(flags_of(base, "--train-iters 1 --seq-length 8"))
    assert run.progress.iteration == 1
    lengths = IndexedDataset(base / "pairs").lengths.reshape(-1, 2)
    left = int(((lengths - 1).sum(1) > 8).sum())
    assert 0 < left < 9
    check_line(capsys.readouterr().out, f"{left} of 9", "--seq-length 8")
    with expect_error(DataError, "--seq-length 1"):
        train(flags_of(base, "--train-iters 1 --seq-length 1"))


def test_data_without_pairs_are_refused(base: Path, tmp_path: Path) -> None:
    """Conversations for --sft are single texts."""
    for name in ("texts", "texts_targets"):
        with IndexedDatasetWriter(tmp_path / name, np.uint8) as written:
            written.add_document([1, 2, 3])
    flags = flags_of(base, "--train-iters 1").replace(f"{base}/pairs", f"{tmp_path}/texts")
    with expect_error(DataError, f"{tmp_path}/texts", "--preference-loss", "tools/preprocess_preferences.py"):
        train(flags)


@pytest.mark.parametrize("more", ["--sft", ""])
def test_pairs_are_not_trained_on_as_texts(more: str, base: Path) -> None:
    """A run would learn the rejected answers, too."""
    flags = flags_of(base, f"--train-iters 1 {more}").replace(" --preference-loss dpo", "")
    with expect_error(DataError, f"{base}/pairs", "--preference-loss", "tools/preprocess_sft.py"):
        train(flags)
