"""Between the command line and the run: what is read, how long the run is, and how scores are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.config.lora import LoraConfig
from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError, DataError
from megatron.planning.adapters import check_adapters
from megatron.training.reporting.metrics import Evaluation
from tasks.fine_tuning.files import LabelledText, LabelledTexts
from tasks.fine_tuning.predictions import Predictions
from tasks.fine_tuning.run import Scores, in_iterations, read
from tasks.fine_tuning.train_spec import ClassificationSpec, LabelledData
from tasks.result import TaskResult, write_result
from tasks.settings import FineTunedBertConfig, TaskConfig
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import words

ROWS = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\ta\tb\t0\n"


def config_of(flags: str) -> RunConfig:
    given = words(f"--load x --vocab-file v {flags}", without="--mock-data --train-iters")
    return parse_run(given, world_size=1, extra_groups=(TaskConfig, FineTunedBertConfig))


def texts(count: int) -> LabelledTexts:
    return LabelledTexts("x", "x", [LabelledText((("a", "b"),), 0, Path("x"), line) for line in range(count)])


@pytest.mark.parametrize(("samples", "iterations"), [(1, 1), (4, 1), (5, 2), (10, 3)])
def test_epochs_are_iterations(samples: int, iterations: int) -> None:
    """Samples of the last batch of an epoch would be dropped, or an evaluation fall inside an epoch."""
    flags = "--task QQP --epochs 3 --train-data a --global-batch-size 4 --save y"
    config = in_iterations(config_of(flags), texts(samples))
    training = config.training
    assert (training.train_iters, training.eval_interval) == (3 * iterations, iterations)
    assert config.checkpoint.save_interval == iterations
    assert config.data.full_validation
    asked = in_iterations(config_of(f"{flags} --save-interval 7"), texts(samples))
    assert asked.checkpoint.save_interval == 7


def test_a_new_head_is_trained_beside_adapters() -> None:
    """--lora-rank froze it, and the scores were those of random weights."""
    given = words(
        "--load x --vocab-file v --train-data t --task QQP --epochs 1 --lora-rank 2",
        without="--mock-data --train-iters",
    )
    groups, spec = (TaskConfig, FineTunedBertConfig, LoraConfig), ClassificationSpec("QQP", LabelledData())
    run = parse_run(given, world_size=1, extra_groups=groups).with_vocab_size(30)
    with expect_error(ConfigError, "--lora-rank 2", "'classification_head.*'", "'pooler.*'"):
        check_adapters(run, spec)
    more = [*given, "--train-only", "classification_head.*", "pooler.*"]
    check_adapters(parse_run(more, world_size=1, extra_groups=groups).with_vocab_size(30), spec)


def test_a_score_alone_needs_no_length() -> None:
    config = in_iterations(config_of("--task QQP --epochs 0 --valid-data a"), None)
    assert config.training.skip_train and config.training.train_iters is None
    assert config.data.full_validation


def test_what_is_read(tmp_path: Path) -> None:
    """Training files are one set, read only to train; validation sets of one name would hide each other."""
    paths = tuple(str(tmp_path / name) for name in ("one.tsv", "two.tsv"))
    for path in paths:
        Path(path).write_text(ROWS)
    task = TaskConfig(task="QQP", train_data=paths, valid_data=paths[:1], epochs=2)
    data = read(task)
    assert data.train is not None and len(data.train.texts) == 2
    assert [len(each.texts) for each in data.valid.values()] == [1]
    assert read(replace(task, epochs=0, train_data=("none",))).train is None
    Path(paths[0]).write_text("id\tquestion1\tquestion2\n0\ta\tb\n")
    with expect_error(DataError, "one.tsv", "QQP's"):
        read(task)
    scored = replace(task, train_data=(), valid_data=paths, epochs=0, predictions_dir="p")
    assert [each.has_labels for each in read(scored).valid.values()] == [False, True]
    with expect_error(DataError, "--valid-data", "one.tsv", hide=[r"name \S+"]):
        read(replace(scored, valid_data=(paths[0], paths[0])))


def test_a_set_without_labels_has_no_score() -> None:
    """Zero of zero would be a division by zero, or a score that isn't one."""
    unscored = Evaluation({"lm loss": (0.0, 0.0), "accuracy": (0.0, 0.0)}, seconds=1.0)
    scored = Evaluation({"lm loss": (1.0, 2.0), "accuracy": (1.0, 2.0)}, seconds=1.0)
    scores, run = Scores(None), mock.Mock()
    run.progress.iteration = 3
    scores.report(run, {"test": unscored})
    assert not run.reporter.say.called
    assert scores.metrics == {}
    scores.report(run, {"test": unscored, "dev": scored})
    assert scores.metrics["total"] == 2
    assert "test" not in run.reporter.say.call_args.args[0]


def test_scores_are_told_as_megatron_tells_them() -> None:
    """Scripts look for these lines; epochs count from 0, and −1 is a score without training."""
    found = {
        "dev-high": Evaluation({"lm loss": (6.0, 8.0), "accuracy": (6.0, 8.0)}, seconds=1.23456),
        "dev-middle": Evaluation({"lm loss": (1.0, 2.0), "accuracy": (1.0, 2.0)}, seconds=0.5),
    }
    for epoch, iteration, number in ((5, 5, 0), (5, 15, 2), (None, 15, -1)):
        scores, run = Scores(epoch), mock.Mock()
        run.progress.iteration = iteration
        scores.report(run, found)
        assert run.reporter.say.call_args.args[0].splitlines() == [
            f" > |epoch: {number}| metrics for dev-high: correct / total = 6 / 8 = 75.0000 %, "
            "elapsed time (sec): 1.235",
            f" > |epoch: {number}| metrics for dev-middle: correct / total = 1 / 2 = 50.0000 %, "
            "elapsed time (sec): 0.500",
            f" >> |epoch: {number}| overall: correct / total = 7 / 10 = 70.0000 %",
        ]
        assert scores.metrics["accuracy"] == 0.7
        assert scores.metrics["loss"] == 0.7
        assert scores.metrics["dev-high accuracy"] == 0.75


def test_predictions_of_texts_and_not_of_padding(tmp_path: Path) -> None:
    """The text whose number padding has, the last one, would get an answer that nobody gave."""
    task = config_of(f"--task QQP --epochs 0 --valid-data a --predictions-dir {tmp_path}").group(TaskConfig)
    found = Predictions(task, {"dev": texts(2)}, torch.device("cpu"))
    found.note(torch.tensor([1, 0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    found.note(torch.tensor([-1]), torch.tensor([[1.0, 0.0]]))
    assert found.write(ParallelContext.single()) == (f" > predictions for dev: 2 in {tmp_path}/dev.tsv",)
    assert (tmp_path / "dev.tsv").read_text() == "index\tprediction\n\t0\n\t1\n"


def test_a_full_disk_at_the_end_is_one_sentence(tmp_path: Path) -> None:
    """After hours of evaluation, a traceback of OSError."""
    full, reason = Path("/dev/full"), "No space left on device"
    if not full.exists():
        pytest.skip("needs a device that is always full")
    (tmp_path / "dev.tsv").symlink_to(full)
    flags = f"--task QQP --epochs 0 --valid-data a --predictions-dir {tmp_path} --result-file {full}"
    config, context = config_of(flags), ParallelContext.single()
    with expect_error(DataError, full, reason, "--result-file", exit_code=1):
        write_result(TaskResult(lines=(), metrics={}, data=(), checkpoint=None), config, context, seconds=1.0)
    found = Predictions(config.group(TaskConfig), {"dev": texts(1)}, context.device)
    found.note(torch.tensor([0]), torch.tensor([[0.0, 1.0]]))
    with expect_error(DataError, tmp_path / "dev.tsv", reason, "--predictions-dir", exit_code=1):
        found.write(context)
