"""Training on answers that are rated alone (KTO): what is computed, what goes on after a stop, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.data import DataConfig
from megatron.core.datasets.build import Part, Source
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.rated import LABEL, MISMATCHED, RatedDatasets
from megatron.core.datasets.samples import TEXT_LENGTH
from megatron.core.models.gpt.model import GPTModel
from megatron.core.objectives.rated import KL, RatedObjective
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.rng import StreamKey
from megatron.errors import CheckpointError, DataError
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.evaluation.first_pass import before_training
from megatron.training.loop import train_from_start_to_end
from megatron.training.run.run import Run, build_run
from megatron.training.step import forward_backward, update_weights
from tests.harness.pairs import write_rated
from tests.harness.runs import saved_model, tiny_config
from tests.harness.sentences import check_line, expect_error
from tests.unit.objectives.test_preference import GPT, NO_DROPOUT, gradients, weights

SIZES = "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --preference-loss kto"


def answer_log_probs(run: Run, tensors: Any, prefix: str = "") -> torch.Tensor:
    """Log-probabilities of the answers of a batch from whole logits, or of other answers behind its prompts."""
    [model] = run.models
    assert isinstance(model, GPTModel)
    fields = {name: tensors[f"{prefix}{name}"] for name in ("tokens", "position_ids", "document_ids", "labels")}
    output = model(fields["tokens"], fields["position_ids"], rng_key=StreamKey(0), document_ids=fields["document_ids"])
    found = output.logits_with_gradient().log_softmax(-1).gather(2, fields["labels"].unsqueeze(2)).squeeze(2)
    each: torch.Tensor = (found * tensors[f"{prefix}loss_mask"]).sum(1)
    return each


@pytest.mark.parametrize("lower", [0.3, -0.3])
def test_gradients_are_those_of_whole_logits(lower: float) -> None:
    """The baseline is the mean of the whole batch, not of a microbatch, is never below 0, and has no gradient.
    Validation has the same loss.
    """
    flags = f"--mock-data --load unread {SIZES} {NO_DROPOUT} --preference-beta 0.3 --undesirable-weight 1.5 --dry-run"
    run = build_run(tiny_config(flags), GPT, ParallelContext.single(dtype=torch.float64), started=0.0)
    before_training(run)
    assert isinstance(run.train_spec, RatedObjective)
    for dataset in run.train_spec._datasets:
        dataset.scores.values[:, 1] -= lower
    batch = next(run.data.training_batches(0))
    evaluated = evaluate(run, iter([batch])).means
    sums = forward_backward(run, batch)
    ours = {name: gradient.clone() for name, gradient in gradients(run).items()}
    run.grad_sync.zero()
    with torch.no_grad():
        ratios = [
            answer_log_probs(run, each.tensors, MISMATCHED) - each.tensors["reference_scores"][:, 1] for each in batch
        ]
    baseline = torch.cat(ratios).mean().clamp(min=0)
    total = torch.zeros((), dtype=torch.float64)
    for each in batch:
        reward = answer_log_probs(run, each.tensors) - each.tensors["reference_scores"][:, 0]
        value = (0.3 * (reward - baseline)).sigmoid()
        total = total + torch.where(each.tensors[LABEL] == 1, 1 - value, 1.5 * value).sum()
    total.backward()  # type: ignore[no-untyped-call]
    for name, gradient in gradients(run).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    losses = update_weights(run, sums).losses
    assert losses["kto"] == pytest.approx(total.item() / 4)
    assert losses[KL] == pytest.approx(max(lower, 0), abs=1e-9)
    assert {name: losses[name] for name in evaluated} == pytest.approx(evaluated)


def rated_part(folder: Path, *, answers: int, seq_length: int, mismatched: bool = True) -> Any:
    """A data set of rated answers from files."""
    prefix = write_rated(folder / "rated", answers=answers, longest=12, vocab_size=50)
    documents, targets = IndexedDataset(prefix), IndexedDataset(f"{prefix}_targets")
    source = Source(documents, IndexCache(None), ids_known=True, targets=targets)
    reader = RatedDatasets(DataConfig(seq_length=seq_length), seed=1, vocab_size=50, mismatched=mismatched)
    part = Part(source, "train", range(reader.count_units(documents)), 0)
    return reader.dataset(part, None, remedy="")


def test_each_prompt_has_the_answer_of_another_sample(tmp_path: Path) -> None:
    """A baseline of the samples' own answers would be their reward, and nothing would be learned."""
    dataset = rated_part(tmp_path, answers=9, seq_length=16)
    seen = set()
    for index in range(9):
        sample = dataset[index]
        number, other = dataset.order.find(index), dataset.partners[dataset.order.find(index)]
        prompt, answer = (dataset.read(each) for each in (number, other))
        expected = [*prompt.ids[~prompt.is_answer], *answer.ids[answer.is_answer]]
        count = sample[f"{MISMATCHED}{TEXT_LENGTH}"].item()
        assert sample[f"{MISMATCHED}tokens"][:count].tolist() + [sample[f"{MISMATCHED}labels"][count - 1]] == expected
        assert sample[f"{MISMATCHED}loss_mask"].sum() == answer.is_answer.sum()
        assert sample[LABEL] == 1 + number % 2 and number != other
        seen.add(int(other))
    assert len(seen) == 9


def test_other_answers_are_cut_at_the_end_of_a_sample(tmp_path: Path) -> None:
    """A prompt and an answer that fit alone may not fit together."""
    dataset = rated_part(tmp_path, answers=30, seq_length=11)
    lengths = [dataset[index][f"{MISMATCHED}{TEXT_LENGTH}"].item() for index in range(len(dataset))]
    masks = [dataset[index][f"{MISMATCHED}loss_mask"].sum() for index in range(len(dataset))]
    assert max(lengths) == 11 and min(masks) > 0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained model in ``saved``, and nine rated answers in ``rated``."""
    folder = tmp_path_factory.mktemp("base")
    saved_model(folder, "gpt", flags=f"--seed 5 {NO_DROPOUT}")
    write_rated(folder / "rated", answers=9, longest=12, vocab_size=50)
    return folder


def train(base: Path, more: str, data: str = "rated") -> Run:
    """A run on the answers that starts from the model, in fp64."""
    flags = (
        f"--pretrained-checkpoint {base}/saved --data-path {base}/{data} --data-cache-path {base}/cache {SIZES} "
        f"--split 1,0,0 {NO_DROPOUT} --tokenizer-type NullTokenizer {more}"
    )
    return train_from_start_to_end(tiny_config(flags), GPT, ParallelContext.single(dtype=torch.float64), started=0.0)


@pytest.mark.slow  # three runs; the default tier resumes DPO by the same code, and compares gradients of KTO
def test_a_run_goes_on_with_the_same_baseline(base: Path, tmp_path: Path) -> None:
    """Scores of other answers are kept with the file, so a run that goes on has the baseline of the whole run."""
    whole = weights(train(base, f"--train-iters 3 --save {tmp_path}/whole"))
    saving = f"--save {tmp_path}/run --load {tmp_path}/run --save-interval 1"
    train(base, f"--train-iters 3 --exit-interval 2 {saving}")
    again = train(base, f"--train-iters 3 {saving}")
    assert again.progress.iteration == 3
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(again).items())
    kept = tmp_path / "run" / "reference_log_probs.npz"
    kept.unlink()
    with expect_error(CheckpointError, kept, "--finetune"):
        train(base, f"--train-iters 3 {saving}")


def test_data_that_are_no_rated_answers(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pairs are two rated answers each; single texts have no label, one answer has no other, and DPO compares two."""
    write_rated(base / "one", answers=1, longest=12, vocab_size=50)
    with expect_error(DataError, f"{base}/one", "apo_zero_unpaired"):
        train(base, "--train-iters 1", "one")
    for name in ("texts", "texts_targets"):
        with IndexedDatasetWriter(base / name, np.uint8) as written:
            written.add_document([1, 2, 3])
    with expect_error(DataError, f"{base}/texts", "tools/preprocess_preferences.py"):
        train(base, "--train-iters 1", "texts")
    with expect_error(DataError, f"{base}/rated", "kto"):
        train(base, "--train-iters 1 --preference-loss dpo")
    capsys.readouterr()
    train(base, "--train-iters 1 --desirable-weight 2")
    check_line(capsys.readouterr().out, f"{base}/rated", "desirable", "--undesirable-weight")
