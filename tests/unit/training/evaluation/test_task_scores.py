"""Scores of tasks while a model trains: they are those of the checkpoint, and change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.config.eval_tasks import EvalTask, eval_tasks_of
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError, DataError
from megatron.training.checkpoints.trained_model import load_model
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.task_scores import read_task
from megatron.training.evaluation.zero_shot.task import likelihoods
from megatron.training.loop import train_and_save
from megatron.training.reporting.events import Event, Observers
from megatron.training.run.run import Run
from tests.harness.ranks import run_ranks
from tests.harness.runs import tiny_config, tiny_run
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse

FLAGS = "--mock-data --log-interval 1 --eval-iters 0"


def corpus(folder: Path) -> str:
    """The flag with three tasks on texts of numbers, which the tiny model's tokenizer reads."""
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": f"1 2 3 {n}"}) + "\n" for n in range(4, 9)))
    (folder / "wiki.txt").write_text("1 2 3 4 5 6 7 8 9 10 11 12")
    (folder / "any.txt").write_text("3 1 4 1 5 9 2 6 5 3 5 8 9 7 9")
    files = {"LAMBADA": "lambada.jsonl", "WIKITEXT103": "wiki.txt", "LM": "any.txt"}
    return "--eval-tasks " + " ".join(f"{name}={folder}/{file}" for name, file in files.items())


class Seen:
    """Keeps the numbers that a run tells of."""

    def __init__(self, run: Run) -> None:
        self.numbers: dict[int, dict[str, float]] = {}
        run.reporter.observers = Observers(self)

    def see(self, event: Event) -> None:
        if event.name == "numbers":
            self.numbers[event.fields["iteration"]] = event.fields["values"]

    def close(self) -> None: ...


def scores(context: ParallelContext, flags: str) -> dict[int, dict[str, float]]:
    """What a run of three steps in fp64 tells."""
    run = tiny_run(context, f"{FLAGS} {flags}")
    seen = Seen(run)
    train_and_save(run)
    return seen.numbers


def test_scores_are_those_of_the_checkpoint_and_training_goes_on_as_without(tmp_path: Path) -> None:
    """A copy of the model, or one in another mode, would score another model, or train one."""
    tasks = corpus(tmp_path)
    saving = f"--save {tmp_path}/run --save-interval 2"
    run = tiny_run(ParallelContext.single(), f"{FLAGS} {tasks} --eval-tasks-interval 2 {saving}")
    seen = Seen(run)
    train_and_save(run)
    assert run.models[0].training
    plain = tiny_run(ParallelContext.single(), FLAGS)
    train_and_save(plain)
    for one, other in zip(run.models[0].parameters(), plain.models[0].parameters()):
        assert torch.equal(one, other)
    assert list(seen.numbers) == [2, 3]
    config = tiny_config(f"--mock-data --load {tmp_path}/run --ckpt-step 2")
    evaluator = Evaluator(load_model(config, run.train_spec, ParallelContext.single()))
    for named in eval_tasks_of(run.config.reporting.eval_tasks):
        task = read_task(named)
        samples = task.samples(run.tokenizer, length=config.data.seq_length)
        found = task.scores(likelihoods(evaluator, samples, compare=task.compares, reports=False)).metrics
        assert {name: found[name] for name in task.shown} == {
            name: seen.numbers[2][f"{named.label} {name}"] for name in task.shown
        }


def test_scores_of_a_layout_are_those_of_one_rank(tmp_path: Path) -> None:
    """Sharded weights (ZeRO 3), stages and tensor-parallel ranks give the same numbers."""
    tasks = f"{corpus(tmp_path)} --hidden-dropout 0 --attention-dropout 0"  # tensor-parallel ranks draw their own
    single = scores(ParallelContext.single(), tasks)
    flags = f"{tasks} --use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    for found in (*run_ranks(scores, flags, dp=2), *run_ranks(scores, f"{tasks} {sizes}", tp=2, pp=2)):
        assert found.keys() == single.keys() == {3}
        assert found[3] == pytest.approx(single[3], rel=1e-5)


@pytest.mark.parametrize("words", ["LAMBDA=a", "LM", "LM=a LM=a"])
def test_words_that_name_no_task_or_no_file(words: str) -> None:
    """A misspelt task would be measured by nobody."""
    with expect_error(ConfigError, "--eval-tasks", exit_code=2):
        parse(f"--eval-tasks {words}")


def test_two_files_of_one_task_have_names_of_their_own() -> None:
    """One curve of both would jump between them."""
    tasks = eval_tasks_of(["LM=a/x.txt", "LM=b/y.txt", "LAMBADA=c"])
    assert [each.label for each in tasks] == ["LM x.txt", "LM y.txt", "LAMBADA"]


def test_files_are_read_before_training(tmp_path: Path) -> None:
    """A missing file would end the run at the first evaluation."""
    with expect_error(DataError, tmp_path / "gone", exit_code=2):
        read_task(EvalTask("LM", str(tmp_path / "gone"), "LM"))
